"""The tasks that run, with the chosen recomputes, and the residencies that decisions imply."""

from collections.abc import Mapping
from dataclasses import dataclass

from twinstream.planner.bound.gaps import passed_over
from twinstream.planner.decide.decisions import Decisions
from twinstream.planner.lifetimes.host_tasks import device_uses
from twinstream.planner.lifetimes.recomputes import with_recomputes
from twinstream.planner.lifetimes.residencies import Residency, TaskClock, chosen_residencies
from twinstream.planner.lifetimes.rounds import Folding, Place
from twinstream.planner.lifetimes.uses import Unit, UnitMap, Use
from twinstream.planner.lifetimes.view import ChainView
from twinstream.schedule.chain import Chain, Task


@dataclass(frozen=True)
class TaskSequence:
    """The tasks that run, with their times if the intervals of the program hold.

    `index` is the chain's task that each stands for (a recompute for the one it goes before);
    `folding` is of the sequence, `chain_folding` of the chain. `away` are the units that are at
    home on the host because that was fixed, and on the device around their uses only; `renewed`
    those that the host makes anew for the next pass, so that staying over its end saves no copy.
    """

    chain: Chain
    tasks: list[Task]
    index: list[int]
    units: UnitMap
    uses: dict[str, list[Use]]
    folding: Folding
    chain_folding: Folding
    clock: TaskClock
    away: frozenset[str] = frozenset()
    renewed: frozenset[str] = frozenset()

    @staticmethod
    def of(view: ChainView, decisions: Decisions, call_ns: Mapping[str, float]) -> "TaskSequence":
        """Make the sequence of decisions; `call_ns` says how long each call takes alone."""
        chain, units = view.chain, view.units
        tasks = with_recomputes(chain, decisions.recomputes(view))
        again = {r.task.task_id: view.position[r.before] for r in chain.recomputes}
        position = view.position | again
        index = [position[task.task_id] for task in tasks]
        chain_folding = view.folding
        places_ns = [decisions.interval_ns[chain_folding.place(i)] for i in index]
        alone_ns = [call_ns[task.call] for task in tasks]
        return TaskSequence(
            chain, tasks, index, units, device_uses(chain, tasks, units), Folding.of(chain, tasks),
            chain_folding, TaskClock(_durations_ns(index, alone_ns, places_ns)),
            frozenset(u.unit_id for u in units.units.values() if decisions.is_away(u)),
            frozenset(units.unit_of_leaf[leaf] for leaf in view.made_on_host),
        )  # fmt: skip

    def residencies(self, decisions: Decisions) -> list[Residency]:
        """Return when each unit is on the device, without time for copies."""

        def keep(unit: Unit, before: int, after: int) -> bool:
            if unit.unit_id in self.away:
                return self._tasks_between(before, after) <= passed_over(self.chain)
            return decisions.keeps(unit, self.gap_place(before, after))

        return chosen_residencies(self.uses, self.units, keep, len(self.tasks))

    def _tasks_between(self, before: int, after: int) -> int:
        """Tasks of the chain between two of the sequence, over the boundary where that is first."""
        cycle = len(self.chain.tasks) if after <= before else 0
        return self.index[after] + cycle - self.index[before] - 1

    def place(self, position: int) -> Place:
        """Return the place of a task of the sequence."""
        return self.folding.place(position)

    def gap_place(self, before: int, after: int) -> Place:
        """Return the place of the gap between two tasks of the sequence, as decisions name it."""
        if after <= before:
            return self.chain_folding.gap_place(1, 0)
        return self.chain_folding.gap_place(self.index[before], self.index[after])


def _durations_ns(
    index: list[int], alone_ns: list[float], intervals_ns: list[float]
) -> list[float]:
    """Each task's interval in the program; a recompute takes its own time out of its task's."""
    found: list[float] = []
    for i, task_ns in enumerate(alone_ns):
        if i + 1 < len(index) and index[i + 1] == index[i]:
            found.append(task_ns)
            continue
        recomputed = i > 0 and index[i - 1] == index[i]
        spent_ns = alone_ns[i - 1] if recomputed else 0.0
        found.append(max(task_ns, intervals_ns[i] - spent_ns))
    return found
