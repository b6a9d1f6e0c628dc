"""What packing is counted in: aligned bytes, what is alive at once, and gaps between bytes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ALIGNMENT_BYTES = 256


def align_up(size_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def live_peak(intervals: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """(most bytes alive at once, first position where they are), of (begin, end, size_bytes)."""
    if not intervals:
        return 0, 0
    last = max(end for _, end, _ in intervals)
    change = np.zeros(last + 1, dtype=np.int64)
    for begin, end, size in intervals:
        change[begin] += align_up(size)
        change[end] -= align_up(size)
    alive = np.cumsum(change)
    return int(alive.max()), int(alive.argmax())


def first_gap(lows: NDArray[np.int64], highs: NDArray[np.int64], size: int) -> int:
    """The lowest offset of `size` free bytes among taken ranges."""
    if not len(lows):
        return 0
    order = lows.argsort(kind="stable")
    low, covered = lows[order], np.maximum.accumulate(highs[order])
    if low[0] >= size:
        return 0
    fits = low[1:] - covered[:-1] >= size
    place = int(fits.argmax()) if len(fits) else 0
    return int(covered[place] if len(fits) and fits[place] else covered[-1])
