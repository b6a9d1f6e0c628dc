"""Give every stay its bytes: offline allocation of intervals in time and address."""

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


def pack(intervals: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Offsets for intervals (begin, end, size_bytes), and the extent they need.

    Greedy by size: the largest first, each at the lowest offset where no interval alive at the
    same time lies. Ties go to the longer, then to the earlier one.
    """
    order = sorted(
        range(len(intervals)),
        key=lambda i: (-intervals[i][2], intervals[i][0] - intervals[i][1], intervals[i][0], i),
    )
    begins, ends, lows, highs = (np.zeros(len(intervals), dtype=np.int64) for _ in range(4))
    offsets = [0] * len(intervals)
    extent = 0
    for placed, index in enumerate(order):
        begin, end, size = intervals[index]
        size = align_up(size)
        alive = (begins[:placed] < end) & (ends[:placed] > begin)
        offset = _first_gap(lows[:placed][alive], highs[:placed][alive], size)
        begins[placed], ends[placed] = begin, end
        lows[placed], highs[placed] = offset, offset + size
        offsets[index] = offset
        extent = max(extent, offset + size)
    return offsets, extent


def _first_gap(lows: NDArray[np.int64], highs: NDArray[np.int64], size: int) -> int:
    """The lowest offset of `size` free bytes among taken ranges."""
    if not len(lows):
        return 0
    order = np.argsort(lows, kind="stable")
    low = lows[order]
    covered = np.maximum.accumulate(highs[order])
    before = np.concatenate((np.zeros(1, dtype=np.int64), covered))
    room = np.concatenate((low, np.full(1, np.iinfo(np.int64).max))) - before
    return int(before[int(np.argmax(room >= size))])
