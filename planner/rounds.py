"""Rounds repeat: plan few, and fold the stays of all onto the timeline of few."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinstream.models.lowering import lower
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.packing import pack_items
from twinstream.planner.residency import Stay
from twinstream.planner.uses import UnitMap
from twinstream.schedule.chain import Chain, Task

PROGRAM_ROUNDS = 3


def with_rounds(chain: Chain, most: int) -> Chain:
    """The chain itself if it has at most so many rounds, else the same step with only so many."""
    if len(chain.round_starts) <= most:
        return chain
    workload = chain.workload.model_copy(update={"rounds_per_step": most})
    spec = ModelSpec.model_validate(chain.model.spec)
    return lower(spec, workload, Recipe.model_validate(chain.recipe))


@dataclass(frozen=True)
class Folding:
    """Positions of a task sequence by round; middle rounds fold onto one.

    `starts` has the position of each round's first task and, last, the number of tasks.
    """

    starts: tuple[int, ...]

    @staticmethod
    def of(chain: Chain, tasks: Sequence[Task]) -> "Folding":
        firsts = {chain.tasks[start].task_id for start in chain.round_starts}
        found = [i for i, task in enumerate(tasks) if task.task_id in firsts]
        return Folding((*found, len(tasks)))

    @property
    def num_rounds(self) -> int:
        return len(self.starts) - 1

    def place(self, position: int) -> tuple[int, int]:
        """(class, offset in its round): classes are 0 first, 1 middle, 2 last."""
        round_ = self.round_of(position)
        last = self.num_rounds - 1
        class_ = 2 if round_ == last and last else min(round_, 1)
        return class_, position - self.starts[round_]

    def intervals(self, begin: int, end: int) -> tuple[tuple[int, int], ...]:
        """A range of positions on the folded timeline of three rounds at the most."""
        if self.num_rounds <= 3:
            return ((begin, end),)
        found: set[tuple[int, int]] = set()
        shift_of_last = self.starts[-2] - self.starts[2]
        for round_ in range(self.round_of(begin), self.num_rounds):
            low, high = max(begin, self.starts[round_]), min(end, self.starts[round_ + 1])
            if low >= high:
                break
            shift = 0
            if round_ == self.num_rounds - 1:
                shift = shift_of_last
            elif round_:
                shift = self.starts[round_] - self.starts[1]
            found.add((low - shift, high - shift))
        return tuple(sorted(found))

    def round_of(self, position: int) -> int:
        """The round that a position is in, counted from 0."""
        low, high = 0, self.num_rounds - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.starts[middle] <= position else (low, middle - 1)
        return low


def pack_folded(
    stays: Sequence[Stay], units: UnitMap, folding: Folding, *, enough: int | None = None
) -> tuple[list[int], int]:
    """Offsets of stays and the extent; stays of a unit that fold onto each other share bytes.

    Steady rounds so use identical slots, and the cost does not grow with their number.
    """
    by_unit: dict[str, list[_Item]] = {}
    for index, stay in enumerate(stays):
        new = _Item(
            {index}, set(folding.intervals(stay.begin, stay.end)), stay.enters or stay.leaves
        )
        apart = []
        for item in by_unit.get(stay.unit, ()):
            if item.meets(new):
                new.take_in(item)
            else:
                apart.append(item)
        by_unit[stay.unit] = [*apart, new]
    items = [(unit, item) for unit, found in by_unit.items() for item in found]
    offsets, extent = pack_items(
        [(item.merged(), units.units[unit].tensor.size_bytes) for unit, item in items],
        enough=enough,
    )
    offset_of = [0] * len(stays)
    for (_, item), offset in zip(items, offsets, strict=True):
        for index in item.stays:
            offset_of[index] = offset
    return offset_of, extent


@dataclass
class _Item:
    """Stays of a unit that share bytes, and when, folded, they are alive."""

    stays: set[int]
    intervals: set[tuple[int, int]]
    over_boundary: bool

    def meets(self, other: "_Item") -> bool:
        if self.over_boundary and other.over_boundary:
            return True
        return any(
            low < high_ and low_ < high
            for low, high in self.intervals
            for low_, high_ in other.intervals
        )

    def take_in(self, other: "_Item") -> None:
        self.stays |= other.stays
        self.intervals |= other.intervals
        self.over_boundary |= other.over_boundary

    def merged(self) -> tuple[tuple[int, int], ...]:
        """Disjoint intervals in order."""
        found: list[tuple[int, int]] = []
        for low, high in sorted(self.intervals):
            if found and low <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], high))
            else:
                found.append((low, high))
        return tuple(found)
