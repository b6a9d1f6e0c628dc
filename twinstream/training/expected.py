"""What a plan expects of the lengths of documents: a few that stand for all of the data."""

import numpy as np
from numpy.typing import NDArray

from twinstream.schedule.workload import Packing

_MOST_EXPECTED = 1024
_ROOM, _MORE_ROOM = 4, 8  # a chunk has room for so many times what is expected, and some more


def expected_packing(lengths: NDArray[np.int64], longest: int) -> Packing:
    """Of `longest` tokens of a chunk: lengths at even quantiles of the data's, scaled to fill it.

    Args:
        lengths: [D], tokens of sampled documents, none longer than `longest`.

    >>> expected_packing(np.array([10, 10, 40, 40]), 100).expected_lengths
    (10, 10, 40, 40)
    """
    count = min(_MOST_EXPECTED, max(1, round(longest / float(lengths.mean()))))
    at = (np.arange(count) + 0.5) / count
    chosen = np.quantile(lengths, at, method="inverted_cdf").astype(np.float64)
    bounds = np.rint(np.cumsum(chosen) * (longest / chosen.sum())).astype(np.int64)
    found = np.diff(bounds, prepend=0)
    found = found[found > 0]
    most = min(longest, _ROOM * count + _MORE_ROOM)
    return Packing(most_sequences=most, expected_lengths=tuple(found.tolist()))
