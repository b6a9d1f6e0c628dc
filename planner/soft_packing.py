"""Give every item its bytes under a cap, cutting short the time that items only wait in."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinstream.planner.packing import align_up, first_gap, moved_ahead

Ranges = tuple[tuple[int, int], ...]
_TRIES = 4


@dataclass(frozen=True)
class SoftItem:
    """Bytes that are alive in disjoint ranges of tasks: as long as wanted first, ever shorter."""

    levels: tuple[Ranges, ...]
    size_bytes: int


@dataclass(frozen=True)
class Packed:
    """By item: its offset, and which of its levels it got. `extent_bytes` may exceed the cap."""

    offsets: NDArray[np.int64]
    levels: NDArray[np.int64]
    extent_bytes: int


def pack_soft(items: Sequence[SoftItem], cap_bytes: int | None) -> Packed:
    """Offsets under a cap where that is possible.

    One after the other, in order of bytes x time, items go to the lowest offset where nothing is
    alive at the same time; where that is beyond the cap, a shorter level is tried. If an item's
    shortest one finds no room, other orders are tried, with those that found none further ahead.
    """
    if not items:
        empty = np.zeros(0, dtype=np.int64)
        return Packed(empty, empty, 0)
    order = sorted(range(len(items)), key=lambda i: (-_area(items[i]), items[i].levels[0][0], i))
    best: Packed | None = None
    for _ in range(_TRIES):
        found = _Board(items, cap_bytes).placed(order)
        if best is None or found.extent_bytes < best.extent_bytes:
            best = found
        if cap_bytes is None or found.extent_bytes <= cap_bytes:
            break
        sizes = np.asarray([align_up(item.size_bytes) for item in items], dtype=np.int64)
        order = moved_ahead(order, found.offsets + sizes > cap_bytes)
    assert best is not None
    return best


def _area(item: SoftItem) -> int:
    return sum(end - begin for begin, end in item.levels[-1]) * align_up(item.size_bytes)


class _Board:
    """Bytes and time, with the ranges of items placed so far."""

    def __init__(self, items: Sequence[SoftItem], cap_bytes: int | None) -> None:
        self._items, self._cap = items, cap_bytes
        pieces = max(1, sum(max(map(len, item.levels)) for item in items))
        self._begins, self._ends, self._lows, self._highs = np.zeros((4, pieces), dtype=np.int64)
        self._count = 0

    def placed(self, order: Sequence[int]) -> Packed:
        offsets = np.zeros(len(self._items), dtype=np.int64)
        levels = np.zeros(len(self._items), dtype=np.int64)
        extent = 0
        for i in order:
            item, size = self._items[i], align_up(self._items[i].size_bytes)
            offset, level = 0, 0
            for level, ranges in enumerate(item.levels):
                if level and ranges == item.levels[level - 1]:
                    continue
                offset = self._lowest(ranges, size)
                if self._cap is None or offset + size <= self._cap:
                    break
            self._put(item.levels[level], offset, offset + size)
            offsets[i], levels[i] = offset, level
            extent = max(extent, offset + size)
        return Packed(offsets, levels, extent)

    def _lowest(self, ranges: Ranges, size: int) -> int:
        begins, ends = self._begins[: self._count], self._ends[: self._count]
        meets = np.zeros(self._count, dtype=np.bool_)
        for begin, end in ranges:
            meets |= (begins < end) & (ends > begin)
        return first_gap(self._lows[: self._count][meets], self._highs[: self._count][meets], size)

    def _put(self, ranges: Ranges, low: int, high: int) -> None:
        for begin, end in ranges:
            n = self._count
            self._begins[n], self._ends[n], self._lows[n], self._highs[n] = begin, end, low, high
            self._count += 1
