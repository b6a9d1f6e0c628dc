"""A map of addresses over time: which bytes of an arena are taken during which tasks.

An item is a rectangle of bytes x tasks (or several, where it is alive in disjoint ranges of tasks).
The map answers where an item has room, and makes room by evicting what is in its way.
"""

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
    """Bytes that are alive in ranges of tasks; `lives` begins with the longest, then shorter."""

    lives: tuple[Ranges, ...]
    size_bytes: int


class AddressMap:
    """Items at offsets, each with one of its lives; some may have no address.

    `offsets` and `lives` are by item, and say nothing of an item without an address; `sizes` are
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
        """The bytes up to the highest address, where every item has one."""
        return int((self.offsets + self.sizes).max())

    def beyond(self, most_bytes: int) -> list[int]:
        """Return the items that end beyond so many bytes."""
        return np.flatnonzero(self.offsets + self.sizes > most_bytes).tolist()

    def place(self, item: int, offset: int, life: int) -> None:
        """Give an item this address for this life."""
        self.remove(item)
        self.offsets[item], self.lives[item] = offset, life
        high = offset + int(self.sizes[item])
        for piece, (begin, end) in enumerate(self._items[item].lives[life], self._first[item]):
            self._begins[piece], self._ends[piece] = begin, end
            self._lows[piece], self._highs[piece] = offset, high

    def remove(self, item: int) -> None:
        """Take an item's address away."""
        mine = slice(self._first[item], self._first[item + 1])
        self._begins[mine] = self._ends[mine] = _NOWHERE

    def lowest(self, item: int, life: int) -> int:
        """The lowest offset where an item without an address has room for a life."""
        met = self._met(self._items[item].lives[life])
        return first_gap(self._lows[met], self._highs[met], int(self.sizes[item]))

    def place_if_free(self, item: int, most_bytes: float, lives: Iterable[int]) -> bool:
        """Place an item for its first life with room within so many bytes; False if none has."""
        known: Ranges = ()
        for life in lives:
            if (ranges := self._items[item].lives[life]) == known:
                continue
            known, offset = ranges, self.lowest(item, life)
            if offset + int(self.sizes[item]) <= most_bytes:
                self.place(item, offset, life)
                return True
        return False

    def rearrange(self, out: Iterable[int], most_bytes: int, lives: Lives, most_steps: int) -> bool:
        """Place items within so many bytes, and what is in their way elsewhere.

        An item that finds no room goes where what it evicts is cheapest: a price per byte, which
        rises each time that an item evicts or is evicted. What was evicted comes next, the largest
        first (an ejection chain).

        Args:
            out: items, none of them larger than the bytes; their addresses are taken away.
            most_bytes: for all items.
            lives: by item, the lives that it may get.
            most_steps: after so many it gives up, with some items left without an address.

        Returns:
            Whether all found room.
        """
        waiting = [(-int(self.sizes[item]), item) for item in out]
        for _, item in waiting:
            self.remove(item)
        heapify(waiting)
        for _ in range(most_steps):
            if not waiting:
                break
            _, item = heappop(waiting)
            if not self.place_if_free(item, most_bytes, lives[item]):
                for other in self._evict_for(item, most_bytes, lives[item][-1]):
                    heappush(waiting, (-int(self.sizes[other]), other))
        return not waiting

    def _evict_for(self, item: int, most_bytes: int, life: int) -> list[int]:
        """Place an item where it evicts the least, and return what it evicted.

        Only offset 0 and the tops of other items are tried: from any other offset the item could
        move down to one of these without evicting more.
        """
        size = int(self.sizes[item])
        met = self._met(self._items[item].lives[life])
        lows, highs, owners = self._lows[met], self._highs[met], self._owner[met]
        places = np.unique(np.append(highs, 0))
        places = places[places + size <= most_bytes]
        weights = self._price[owners] * self.sizes[owners]
        # what stays lies below the place or above its top; most that stays is least evicted
        below, above = _up_to(highs, weights, places), _from(lows, weights, places + size)
        place = int(places[np.argmax(below + above)])
        hit = (lows < place + size) & (highs > place)
        evicted: list[int] = np.unique(owners[hit]).tolist()
        for other in evicted:
            self.remove(other)
        self.place(item, place, life)
        # dearer each time, so that two items do not evict each other for ever
        dearer = [item, *evicted]
        self._price[dearer] = np.minimum(self._price[dearer] * _DEARER, _DEAREST)
        return evicted

    def _met(self, ranges: Ranges) -> NDArray[np.bool_]:
        """Which rectangles are alive in any of the ranges."""
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
    # a gap lies between the highest top so far and the next range's beginning
    low, covered = lows[order], np.maximum.accumulate(highs[order])
    if low[0] >= size:
        return 0
    fits = low[1:] - covered[:-1] >= size
    place = int(fits.argmax()) if len(fits) else 0
    return int(covered[place] if len(fits) and fits[place] else covered[-1])
