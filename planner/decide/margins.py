"""Time for copies, from the copy queues: how early loads begin, how long offloads hold bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twinstream.hardware_profiles.cost import copy_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.decide.task_sequence import TaskSequence
from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.planner.lifetimes.residencies import Residency, residency_intervals
from twinstream.planner.lifetimes.rounds import Place
from twinstream.planner.lifetimes.traffic import traffic_of
from twinstream.planner.limits import LIMITS

_PASSES = 2  # what the first leaves to do in the queue, the second begins with

Bytes = NDArray[np.int64]
AtPlace = Mapping[tuple[str, Place], int]


@dataclass(frozen=True)
class Allowances:
    """How long copies may take, in tasks.

    By unit and place of its first use: how many tasks before that its load may begin. By place of
    its last use: how many tasks after that the offload holds the bytes.
    """

    leads: AtPlace
    drains: AtPlace

    def widened(self, sequence: TaskSequence, residencies: Sequence[Residency]) -> list[Residency]:
        """Return the residencies with time for their copies, joined where the same content meets.

        Not those of units that are to be `away` in between.
        """
        by_unit: dict[str, list[Residency]] = {}
        num_tasks = len(sequence.tasks)
        for residency in residencies:
            first, last = residency.uses[0].position, residency.uses[-1].position
            lead = self.leads.get((residency.unit, sequence.place(first)), 0)
            drain = self.drains.get((residency.unit, sequence.place(last)), 0)
            if lead or drain:
                begin, end = residency.begin - lead, min(num_tasks, residency.end + drain)
                later = residency.end + drain - end
                ahead = (num_tasks + begin, num_tasks) if begin < 0 else None
                residency = replace(
                    residency, begin=max(0, begin), end=end, later=later, ahead=ahead
                )
            by_unit.setdefault(residency.unit, []).append(residency)
        return [
            residency
            for unit, found in by_unit.items()
            for residency in _without_overlap(_joined(found, apart=unit in sequence.away))
        ]


@dataclass(frozen=True)
class QueueModel:
    """Each direction of the link is a queue of copies, one after the other; compute never waits.

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
        self, sequence: TaskSequence, residencies: Sequence[Residency], most_bytes: int | None
    ) -> Allowances:
        """Return the time that copies need, cut where more than `most_bytes` would be alive."""
        traffic = traffic_of(sequence.chain, sequence.units, residencies)
        begins = self._begins(sequence, residencies, traffic.loads)
        ends = self._ends(sequence, residencies, traffic.stores)
        for _ in range(self.trims):
            found = _by_place(sequence, residencies, begins, ends)
            alive = alive_bytes(sequence, found.widened(sequence, residencies))
            if most_bytes is None or alive.max() <= most_bytes:
                break
            _trim(sequence, residencies, begins, ends, alive - most_bytes)
        return _by_place(sequence, residencies, begins, ends)

    def _begins(
        self,
        sequence: TaskSequence,
        residencies: Sequence[Residency],
        loads: Mapping[int, Mapping[str, int]],
    ) -> NDArray[np.int64]:
        clock, num_tasks = sequence.clock, sequence.clock.num_tasks
        begins = bare = np.asarray([residency.begin for residency in residencies], dtype=np.int64)
        loading = [i for i, leaves in loads.items() if leaves]
        may_be_ahead = _may_be_ahead(sequence, residencies, loads) if self.ahead else set[int]()
        next_start_ns = float("inf")
        for _ in range(_PASSES if self.ahead else 1):
            begins = bare.copy()
            for i in sorted(loading, key=lambda i: -residencies[i].uses[0].position):
                due = residencies[i].uses[0].position
                size = _copied_bytes(sequence, residencies[i], loads[i])
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
        residencies: Sequence[Residency],
        stores: Mapping[int, Mapping[int, Mapping[str, int]]],
    ) -> NDArray[np.int64]:
        clock = sequence.clock
        passes = _PASSES if self.outlasting else 1
        ends = bare = np.asarray([residency.end for residency in residencies], dtype=np.int64)
        free_ns = 0.0
        for _ in range(passes):
            ends = bare.copy()
            for position in sorted(stores):
                ready_ns = clock.start_ns[position + 1]
                for i, leaves in stores[position].items():
                    size = _copied_bytes(sequence, residencies[i], leaves)
                    free_ns = max(free_ns, ready_ns) + copy_alone_ns(size, "d2h", self.machine)
                    free_ns = min(free_ns, ready_ns + self.longest_ns)
                    drained = clock.position_after(position, free_ns - ready_ns)
                    last = drained if self.outlasting else min(drained, clock.num_tasks)
                    ends[i] = max(ends[i], last)
            free_ns -= clock.start_ns[-1]
        return ends


def alive_bytes(sequence: TaskSequence, residencies: Sequence[Residency]) -> Bytes:
    """Return the bytes on the device at every task."""
    change = np.zeros(len(sequence.tasks) + 1, dtype=np.int64)
    for begin, end, size_bytes in residency_intervals(sequence.units, residencies):
        change[begin] += align_up(size_bytes)
        change[end] -= align_up(size_bytes)
    return np.cumsum(change[:-1])


def _copied_bytes(sequence: TaskSequence, residency: Residency, leaves: Mapping[str, int]) -> int:
    unit = sequence.units.units[residency.unit]
    return max(1, unit.tensor.size_bytes * len(leaves) // len(unit.leaves))


def _by_place(
    sequence: TaskSequence,
    residencies: Sequence[Residency],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> Allowances:
    leads: dict[tuple[str, Place], int] = {}
    drains: dict[tuple[str, Place], int] = {}
    for residency, begin, end in zip(residencies, begins.tolist(), ends.tolist(), strict=True):
        if begin < residency.begin:
            place = sequence.place(residency.uses[0].position)
            leads[residency.unit, place] = residency.begin - begin
        if end > residency.end:
            place = sequence.place(residency.uses[-1].position)
            drains[residency.unit, place] = end - residency.end
    return Allowances(leads, drains)


def _trim(
    sequence: TaskSequence,
    residencies: Sequence[Residency],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    excess: Bytes,
) -> None:
    """Where too much is alive, end what outlasts the pass before, what was used first there first.

    Then load later what is due last, then end what was used first.
    """
    units = sequence.units.units
    sizes = np.asarray(
        [align_up(units[s.unit].tensor.size_bytes) for s in residencies], dtype=np.int64
    )
    bare_begins = np.asarray([residency.begin for residency in residencies], dtype=np.int64)
    bare_ends = np.asarray([residency.end for residency in residencies], dtype=np.int64)
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
    sequence: TaskSequence, residencies: Sequence[Residency], loads: Mapping[int, Mapping[str, int]]
) -> set[int]:
    """Residencies whose loads may begin in the pass before: a persistent unit's first.

    It must have left before; where it is then, it is at the end of the pass, too.
    """
    last: dict[str, Residency] = {}
    first: dict[str, int] = {}
    for i, residency in enumerate(residencies):
        first.setdefault(residency.unit, i)
        last[residency.unit] = residency
    return {
        i
        for unit, i in first.items()
        if sequence.units.units[unit].persistent
        and not residencies[i].enters
        and not last[unit].leaves
        and set(loads.get(i, {}).values()) == {0}
    }


def _without_overlap(residencies: list[Residency]) -> list[Residency]:
    """Cut the first load's time in the pass before, while that pass's last residency goes on."""
    first, last = residencies[0], residencies[-1]
    if first.ahead is None:
        return residencies
    low, high = max(first.ahead[0], last.end), first.ahead[1]
    if low >= high or last.later:
        return [replace(first, ahead=None), *residencies[1:]]
    return [replace(first, ahead=(low, high)), *residencies[1:]]


def _joined(residencies: Sequence[Residency], *, apart: bool) -> list[Residency]:
    """One unit's residencies in order, joined where they meet with the same content."""
    joined: list[Residency] = []
    for residency in residencies:
        last = joined[-1] if joined else None
        meets = last is not None and residency.begin <= last.end
        if last is not None and meets and not apart and last.continues_in(residency):
            uses = (*last.uses, *residency.uses)
            joined[-1] = replace(
                last, end=residency.end, uses=uses, leaves=residency.leaves, later=residency.later
            )
            continue
        if last is not None and residency.begin < last.end:
            cut = max(last.uses[-1].position + 1, min(last.end, residency.uses[0].position))
            joined[-1] = replace(last, end=cut, later=0)
            residency = replace(residency, begin=max(residency.begin, cut))
        joined.append(residency)
    return joined
