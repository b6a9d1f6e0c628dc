"""Updates that the host CPU makes, in the bound's linear program: of each its share there.

The share of an update that the chain has on the host is 1. Where the place is open it is in
[0, 1]: what the device computes and needs for the update is as much less; the host's time, its use
of host memory, the gradient's copy to the host and the parameter's copy back are as much more. A
schedule has every share 0 or 1, so that the optimum is a bound for every split of the updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from twinstream.hardware_profiles.cost import call_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound.program import LinearProgram
from twinstream.planner.bound.segments import Segments
from twinstream.planner.lifetimes.host_tasks import host_tasks
from twinstream.planner.lifetimes.view import ChainView
from twinstream.schedule.chain import Chain

_GIB = 2.0**30
_Terms = list[tuple[int, float]]


@dataclass(frozen=True)
class HostUpdate:
    """An update that is the host's, or may be: the column of its share, where and what it is.

    `call` is the chain's own; `host_ms` and `dram_gib` are the host's time and bytes, alone.
    """

    column: int
    segment: int
    call: str
    host_ms: float
    dram_gib: float


class HostUpdates:
    """The updates of a chain that the host makes, or may make, by task.

    Args:
        program: gets a column for each share.
        view: of the chain.
        segments: of its tasks.
        machine: with the numbers of its CPU.
        on_host: the same tasks with all updates on the host, where each may be there or on the
            device; None: they are where the chain has them.
    """

    def __init__(
        self,
        program: LinearProgram,
        view: ChainView,
        segments: Segments,
        machine: Machine,
        on_host: Chain | None = None,
    ) -> None:
        self.is_open = on_host is not None
        chain = on_host or view.chain
        roles = {t.tensor_id: t.role for t in chain.tensors}
        sizes = {t.tensor_id: t.size_bytes for t in chain.tensors}
        self.by_task: dict[str, HostUpdate] = {}
        self._of_leaf: dict[str, tuple[HostUpdate, bool]] = {}
        self.sent: list[tuple[int, _Terms]] = []
        self.homes: _Terms = []
        self._sizes = sizes
        found = host_tasks(chain)
        last_touched = _last_touched(view, {task.task_id for task in found}) if found else {}
        for task in found:
            position, call = view.position[task.task_id], chain.calls[task.call]
            update = HostUpdate(
                program.column(lower=0.0 if self.is_open else 1.0), segments.of_task[position],
                view.chain.tasks[position].call, call_alone_ns(call, machine) / 1e6,
                sum(work.host_dram_bytes for work in call.cost) / _GIB,
            )  # fmt: skip
            self.by_task[task.task_id] = update
            for use in (use for uses in view.units.touched(task).values() for use in uses):
                if roles[use.leaf] not in ("parameter", "gradient", "optimizer_state"):
                    continue
                self._of_leaf[use.leaf] = update, use.makes is not None
                gib = sizes[use.leaf] / _GIB
                if use.makes is None and use.leaf in last_touched:
                    at = segments.of_task[last_touched[use.leaf]]
                    self.sent.append((at, [(update.column, gib)]))
                if roles[use.leaf] != "parameter":
                    self.homes.append((update.column, gib))

    @property
    def all(self) -> Sequence[HostUpdate]:
        return tuple(self.by_task.values())

    def reads(self, leaves: Sequence[str], end: int) -> _Terms:
        """Of some leaves the share that the host itself uses at a segment."""
        return self._share(leaves, end, only_made=False)

    def makes(self, leaves: Sequence[str], made: int | None) -> _Terms:
        """Of some leaves the share that the host itself makes at a segment."""
        return [] if made is None else self._share(leaves, made, only_made=True)

    def at(self, segment: int) -> list[HostUpdate]:
        return [update for update in self.by_task.values() if update.segment == segment]

    def sent_gib(self) -> _Terms:
        """Gradients that are copied to the host for its updates."""
        return [term for _, terms in self.sent for term in terms]

    def _share(self, leaves: Sequence[str], segment: int, *, only_made: bool) -> _Terms:
        if not self._of_leaf:
            return []
        total = sum(self._sizes[leaf] for leaf in leaves)
        found: dict[int, float] = {}
        for leaf in leaves:
            update, is_made = self._of_leaf.get(leaf, (None, False))
            if update is not None and update.segment == segment and (is_made or not only_made):
                share = self._sizes[leaf] / total
                found[update.column] = found.get(update.column, 0.0) + share
        return list(found.items())


def _last_touched(view: ChainView, updates: set[str]) -> dict[str, int]:
    """By leaf the position of the last task on it that is no update."""
    return {
        use.leaf: position
        for position, task in enumerate(view.chain.tasks)
        if task.task_id not in updates
        for uses in view.units.touched(task).values()
        for use in uses
    }
