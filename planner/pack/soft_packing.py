"""Give every item its bytes under a cap, cutting short the time that items only wait in."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from twinstream.planner.pack.board import Board, Levels, Ranges, SoftItem
from twinstream.planner.pack.live_bytes import ALIGNMENT_BYTES, live_peak

_STEPS = 1000
_STEPS_PER_ITEM = 20
_GOOD = 1.01
_FAIR = 1.02
_LOWER_BY = 0.1  # of what is left to go
_FAILURES = 6


@dataclass(frozen=True)
class _Stride:
    """By what part of the goal the extent comes down at least, and how long that may be tried."""

    lower_by: float
    items_per_step: int


_BOLD, _CAREFUL = _Stride(0.002, 16), _Stride(0.001, 4)


@dataclass(frozen=True)
class Packed:
    """By item: its offset, and which of its levels it got. `extent_bytes` may exceed the cap."""

    offsets: NDArray[np.int64]
    levels: NDArray[np.int64]
    extent_bytes: int


def pack_soft(items: Sequence[SoftItem], cap_bytes: int | None, *, tight: bool = False) -> Packed:
    """Offsets under a cap where that is possible.

    One after the other, of most bytes x time first, items go to the lowest offset where nothing is
    alive at the same time; where that is beyond the cap, a shorter level is tried. What still
    sticks out goes where least is in its way, and that elsewhere (`Board.rearrange`). Then items
    get longer levels where there is room for them. If it is to be `tight`, the extent is brought
    near the most bytes alive at once in the same way, but little by little: mostly within 3 %.
    Offsets are aligned to 256 bytes, and always the same.
    """
    if not items:
        empty = np.zeros(0, dtype=np.int64)
        return Packed(empty, empty, 0)
    packing = _Packing(items, inf if cap_bytes is None else cap_bytes)
    packing.place()
    fits = packing.fit()
    packing.lengthen()
    if fits and tight:
        packing.tighten()
        packing.lengthen()
    board = packing.board
    return Packed(board.offsets, board.levels, board.extent_bytes)


class _Packing:
    def __init__(self, items: Sequence[SoftItem], cap_bytes: float) -> None:
        self.board = Board(items)
        self._items, self._cap = items, cap_bytes
        self._levels = [range(len(item.levels)) for item in items]

    def place(self) -> None:
        """All items, each at the lowest offset that is free; beyond the cap as short as it gets."""
        board, last = self.board, [len(item.levels) - 1 for item in self._items]
        for item in self._order():
            if not board.put_if_free(item, self._cap, self._levels[item]):
                board.put(item, board.lowest(item, last[item]), last[item])

    def fit(self) -> bool:
        """Bring all that sticks out under the cap; if that is not to be, everything stays."""
        if self._cap == inf or self.board.extent_bytes <= self._cap:
            return True
        hopeless = self._peak([len(item.levels) - 1 for item in self._items]) > self._cap
        most_steps = _STEPS + len(self._items)
        return not hopeless and self._rearranged(int(self._cap), self._levels, most_steps)

    def lengthen(self) -> None:
        """Longer levels under the cap, until nothing gets any."""
        board, longer = self.board, True
        while longer:
            longer = False
            for item in np.flatnonzero(board.levels).tolist():
                offset, level = int(board.offsets[item]), int(board.levels[item])
                board.take(item)
                alive = self._items[item].levels
                shorter = (n for n in range(level) if alive[n] != alive[level])
                if offset + board.sizes[item] <= self._cap and board.put_if_free(
                    item, self._cap, shorter
                ):
                    longer = True
                else:
                    board.put(item, offset, level)

    def tighten(self) -> None:
        """Bring the extent near the most bytes alive at once; that is the cap from then on.

        Little by little. Where that does not come near, again with more care; then, from the
        beginning, all at once first: what a few pieces need is found that way or not at all.
        """
        placed = self._placed()
        levels = [(level,) for level in placed[1]]
        peak = self._peak(placed[1])
        goal = max(peak, int(peak * _GOOD) // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        self._lowered(goal, levels, _BOLD)
        for from_the_beginning in (False, True):
            if self.board.extent_bytes <= _FAIR * peak:
                break
            extent, best = self.board.extent_bytes, self._placed()
            self.board.forget_prices()
            if from_the_beginning:
                self._put(placed)
                self._rearranged(goal, levels, _STEPS)
            self._lowered(goal, levels, _CAREFUL)
            if self.board.extent_bytes > extent:
                self._put(best)
        self._cap = self.board.extent_bytes

    def _placed(self) -> tuple[list[int], list[int]]:
        """Offsets and levels of all items."""
        return self.board.offsets.tolist(), self.board.levels.tolist()

    def _put(self, placed: tuple[list[int], list[int]]) -> None:
        for item, (offset, level) in enumerate(zip(*placed, strict=True)):
            self.board.put(item, offset, level)

    def _order(self) -> list[int]:
        """By bytes x time without that for copies, the most first; then by begin."""
        bare = np.asarray([_length(item.levels[-1]) for item in self._items], dtype=np.float64)
        begins = np.asarray([item.levels[0][0][0] for item in self._items], dtype=np.int64)
        order: list[int] = np.lexsort((begins, -self.board.sizes * np.maximum(bare, 1.0))).tolist()
        return order

    def _lowered(self, goal_bytes: int, levels: Levels, stride: _Stride) -> None:
        """Bring the extent down towards the goal, little by little: then little is in the way.

        After a failure the next attempt is half as bold; after a few the extent stays.
        """
        most_steps = _STEPS + len(self._items) // stride.items_per_step
        bold, failures = 1.0, 0
        while failures < _FAILURES and (left := self.board.extent_bytes - goal_bytes) > 0:
            by = bold * max(_LOWER_BY * left, stride.lower_by * goal_bytes, ALIGNMENT_BYTES)
            lower = goal_bytes + max(0, int(left - by))
            if not self._rearranged(lower, levels, most_steps):
                bold, failures = bold / 2.0, failures + 1

    def _rearranged(self, most_bytes: int, levels: Levels, most_steps: int) -> bool:
        """Whether everything is within so many bytes now; if not, it is where it was."""
        board = self.board
        if int(board.sizes.max()) > most_bytes:
            return False
        before = self._placed()
        most_steps = min(most_steps, _STEPS_PER_ITEM * len(self._items))
        if board.rearrange(board.beyond(most_bytes), most_bytes, levels, most_steps):
            return True
        self._put(before)
        return False

    def _peak(self, levels: Sequence[int]) -> int:
        """Most bytes alive at once, with these levels."""
        sizes = self.board.sizes.tolist()
        return live_peak(
            [
                (begin, end, size)
                for item, size, level in zip(self._items, sizes, levels, strict=True)
                for begin, end in item.levels[level]
            ]
        )[0]


def _length(ranges: Ranges) -> int:
    return sum(end - begin for begin, end in ranges)
