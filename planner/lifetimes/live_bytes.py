"""Aligned sizes, and how many bytes are alive at once."""

from collections.abc import Sequence

import numpy as np

ALIGNMENT_BYTES = 256


def align_up(size_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def live_peak(intervals: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Return (most bytes alive at once, first position of that) of (begin, end, size_bytes)."""
    if not intervals:
        return 0, 0
    last = max(end for _, end, _ in intervals)
    change = np.zeros(last + 1, dtype=np.int64)
    for begin, end, size in intervals:
        change[begin] += align_up(size)
        change[end] -= align_up(size)
    alive = np.cumsum(change)
    return int(alive.max()), int(alive.argmax())
