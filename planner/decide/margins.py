"""How early to load and how long to hold for an offload, from the backlog of the copy queues."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twinstream.hardware_profiles.cost import copy_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.decide.task_sequence import TaskSequence
from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.planner.lifetimes.rounds import Place
from twinstream.planner.lifetimes.stays import Stay, stay_intervals
from twinstream.planner.lifetimes.traffic import traffic_of
from twinstream.planner.limits import LIMITS

_PASSES = 2  # what the first leaves to do in the queue, the second begins with

Bytes = NDArray[np.int64]
AtPlace = Mapping[tuple[str, Place], int]


@dataclass(frozen=True)
class Allowances:
    """By how many tasks a unit's load comes before its first use, by that use's place; and for how
    many it stays after its last use, by that one's place, until its offload is through."""

    leads: AtPlace
    drains: AtPlace

    def widened(self, sequence: TaskSequence, stays: Sequence[Stay]) -> list[Stay]:
        """The stays with room for their copies; stays of the same content that meet are joined.

        Not those of units that are to be `away` in between.
        """
        by_unit: dict[str, list[Stay]] = {}
        num_tasks = len(sequence.tasks)
        for stay in stays:
            first, last = stay.uses[0].position, stay.uses[-1].position
            lead = self.leads.get((stay.unit, sequence.place(first)), 0)
            drain = self.drains.get((stay.unit, sequence.place(last)), 0)
            if lead or drain:
                begin, end = stay.begin - lead, min(num_tasks, stay.end + drain)
                later = stay.end + drain - end
                ahead = (num_tasks + begin, num_tasks) if begin < 0 else None
                stay = replace(stay, begin=max(0, begin), end=end, later=later, ahead=ahead)
            by_unit.setdefault(stay.unit, []).append(stay)
        return [
            stay
            for unit, found in by_unit.items()
            for stay in _without_overlap(_joined(found, apart=unit in sequence.away))
        ]


@dataclass(frozen=True)
class QueueModel:
    """Each direction as a queue that copies one unit after the other, compute never waiting.

    A load is issued early enough that all loads after it can still be in time, an offload gets
    until all before it are through; at most `longest_ns` of compute time each way. Passes follow
    each other without a pause: offloads of one, if they may be `outlasting`, take until some time
    into the next; loads for the first tasks, if they may be `ahead`, begin in the one before. What
    overruns memory is trimmed so many times.
    """

    machine: Machine
    longest_ns: float
    outlasting: bool = True
    ahead: bool = False
    trims: int = LIMITS.tries

    def allowances(
        self, sequence: TaskSequence, stays: Sequence[Stay], most_bytes: int | None
    ) -> Allowances:
        """What copies need; cut short where more than `most_bytes` would be alive."""
        traffic = traffic_of(sequence.chain, sequence.units, stays)
        begins = self._begins(sequence, stays, traffic.loads)
        ends = self._ends(sequence, stays, traffic.stores)
        for _ in range(self.trims):
            found = _by_place(sequence, stays, begins, ends)
            alive = alive_bytes(sequence, found.widened(sequence, stays))
            if most_bytes is None or alive.max() <= most_bytes:
                break
            _trim(sequence, stays, begins, ends, alive - most_bytes)
        return _by_place(sequence, stays, begins, ends)

    def _begins(
        self,
        sequence: TaskSequence,
        stays: Sequence[Stay],
        loads: Mapping[int, Mapping[str, int]],
    ) -> NDArray[np.int64]:
        clock, num_tasks = sequence.clock, sequence.clock.num_tasks
        begins = bare = np.asarray([stay.begin for stay in stays], dtype=np.int64)
        loading = [i for i, leaves in loads.items() if leaves]
        may_be_ahead = _may_be_ahead(sequence, stays, loads) if self.ahead else set[int]()
        next_start_ns = float("inf")
        for _ in range(_PASSES if self.ahead else 1):
            begins = bare.copy()
            for i in sorted(loading, key=lambda i: -stays[i].uses[0].position):
                due = stays[i].uses[0].position
                size = _copied_bytes(sequence, stays[i], loads[i])
                end_ns = min(clock.start_ns[due], next_start_ns)
                next_start_ns = max(
                    end_ns - copy_alone_ns(size, "h2d", self.machine),
                    clock.start_ns[due] - self.longest_ns,
                )
                if next_start_ns < 0.0 and i in may_be_ahead:
                    begins[i] = clock.position_before(num_tasks, -next_start_ns) - num_tasks
                else:
                    begins[i] = clock.position_before(due, clock.start_ns[due] - next_start_ns)
            next_start_ns += clock.start_ns[-1]
        return begins

    def _ends(
        self,
        sequence: TaskSequence,
        stays: Sequence[Stay],
        stores: Mapping[int, Mapping[int, Mapping[str, int]]],
    ) -> NDArray[np.int64]:
        clock = sequence.clock
        passes = _PASSES if self.outlasting else 1
        ends = bare = np.asarray([stay.end for stay in stays], dtype=np.int64)
        free_ns = 0.0
        for _ in range(passes):
            ends = bare.copy()
            for position in sorted(stores):
                ready_ns = clock.start_ns[position + 1]
                for i, leaves in stores[position].items():
                    size = _copied_bytes(sequence, stays[i], leaves)
                    free_ns = max(free_ns, ready_ns) + copy_alone_ns(size, "d2h", self.machine)
                    free_ns = min(free_ns, ready_ns + self.longest_ns)
                    drained = clock.position_after(position, free_ns - ready_ns)
                    last = drained if self.outlasting else min(drained, clock.num_tasks)
                    ends[i] = max(ends[i], last)
            free_ns -= clock.start_ns[-1]
        return ends


def alive_bytes(sequence: TaskSequence, stays: Sequence[Stay]) -> Bytes:
    """Bytes on the device at every task."""
    change = np.zeros(len(sequence.tasks) + 1, dtype=np.int64)
    for begin, end, size_bytes in stay_intervals(sequence.units, stays):
        change[begin] += align_up(size_bytes)
        change[end] -= align_up(size_bytes)
    return np.cumsum(change[:-1])


def _copied_bytes(sequence: TaskSequence, stay: Stay, leaves: Mapping[str, int]) -> int:
    unit = sequence.units.units[stay.unit]
    return max(1, unit.tensor.size_bytes * len(leaves) // len(unit.leaves))


def _by_place(
    sequence: TaskSequence,
    stays: Sequence[Stay],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> Allowances:
    leads: dict[tuple[str, Place], int] = {}
    drains: dict[tuple[str, Place], int] = {}
    for stay, begin, end in zip(stays, begins.tolist(), ends.tolist(), strict=True):
        if begin < stay.begin:
            place = sequence.place(stay.uses[0].position)
            leads[stay.unit, place] = stay.begin - begin
        if end > stay.end:
            place = sequence.place(stay.uses[-1].position)
            drains[stay.unit, place] = end - stay.end
    return Allowances(leads, drains)


def _trim(
    sequence: TaskSequence,
    stays: Sequence[Stay],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    excess: Bytes,
) -> None:
    """Where too much is alive, end what outlasts the pass before, what was used first there first.

    Then load later what is due last, then end what was used first.
    """
    units = sequence.units.units
    sizes = np.asarray([align_up(units[s.unit].tensor.size_bytes) for s in stays], dtype=np.int64)
    bare_begins = np.asarray([stay.begin for stay in stays], dtype=np.int64)
    bare_ends = np.asarray([stay.end for stay in stays], dtype=np.int64)
    num_tasks = len(sequence.tasks)

    def load_after(task: int, early: NDArray[np.int64]) -> None:
        """Of what is loaded early; a task less than 0 is one of the pass before."""
        for i in early[np.argsort(-bare_begins[early], kind="stable")]:
            if excess[task] <= 0:
                break
            excess[max(0, begins[i]) : max(0, task + 1)] -= sizes[i]
            if begins[i] < 0:
                excess[begins[i] : min(task + 1, 0) or None] -= sizes[i]
            begins[i] = task + 1

    def end_before(task: int) -> None:
        late = np.flatnonzero((bare_ends <= task) & (task < ends))
        for i in late[np.argsort(bare_ends[late], kind="stable")]:
            if excess[task % num_tasks] <= 0:
                break
            excess[task : ends[i]] -= sizes[i]
            excess[max(0, task - num_tasks) : max(0, ends[i] - num_tasks)] -= sizes[i]
            ends[i] = task

    for task in np.flatnonzero(excess > 0).tolist():
        end_before(task + num_tasks)
        load_after(task - num_tasks, np.flatnonzero(begins <= task - num_tasks))
        load_after(task, np.flatnonzero((begins <= task) & (task < bare_begins)))
        end_before(task)


def _may_be_ahead(
    sequence: TaskSequence, stays: Sequence[Stay], loads: Mapping[int, Mapping[str, int]]
) -> set[int]:
    """Stays whose loads may begin in the pass before: a unit's first, of what persists.

    It must have left before; where it is then, it is at the end of the pass, too.
    """
    last: dict[str, Stay] = {}
    first: dict[str, int] = {}
    for i, stay in enumerate(stays):
        first.setdefault(stay.unit, i)
        last[stay.unit] = stay
    return {
        i
        for unit, i in first.items()
        if sequence.units.units[unit].persistent
        and not stays[i].enters
        and not last[unit].leaves
        and set(loads.get(i, {}).values()) == {0}
    }


def _without_overlap(stays: list[Stay]) -> list[Stay]:
    """One unit's stays; the first is not loaded ahead while the last of the pass before goes on."""
    first, last = stays[0], stays[-1]
    if first.ahead is None:
        return stays
    low, high = max(first.ahead[0], last.end), first.ahead[1]
    if low >= high or last.later:
        return [replace(first, ahead=None), *stays[1:]]
    return [replace(first, ahead=(low, high)), *stays[1:]]


def _joined(stays: Sequence[Stay], *, apart: bool) -> list[Stay]:
    """One unit's stays in order: joined where they meet with the same content, else kept apart."""
    joined: list[Stay] = []
    for stay in stays:
        last = joined[-1] if joined else None
        meets = last is not None and stay.begin <= last.end
        if last is not None and meets and not apart and last.goes_on_in(stay):
            uses = (*last.uses, *stay.uses)
            joined[-1] = replace(
                last, end=stay.end, uses=uses, leaves=stay.leaves, later=stay.later
            )
            continue
        if last is not None and stay.begin < last.end:
            cut = max(last.uses[-1].position + 1, min(last.end, stay.uses[0].position))
            joined[-1] = replace(last, end=cut, later=0)
            stay = replace(stay, begin=max(stay.begin, cut))
        joined.append(stay)
    return joined
