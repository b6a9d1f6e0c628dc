"""Bytes and time, with items at offsets: what is free where, and what is in whose way."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from twinstream.planner.lifetimes.live_bytes import align_up

Bytes = NDArray[np.int64]
Weights = NDArray[np.float64]
Ranges = tuple[tuple[int, int], ...]
Lives = Sequence[Sequence[int]]

_NOWHERE = -1
_DEARER = 1.3
_DEAREST = 1e12


@dataclass(frozen=True)
class SoftItem:
    """Bytes that are alive in disjoint ranges of tasks: as long as wanted first, ever shorter."""

    lives: tuple[Ranges, ...]
    size_bytes: int


class Board:
    """Items at offsets, each with one of its lives; some may be off the board.

    `offsets` and `lives` are by item, and say nothing of one that is off the board; `sizes` are
    aligned.
    """

    def __init__(self, items: Sequence[SoftItem]) -> None:
        self._items = items
        self.sizes = np.asarray([align_up(item.size_bytes) for item in items], dtype=np.int64)
        self.offsets, self.lives = np.zeros((2, len(items)), dtype=np.int64)
        pieces = [max(map(len, item.lives)) for item in items]
        self._first = np.concatenate([[0], np.cumsum(pieces)]).tolist()
        self._owner = np.repeat(np.arange(len(items)), pieces)
        self._begins, self._ends = np.full((2, len(self._owner)), _NOWHERE, dtype=np.int64)
        self._lows, self._highs = np.zeros((2, len(self._owner)), dtype=np.int64)
        self._price = np.ones(len(items))

    @property
    def extent_bytes(self) -> int:
        """What the items take, all of them on the board."""
        return int((self.offsets + self.sizes).max())

    def beyond(self, most_bytes: int) -> list[int]:
        """Items that stick out of so many bytes."""
        return np.flatnonzero(self.offsets + self.sizes > most_bytes).tolist()

    def put(self, item: int, offset: int, life: int) -> None:
        self.take(item)
        self.offsets[item], self.lives[item] = offset, life
        high = offset + int(self.sizes[item])
        for piece, (begin, end) in enumerate(self._items[item].lives[life], self._first[item]):
            self._begins[piece], self._ends[piece] = begin, end
            self._lows[piece], self._highs[piece] = offset, high

    def take(self, item: int) -> None:
        """Off the board."""
        mine = slice(self._first[item], self._first[item + 1])
        self._begins[mine] = self._ends[mine] = _NOWHERE

    def lowest(self, item: int, life: int) -> int:
        """The lowest offset where an item that is off the board has room at a life."""
        met = self._met(self._items[item].lives[life])
        return first_gap(self._lows[met], self._highs[met], int(self.sizes[item]))

    def put_if_free(self, item: int, most_bytes: float, lives: Iterable[int]) -> bool:
        """An item that is off the board, at the first life with room within so many bytes."""
        known: Ranges = ()
        for life in lives:
            if (ranges := self._items[item].lives[life]) == known:
                continue
            known, offset = ranges, self.lowest(item, life)
            if offset + int(self.sizes[item]) <= most_bytes:
                self.put(item, offset, life)
                return True
        return False

    def rearrange(self, out: Iterable[int], most_bytes: int, lives: Lives, most_steps: int) -> bool:
        """Put items within so many bytes, and elsewhere what is in their way.

        One without room goes where what it drives off is cheapest: by bytes, and dearer the more
        often it was in question. What was driven off comes next, the largest first.

        Args:
            out: items, none of them larger than the bytes; they are taken off the board.
            most_bytes: for all items.
            lives: by item, the lives that it may get.
            most_steps: after so many it gives up, with some items off the board.

        Returns:
            Whether all found room.
        """
        waiting = [(-int(self.sizes[item]), item) for item in out]
        for _, item in waiting:
            self.take(item)
        heapify(waiting)
        for _ in range(most_steps):
            if not waiting:
                break
            _, item = heappop(waiting)
            if not self.put_if_free(item, most_bytes, lives[item]):
                for other in self._driven_off_by(item, most_bytes, lives[item][-1]):
                    heappush(waiting, (-int(self.sizes[other]), other))
        return not waiting

    def _driven_off_by(self, item: int, most_bytes: int, life: int) -> list[int]:
        """What had to go where an item was put, the cheapest place there is.

        That is at the bottom or on top of something: whatever else moves down to there unhindered.
        """
        size = int(self.sizes[item])
        met = self._met(self._items[item].lives[life])
        lows, highs, owners = self._lows[met], self._highs[met], self._owner[met]
        places = np.unique(np.append(highs, 0))
        places = places[places + size <= most_bytes]
        weights = self._price[owners] * self.sizes[owners]
        below, above = _up_to(highs, weights, places), _from(lows, weights, places + size)
        place = int(places[np.argmax(below + above)])
        hit = (lows < place + size) & (highs > place)
        driven_off: list[int] = np.unique(owners[hit]).tolist()
        for other in driven_off:
            self.take(other)
        self.put(item, place, life)
        dearer = [item, *driven_off]
        self._price[dearer] = np.minimum(self._price[dearer] * _DEARER, _DEAREST)
        return driven_off

    def _met(self, ranges: Ranges) -> NDArray[np.bool_]:
        """Pieces that are alive in any of the ranges."""
        met = np.zeros(len(self._begins), dtype=np.bool_)
        for begin, end in ranges:
            met |= (self._begins < end) & (self._ends > begin)
        return met


def _up_to(keys: Bytes, weights: Weights, at: Bytes) -> Weights:
    """The weights of all keys that are not above each place."""
    order = np.argsort(keys, kind="stable")
    sums = np.append(0.0, np.cumsum(weights[order]))
    return sums[np.searchsorted(keys[order], at, side="right")]


def _from(keys: Bytes, weights: Weights, at: Bytes) -> Weights:
    """The weights of all keys that are not below each place."""
    return _up_to(-keys, weights, -at)


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
