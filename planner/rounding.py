"""From the fractions of the bound's program to decisions on units and blocks."""

from dataclasses import dataclass

from twinstream.planner.bound import LowerBound
from twinstream.planner.rounds import Folding
from twinstream.planner.uses import Unit, UnitMap
from twinstream.schedule.chain import Chain

_ALWAYS_KEPT = ("input", "loss", "scratch")
Place = tuple[int, int]
GapKey = tuple[str, Place, Place, bool]


@dataclass(frozen=True)
class Decisions:
    """Kept share of every unit's gaps, recompute level before and time of every task, by place.

    A place is (class of the round, task's offset in it), the same for all middle rounds.
    """

    kept: dict[GapKey, float]
    levels: dict[Place, str]
    slot_ns: dict[Place, float]

    @staticmethod
    def of(solved: LowerBound, chain: Chain, units: UnitMap) -> "Decisions":
        """From a solution for the same chain, of at most three rounds."""
        folding = Folding.of(chain, chain.tasks)
        kept_bytes: dict[GapKey, float] = {}
        all_bytes: dict[GapKey, float] = {}
        sizes = {t.tensor_id: t.size_bytes for t in chain.tensors}
        for choice in solved.choices:
            begin, end = choice.gap.begin, choice.gap.end
            crosses = end <= begin or folding.round_of(begin) != folding.round_of(end)
            places = folding.place(begin), folding.place(end)
            for leaf in choice.element.leaves:
                key = (units.unit_of_leaf[leaf], *places, crosses)
                kept_bytes[key] = kept_bytes.get(key, 0.0) + choice.kept * sizes[leaf]
                all_bytes[key] = all_bytes.get(key, 0.0) + sizes[leaf]
        kept = {key: kept_bytes[key] / all_bytes[key] for key in all_bytes}
        slot_ns = {folding.place(i): ms * 1e6 for i, ms in enumerate(solved.slot_ms)}
        return Decisions(kept, _levels(solved, chain, folding), slot_ns)

    def recomputes(self, chain: Chain) -> dict[str, str]:
        """The level of every group of a chain of any number of rounds."""
        folding = Folding.of(chain, chain.tasks)
        position = {task.task_id: i for i, task in enumerate(chain.tasks)}
        found: dict[str, str] = {}
        for recompute in chain.recomputes:
            level = self.levels.get(folding.place(position[recompute.before]))
            if level is not None:
                found[recompute.group] = level
        return found

    def keeps(self, unit: Unit, before: Place, after: Place, *, crosses: bool) -> bool:
        """Whether a unit stays on the device over a gap; all crossings of rounds are alike."""
        if crosses and (before[0], after[0]) == (1, 1):
            before = (0, before[1])
        if unit.tensor.role in _ALWAYS_KEPT:
            return True
        share = self.kept.get((unit.unit_id, before, after, crosses))
        return share is None or share >= 0.5  # gaps too short for the program are not cut


def _levels(solved: LowerBound, chain: Chain, folding: Folding) -> dict[Place, str]:
    """The level of each block with most weight, no recompute included."""
    position = {task.task_id: i for i, task in enumerate(chain.tasks)}
    weight: dict[Place, dict[str, float]] = {}
    for recompute in chain.recomputes:
        level = recompute.task.label.level or ""
        place = folding.place(position[recompute.before])
        weight.setdefault(place, {})[level] = solved.recomputed[recompute.task.task_id]
    found: dict[Place, str] = {}
    for place, levels in weight.items():
        level = max(levels, key=lambda name: levels[name])
        if sum(levels.values()) >= 0.5:
            found[place] = level
    return found
