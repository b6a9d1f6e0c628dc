"""Give every stay its bytes: offline allocation of intervals in time and address."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ALIGNMENT_BYTES = 256
_TRIES = 24
_GOOD_ENOUGH = 1.01


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

    Greedy, each interval at the lowest offset where nothing alive at the same time lies, in order
    of bytes x time alive, the most first; then better orders are looked for by moving the intervals
    that stick out ahead, until the extent is within 1 % of the live peak, or tries run out.
    """
    sizes = np.asarray([align_up(size) for _, _, size in intervals], dtype=np.int64)
    if not len(sizes):
        return [], 0
    meets = _meetings(intervals)
    peak, _ = live_peak(intervals)
    order = sorted(
        range(len(intervals)),
        key=lambda i: (
            -(intervals[i][1] - intervals[i][0]) * int(sizes[i]), intervals[i][0], i
        ),
    )  # fmt: skip
    best, best_extent = _placed(order, meets, sizes)
    offsets, extent = best, best_extent
    for _ in range(_TRIES):
        if best_extent <= peak * _GOOD_ENOUGH:
            break
        order = moved_ahead(order, offsets + sizes >= extent)
        offsets, extent = _placed(order, meets, sizes)
        if extent < best_extent:
            best, best_extent = offsets, extent
    return [int(offset) for offset in best], best_extent


def _meetings(intervals: Sequence[tuple[int, int, int]]) -> list[NDArray[np.int64]]:
    """For each interval those alive at the same time, itself left out."""
    begins = np.asarray([begin for begin, _, _ in intervals], dtype=np.int64)
    ends = np.asarray([end for _, end, _ in intervals], dtype=np.int64)
    meetings = []
    for i, (begin, end, _) in enumerate(intervals):
        alive = (begins < end) & (ends > begin)
        alive[i] = False
        meetings.append(np.flatnonzero(alive))
    return meetings


def _placed(
    order: Sequence[int], meetings: Sequence[NDArray[np.int64]], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int]:
    offsets = np.full(len(sizes), -1, dtype=np.int64)
    for i in order:
        others = meetings[i]
        placed = others[offsets[others] >= 0]
        low = offsets[placed]
        offsets[i] = first_gap(low, low + sizes[placed], int(sizes[i]))
    return offsets, int((offsets + sizes).max())


def moved_ahead(order: Sequence[int], sticking_out: NDArray[np.bool_]) -> list[int]:
    """The order with the items that set the extent twice as early."""
    changed = [i for i in order if not sticking_out[i]]
    for place, i in enumerate(order):
        if sticking_out[i]:
            changed.insert(place // 2, i)
    return changed


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
