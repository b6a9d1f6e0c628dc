"""Give every item its bytes under a cap, cutting short the time that items only wait in."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from twinstream.planner.packing import align_up, first_gap, live_peak, moved_ahead

Ranges = tuple[tuple[int, int], ...]
_MOST_PLACED = 15_000
_LEAST_ATTEMPTS, _MOST_ATTEMPTS = 2, 6
_POWERS_OF_TIME = (1.0, 0.0, 2.0, 0.5)
_TIGHT = 1.02
_CLEARLY = 1.02


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

    One after the other, items go to the lowest offset where nothing is alive at the same time;
    where that is beyond the cap, a shorter level is tried. They come in several orders, of bytes x
    a power of time, until one wastes little; if none fits the cap, other orders are tried, with
    the items that found no room further ahead.
    """
    if not items:
        empty = np.zeros(0, dtype=np.int64)
        return Packed(empty, empty, 0)
    packing = _Packing(items, cap_bytes)
    attempts = min(_MOST_ATTEMPTS, max(_LEAST_ATTEMPTS, _MOST_PLACED // len(items)))
    powers = _POWERS_OF_TIME[:attempts]
    for power in powers:
        packing.attempt(packing.order(power))
        if packing.is_tight:
            break
    order, found = packing.best_order, packing.best
    for _ in range(attempts - len(powers)):
        if packing.fits:
            break
        order = moved_ahead(order, packing.sticks_out(found))
        if (next_found := packing.attempt(order)) is None:
            break
        found = next_found
    return packing.best


class _Packing:
    """Attempts, and the best of them: it fits, or exceeds least; it costs least; it is smallest."""

    def __init__(self, items: Sequence[SoftItem], cap_bytes: int | None) -> None:
        self._items, self._cap = items, inf if cap_bytes is None else cap_bytes
        self._cap_bytes = cap_bytes
        self._sizes = np.asarray([align_up(item.size_bytes) for item in items], dtype=np.int64)
        self._bare = np.asarray([_length(item.levels[-1]) for item in items], dtype=np.float64)
        self._begins = np.asarray([item.levels[0][0][0] for item in items], dtype=np.int64)
        self._rank: tuple[float, float, int | float] = inf, inf, inf

    def order(self, power: float) -> list[int]:
        """By bytes x a power of the time without that for copies, the most first; then by begin."""
        area = self._sizes * np.maximum(self._bare, 1.0) ** power
        return [int(i) for i in np.lexsort((self._begins, -area))]

    def attempt(self, order: Sequence[int]) -> Packed | None:
        """In this order; None if it comes out clearly larger than the best so far."""
        most_bytes = _CLEARLY * max(self._cap, self._rank[0])
        found = _Board(self._items, self._cap_bytes).placed(order, most_bytes)
        if found is None:
            return None
        lost = sum(
            (_length(self._items[i].levels[0]) - _length(self._items[i].levels[level]))
            * self._items[i].size_bytes
            for i, level in enumerate(found.levels.tolist())
            if level
        )
        rank = max(self._cap, found.extent_bytes), lost, found.extent_bytes
        if rank < self._rank:
            self.best, self.best_order, self._rank = found, order, rank
        return found

    @property
    def fits(self) -> bool:
        return self.best.extent_bytes <= self._cap

    @property
    def is_tight(self) -> bool:
        """Whether nothing gets less time for its copies, and few bytes are wasted."""
        return self.fits and not self._rank[1] and self.best.extent_bytes <= _TIGHT * self._peak

    @cached_property
    def _peak(self) -> int:
        """Most bytes alive at once, were there no cap."""
        wanted = (
            (item.levels[0], size) for item, size in zip(self._items, self._sizes, strict=True)
        )
        return live_peak([(b, e, int(size)) for ranges, size in wanted for b, e in ranges])[0]

    def sticks_out(self, found: Packed) -> NDArray[np.bool_]:
        return found.offsets + self._sizes > self._cap


def _length(ranges: Ranges) -> int:
    return sum(end - begin for begin, end in ranges)


class _Board:
    """Bytes and time, with the ranges of items placed so far."""

    def __init__(self, items: Sequence[SoftItem], cap_bytes: int | None) -> None:
        self._items, self._cap = items, cap_bytes
        pieces = max(1, sum(max(map(len, item.levels)) for item in items))
        self._begins, self._ends, self._lows, self._highs = np.zeros((4, pieces), dtype=np.int64)
        self._count = 0

    def placed(self, order: Sequence[int], most_bytes: float = inf) -> Packed | None:
        """All items, one after the other; None as soon as one lies beyond `most_bytes`."""
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
            if extent > most_bytes:
                return None
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
