"""Give every item an address under a cap, and cut short the time in which items only wait.

An item is alive from when its load may begin to when its offload is through. Where that does not
fit, its shorter lives are tried, down to the tasks that use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from twinstream.planner.lifetimes.live_bytes import live_peak
from twinstream.planner.limits import LIMITS
from twinstream.planner.pack.address_map import AddressMap, Ranges, SoftItem


@dataclass(frozen=True)
class SoftPacking:
    """The offset of each item, and which of its lives it got; `extent_bytes` may exceed the cap."""

    offsets: NDArray[np.int64]
    lives: NDArray[np.int64]
    extent_bytes: int


def pack_soft(
    items: Sequence[SoftItem], cap_bytes: int | None, moves: int = LIMITS.moves
) -> SoftPacking:
    """Place all items, under the cap where that is possible.

    One after the other, of most bytes x time first, items go to the lowest offset where nothing is
    alive at the same time; where that is beyond the cap, a shorter life is tried. What still
    sticks out goes where it evicts least, and that elsewhere (`AddressMap.rearrange`), for so many
    moves and one more per item. Then items get longer lives where there is room for them. Offsets
    are aligned to 256 bytes, and always the same.
    """
    if not items:
        empty = np.zeros(0, dtype=np.int64)
        return SoftPacking(empty, empty, 0)
    packing = _Packing(items, inf if cap_bytes is None else cap_bytes)
    packing.place()
    packing.fit(moves)
    packing.lengthen()
    address_map = packing.address_map
    return SoftPacking(address_map.offsets, address_map.lives, address_map.extent_bytes)


class _Packing:
    def __init__(self, items: Sequence[SoftItem], cap_bytes: float) -> None:
        self.address_map = AddressMap(items)
        self._items, self._cap = items, cap_bytes
        self._lives = [range(len(item.lives)) for item in items]

    def place(self) -> None:
        """Place all items at the lowest free offsets; beyond the cap with their shortest lives."""
        address_map, last = self.address_map, [len(item.lives) - 1 for item in self._items]
        for item in self._order():
            if not address_map.place_if_free(item, self._cap, self._lives[item]):
                address_map.place(item, address_map.lowest(item, last[item]), last[item])

    def fit(self, moves: int) -> None:
        """Bring all that lies beyond the cap under it; if that fails, change nothing."""
        address_map, cap = self.address_map, self._cap
        # an item above the cap, or more bytes alive at once, fit by no arrangement
        if (
            cap == inf
            or address_map.extent_bytes <= cap
            or address_map.sizes.max() > cap
            or self._peak() > cap
        ):
            return
        before = address_map.offsets.tolist(), address_map.lives.tolist()
        most = moves + len(self._items)
        if not address_map.rearrange(address_map.beyond(int(cap)), int(cap), self._lives, most):
            for item, (offset, life) in enumerate(zip(*before, strict=True)):
                address_map.place(item, offset, life)

    def lengthen(self) -> None:
        """Give items longer lives under the cap, until none gets any."""
        address_map, longer = self.address_map, True
        while longer:
            longer = False
            for item in np.flatnonzero(address_map.lives).tolist():
                offset, life = int(address_map.offsets[item]), int(address_map.lives[item])
                address_map.remove(item)
                alive = self._items[item].lives
                shorter = (n for n in range(life) if alive[n] != alive[life])
                if offset + address_map.sizes[item] <= self._cap and address_map.place_if_free(
                    item, self._cap, shorter
                ):
                    longer = True
                else:
                    address_map.place(item, offset, life)

    def _order(self) -> list[int]:
        """Sort items by bytes x time without that for copies, the most first; then by begin."""
        bare = np.asarray([_length(item.lives[-1]) for item in self._items], dtype=np.float64)
        begins = np.asarray([item.lives[0][0][0] for item in self._items], dtype=np.int64)
        order: list[int] = np.lexsort(
            (begins, -self.address_map.sizes * np.maximum(bare, 1.0))
        ).tolist()
        return order

    def _peak(self) -> int:
        """Return the most bytes alive at once, with all lives at their shortest."""
        sizes = self.address_map.sizes.tolist()
        return live_peak(
            [
                (begin, end, size)
                for item, size in zip(self._items, sizes, strict=True)
                for begin, end in item.lives[-1]
            ]
        )[0]


def _length(ranges: Ranges) -> int:
    return sum(end - begin for begin, end in ranges)
