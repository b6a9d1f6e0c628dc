"""Rounds of a step repeat: a few are planned, and all are folded onto the timeline of few."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from twinstream.models.lowering.lower import lower
from twinstream.models.providers.model import model_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.chain import Chain, Task

PROGRAM_ROUNDS = 3
SIMULATED_ROUNDS = 4

# (class, offset in its round): a position of a task sequence, the same for all middle rounds.
Place = tuple[int, int]

_LAST = 2
_CROSSING = 3
_BOUNDARY = 4


def with_rounds(chain: Chain, most: int) -> Chain:
    """Return the chain, cut to so many rounds if it has more."""
    if len(chain.round_starts) <= most:
        return chain
    workload = chain.workload.model_copy(update={"rounds_per_step": most})
    return lower(model_of(chain.model), workload, Recipe.model_validate(chain.recipe))


@dataclass(frozen=True)
class Folding:
    """The positions of a task sequence by round; middle rounds fold onto one.

    `starts` has the position of each round's first task and, last, the number of tasks.
    """

    starts: tuple[int, ...]

    @staticmethod
    def of(chain: Chain, tasks: Sequence[Task]) -> "Folding":
        firsts = {chain.tasks[start].task_id for start in chain.round_starts}
        found = [i for i, task in enumerate(tasks) if task.task_id in firsts]
        return Folding((*found, len(tasks)))

    @cached_property
    def num_rounds(self) -> int:
        return len(self.starts) - 1

    def place(self, position: int) -> Place:
        """Return where a task is: class of its round (0 first, 1 middle, 2 last), offset in it."""
        return self._places[position]

    @cached_property
    def _places(self) -> list[Place]:
        last = self.num_rounds - 1
        return [
            (_LAST if round_ == last and last else min(round_, 1), offset)
            for round_, (start, end) in enumerate(pairwise(self.starts))
            for offset in range(end - start)
        ]

    def gap_place(self, begin: int, end: int) -> Place:
        """Where a unit's gap between two tasks begins, which tells it from the unit's others.

        All gaps from one round to the next that begin alike are one, and so is the only one over
        the boundary between passes.
        """
        if end <= begin:
            return _BOUNDARY, 0
        class_, offset = self.place(begin)
        if self.round_of(begin) != self.round_of(end):
            class_ = _CROSSING
        return class_, offset

    def intervals(self, begin: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return a range of positions on the folded timeline, of three rounds at most."""
        if self.num_rounds <= 3:
            return ((begin, end),)
        first = self.round_of(begin)
        if begin < end <= self.starts[first + 1]:
            shift = self._shift(first)
            return ((begin - shift, end - shift),)
        found: set[tuple[int, int]] = set()
        for round_ in range(first, self.num_rounds):
            low, high = max(begin, self.starts[round_]), min(end, self.starts[round_ + 1])
            if low >= high:
                break
            shift = self._shift(round_)
            found.add((low - shift, high - shift))
        return tuple(sorted(found))

    def _shift(self, round_: int) -> int:
        """How far a round lies behind the one that stands for it."""
        if round_ == self.num_rounds - 1:
            return self.starts[-2] - self.starts[2]
        return self.starts[round_] - self.starts[1] if round_ else 0

    def round_of(self, position: int) -> int:
        """The round that a position is in, counted from 0."""
        return bisect_right(self.starts, position, hi=self.num_rounds) - 1
