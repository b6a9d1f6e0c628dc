"""Give every item its bytes under a cap, cutting short the time that items only wait in."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from twinstream.planner.lifetimes.live_bytes import live_peak
from twinstream.planner.limits import LIMITS
from twinstream.planner.pack.board import Board, Ranges, SoftItem


@dataclass(frozen=True)
class SoftPacking:
    """By item: its offset, and which of its lives it got. `extent_bytes` may exceed the cap."""

    offsets: NDArray[np.int64]
    lives: NDArray[np.int64]
    extent_bytes: int


def pack_soft(
    items: Sequence[SoftItem], cap_bytes: int | None, moves: int = LIMITS.moves
) -> SoftPacking:
    """Offsets under a cap where that is possible.

    One after the other, of most bytes x time first, items go to the lowest offset where nothing is
    alive at the same time; where that is beyond the cap, a shorter life is tried. What still
    sticks out goes where least is in its way, and that elsewhere (`Board.rearrange`), for so many
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
    board = packing.board
    return SoftPacking(board.offsets, board.lives, board.extent_bytes)


class _Packing:
    def __init__(self, items: Sequence[SoftItem], cap_bytes: float) -> None:
        self.board = Board(items)
        self._items, self._cap = items, cap_bytes
        self._lives = [range(len(item.lives)) for item in items]

    def place(self) -> None:
        """All items, each at the lowest offset that is free; beyond the cap as short as it gets."""
        board, last = self.board, [len(item.lives) - 1 for item in self._items]
        for item in self._order():
            if not board.put_if_free(item, self._cap, self._lives[item]):
                board.put(item, board.lowest(item, last[item]), last[item])

    def fit(self, moves: int) -> None:
        """Bring all that sticks out under the cap; if that is not to be, everything stays."""
        board, cap = self.board, self._cap
        if cap == inf or board.extent_bytes <= cap or board.sizes.max() > cap or self._peak() > cap:
            return
        before = board.offsets.tolist(), board.lives.tolist()
        most = moves + len(self._items)
        if not board.rearrange(board.beyond(int(cap)), int(cap), self._lives, most):
            for item, (offset, life) in enumerate(zip(*before, strict=True)):
                board.put(item, offset, life)

    def lengthen(self) -> None:
        """Longer lives under the cap, until nothing gets any."""
        board, longer = self.board, True
        while longer:
            longer = False
            for item in np.flatnonzero(board.lives).tolist():
                offset, life = int(board.offsets[item]), int(board.lives[item])
                board.take(item)
                alive = self._items[item].lives
                shorter = (n for n in range(life) if alive[n] != alive[life])
                if offset + board.sizes[item] <= self._cap and board.put_if_free(
                    item, self._cap, shorter
                ):
                    longer = True
                else:
                    board.put(item, offset, life)

    def _order(self) -> list[int]:
        """By bytes x time without that for copies, the most first; then by begin."""
        bare = np.asarray([_length(item.lives[-1]) for item in self._items], dtype=np.float64)
        begins = np.asarray([item.lives[0][0][0] for item in self._items], dtype=np.int64)
        order: list[int] = np.lexsort((begins, -self.board.sizes * np.maximum(bare, 1.0))).tolist()
        return order

    def _peak(self) -> int:
        """Most bytes alive at once, with all lives at their shortest."""
        sizes = self.board.sizes.tolist()
        return live_peak(
            [
                (begin, end, size)
                for item, size in zip(self._items, sizes, strict=True)
                for begin, end in item.lives[-1]
            ]
        )[0]


def _length(ranges: Ranges) -> int:
    return sum(end - begin for begin, end in ranges)
