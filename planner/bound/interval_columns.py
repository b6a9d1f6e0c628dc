"""The part of the bound's linear program that says how long a step takes.

Each task has an interval, from its start to the start of the next task. It lasts at least as long
as the task alone, and as what is copied in it at full rate; the step is the sum of all intervals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.memories import (
    DISK_READS,
    DISK_WRITES,
    DRIVE,
    MemoryLink,
    drive_ns_per_byte,
)
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound.gap_columns import GIB, ChainGaps, Terms
from twinstream.planner.bound.host_updates import HostUpdates
from twinstream.planner.bound.program import LinearProgram
from twinstream.planner.bound.round_classes import RoundClasses
from twinstream.planner.bound.segments import Segments
from twinstream.schedule.chain import Chain
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import HOST_COMPUTE

_MS_PER_S = 1e3

# By link direction, `h2d` or `d2h`: the share of its rate that may be used in each task's interval.
LinkShares = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Interval:
    """The time from the start of a task to the start of the next, with the recompute before that.

    A load that the next task waits for may go on beside its recompute. Where tasks are taken
    together: from the start of the first one's own recompute to that of the next segment's first.
    It is `length_ms` long; meanwhile `loaded` and `stored` GiB are copied. At its start
    `ahead` GiB lie on the device for later tasks, and `behind` GiB wait there for their copy to
    the host.
    """

    length_ms: int
    loaded: int
    stored: int
    ahead: int
    behind: int


@dataclass(frozen=True)
class Resource:
    """The rows of a resource, one per interval or one for the step, and its rate in GiB/ms."""

    name: str
    rows: list[int]
    gib_per_ms: float
    of_step: bool = False


class ChainIntervals:
    """Intervals of all tasks, and the rows that tie them to the machine and to each other."""

    def __init__(  # noqa: PLR0913
        self,
        program: LinearProgram,
        chain: Chain,
        segments: Segments,
        machine: Machine,
        rounds: RoundClasses,
        updates: HostUpdates,
        *,
        disk_links: Sequence[MemoryLink] = (),
    ) -> None:
        self.disk_links, self.updates = disk_links, updates
        self.program, self.chain, self.machine, self.rounds = program, chain, machine, rounds
        self.segments = segments
        self.calls = {
            name: alone_ms_and_gib(call.cost, machine) if call.processor == "device" else (0.0, 0.0)
            for name, call in chain.calls.items()
        }
        total_gib = 1.0 + 4.0 * sum(t.size_bytes for t in chain.tensors) / GIB
        self._total_gib = total_gib
        longest_ms = self._longest_ms(total_gib)
        self.intervals = [
            Interval(
                program.column(upper=longest_ms),
                *(program.column(upper=total_gib) for _ in range(4)),
            )
            for _ in range(segments.count)
        ]
        alone = [self.calls[task.call] for task in chain.tasks]
        self.alone = [
            (
                sum(alone[i][0] for i in segments.tasks(n)),
                sum(alone[i][1] for i in segments.tasks(n)),
            )
            for n in range(segments.count)
        ]

    def step_ms(self) -> Terms:
        """The step: the sum of all intervals, each middle round counted as often as there are."""
        return [(interval.length_ms, self._weight(i)) for i, interval in enumerate(self.intervals)]

    def add_compute(self, recompute_columns: dict[str, int]) -> list[int]:
        """An interval lasts as long as its task alone, and the recompute before the next."""
        again: list[Terms] = [[] for _ in self.intervals]
        for position, column, alone_ms in self._recomputes(recompute_columns):
            again[position - 1 if self.segments.single else position].append((column, alone_ms))
        for update in self.updates.all:
            again[update.segment].append((update.column, -self.calls[update.call][0]))
        # length >= task alone + recomputes * time alone, in ms
        return [
            self.program.at_most([(interval.length_ms, -1.0), *terms], -alone_ms)
            for (alone_ms, _), interval, terms in zip(
                self.alone, self.intervals, again, strict=True
            )
        ]

    def task_ms(
        self, values: NDArray[np.float64], recompute_columns: dict[str, int]
    ) -> list[float]:
        """Length of every task's interval, were it from the start of its own recompute.

        What a segment takes beyond its tasks is shared out evenly.
        """
        lengths_ms = [float(values[interval.length_ms]) for interval in self.intervals]
        if self.segments.single:
            for position, column, alone_ms in self._recomputes(recompute_columns):
                again_ms = float(values[column]) * alone_ms
                lengths_ms[position - 1] -= again_ms
                lengths_ms[position] += again_ms
            return lengths_ms
        found: list[float] = []
        for number, length_ms in enumerate(lengths_ms):
            tasks = self.segments.tasks(number)
            more_ms = max(0.0, length_ms - self.alone[number][0]) / len(tasks)
            found += [self.calls[self.chain.tasks[i].call][0] + more_ms for i in tasks]
        return found

    def _recomputes(self, recompute_columns: dict[str, int]) -> list[tuple[int, int, float]]:
        """(segment that each is before or in, column, ms alone).

        Before the first task of a class the interval is of another one, which may be recomputed
        another number of times: such recomputes are left out, as if they took no time.
        """
        position = {
            task.task_id: self.segments.of_task[i] for i, task in enumerate(self.chain.tasks)
        }
        found: list[tuple[int, int, float]] = []
        for recompute in self.chain.recomputes:
            at = position[recompute.before]
            if not (self.segments.single and self.rounds.begins_class(at)):
                column = recompute_columns[recompute.task.task_id]
                found.append((at, column, self.calls[recompute.task.call][0]))
        return found

    def add_resources(self, shares: LinkShares | None = None) -> list[Resource]:
        """Add that what is copied in an interval (and computed on HBM) takes its time there.

        Of a link direction an interval gets only the share named, if any is.
        """
        found = []
        weight_load, weight_store = self.machine.duplex_weights()
        for name, field, load, store in (
            ("h2d", "pcie_h2d_bytes_per_s", 1.0, 0.0),
            ("d2h", "pcie_d2h_bytes_per_s", 0.0, 1.0),
            ("pcie", "pcie_duplex_bytes_per_s", weight_load, weight_store),
            ("hbm", "hbm_bytes_per_s", 1.0, 1.0),
            ("host_dram", "host_dram_bytes_per_s", 1.0, 1.0),
        ):
            gib_per_ms = self.machine.rate(field) / GIB / _MS_PER_S
            if gib_per_ms == float("inf"):
                continue
            rows = []
            share = (shares or {}).get(name)
            for i, interval in enumerate(self.intervals):
                computed = self.alone[i][1] if name == "hbm" else 0.0
                usable = gib_per_ms
                if share is not None:
                    tasks = self.segments.tasks(i)
                    usable *= sum(share[task] for task in tasks) / len(tasks)
                # load * loaded + store * stored + what the task draws itself <= rate * length
                terms = [
                    (interval.length_ms, -usable),
                    (interval.loaded, load),
                    (interval.stored, store),
                ]
                if name == "hbm":
                    terms += [(u.column, -self.calls[u.call][1]) for u in self.updates.at(i)]
                rows.append(self.program.at_most(terms, -computed))
            found.append(Resource(name, rows, gib_per_ms))
        return found

    def add_host_updates(self) -> list[Resource]:
        """Add that what the host updates takes its time there, and its part of host memory beside
        all copies, whenever in the step that is."""
        if not self.updates.all:
            return []
        # the host's time alone <= step, in ms
        busy = self._of_step([(update.column, update.host_ms) for update in self.updates.all], 1.0)
        found = [Resource(HOST_COMPUTE, [busy], 0.0, of_step=True)]
        rate = self.machine.rate("host_dram_bytes_per_s") / GIB / _MS_PER_S
        if rate < float("inf"):
            moved = [(update.column, update.dram_gib) for update in self.updates.all]
            for i, interval in enumerate(self.intervals):
                moved += [(c, self._weight(i)) for c in (interval.loaded, interval.stored)]
            # copied + what updates read and write <= rate * step, in GiB
            row = self._of_step(moved, rate)
            found.append(Resource("host_dram", [row], rate, of_step=True))
        return found

    def add_disk(self, gaps: ChainGaps) -> list[Resource]:
        """Add that what a step reads from a disk, and writes there, takes its time, whenever in the
        step that is.

        None where nothing may be at home there.
        """
        moved = {DISK_READS: gaps.read_gib(), DISK_WRITES: gaps.filed_gib()}
        found, drive_ms = list[Resource](), list[tuple[int, float]]()
        for link in self.disk_links:
            rate = self.machine.rate(link.rate_field) / GIB / _MS_PER_S
            if rate == float("inf") or not moved[link]:
                continue
            # read (or written) in the step <= rate * step, in GiB
            row = self._of_step(moved[link], rate)
            found.append(Resource(link.name, [row], rate, of_step=True))
            ms_per_gib = drive_ns_per_byte(self.machine, link) * GIB / 1e6
            drive_ms += [(column, gib * ms_per_gib) for column, gib in moved[link]]
        if len(found) > 1:
            # the time that each takes alone <= overlap * step, in ms
            overlap = self.machine.number("disk_overlap")
            found.append(Resource(DRIVE, [self._of_step(drive_ms, overlap)], 0.0, of_step=True))
        return found

    def _of_step(self, terms: Terms, rate: float) -> int:
        """A row: the terms come to no more than a rate times the step."""
        spent = [(column, -rate * weight) for column, weight in self.step_ms()]
        return self.program.at_most([*terms, *spent], 0.0)

    def add_loads(self, gaps: ChainGaps) -> None:
        """Add that what a task needs is loaded before it starts, and takes memory from then on."""
        due: list[Terms] = [[] for _ in self.intervals]
        for at, terms in gaps.loads():
            if (by := self._due_by(at)) is not None:
                due[by] += terms
        arriving = self._boundaries(
            [(s.ahead, s.loaded) for s in self.intervals], [[] for _ in due]
        )
        for i, interval in enumerate(self.intervals):
            # ahead = ahead before + loaded - due: content lies on the device from its copy on
            self.program.equal([(interval.ahead, 1.0), *due[i], *_negative(arriving[i])], 0.0)

    def _due_by(self, segment: int) -> int | None:
        """The segment before which a load must be through: the next one, of tasks taken together.

        None where that one is of another class of rounds: such loads take no time.
        """
        if self.segments.single:
            return segment
        after = (segment + 1) % len(self.intervals)
        return None if self.rounds.begins_class(after) else after

    def add_stores(self, gaps: ChainGaps) -> None:
        """Add that offloaded content takes memory until it is copied, which it is within a step."""
        made: list[Terms] = [[] for _ in self.intervals]
        for task, terms in gaps.evictions():
            made[task] += terms
        waiting = self._boundaries([(s.behind, -s.stored - 1) for s in self.intervals], made)
        for i, interval in enumerate(self.intervals):
            # behind >= behind before + made here - stored here: what is made waits for its copy
            self.program.at_most([(interval.behind, -1.0), *waiting[i]], 0.0)
        stored = [(s.stored, -self._weight(i)) for i, s in enumerate(self.intervals)]
        # and all that is written in a step is stored in it
        self.program.at_most([*gaps.written_gib(), *stored], 0.0)

    def _boundaries(self, flows: Sequence[tuple[int, int]], made: Sequence[Terms]) -> list[Terms]:
        """What reaches each interval from the one before: its state, what it adds and takes.

        A flow is (state column, added column; -c - 1 for a column taken off). Into the middle
        class lead the first round and the middle rounds themselves, out of it they and the last.
        """

        def after(i: int) -> Terms:
            state, flow = flows[i]
            moved = (flow, 1.0) if flow >= 0 else (-flow - 1, -1.0)
            return [(state, 1.0), moved, *made[i]]

        found = [after(i - 1) for i in range(len(self.intervals))]
        if not self.rounds.folded:
            return found
        first, last = self.rounds.starts[1], self.rounds.starts[2]
        # into the middle: (out of the first + (R - 3) x between) / (R - 2); out of the middle:
        # ((R - 3) x between + into the last) / (R - 2)
        between, into_last = (self.program.column(upper=self._total_gib) for _ in range(2))
        middles = float(self.rounds.num_middles)
        mixed = [(between, (middles - 1.0) / middles)]
        found[first] = [*((c, v / middles) for c, v in found[first]), *mixed]
        leaving = [*_negative(found[last]), *mixed, (into_last, 1.0 / middles)]
        if flows[0][1] >= 0:
            self.program.equal(leaving, 0.0)
        else:
            self.program.at_most(_negative(leaving), 0.0)
        found[last] = [(into_last, 1.0)]
        return found

    def _weight(self, task: int) -> float:
        return self.rounds.weight(self.rounds.of_position(task))

    def _longest_ms(self, total_gib: float) -> float:
        """No interval of an optimum is longer: everything recomputed and moved in it."""
        busy = sum(self.calls[task.call][0] for task in self.chain.tasks)
        busy += sum(self.calls[r.task.call][0] for r in self.chain.recomputes)
        moved = total_gib + sum(self.calls[task.call][1] for task in self.chain.tasks)
        slowest = min(
            self.machine.rate(name)
            for name in (
                "pcie_h2d_bytes_per_s", "pcie_d2h_bytes_per_s", "pcie_duplex_bytes_per_s",
                "hbm_bytes_per_s", "host_dram_bytes_per_s",
            )
        )  # fmt: skip
        for link in self.disk_links:
            slowest = min(slowest, self.machine.rate(link.rate_field))
        # twice: both directions may copy that much, and use the same resource
        return 1.0 + busy + 2.0 * moved * GIB / slowest * _MS_PER_S


def alone_ms_and_gib(cost: Sequence[Work], machine: Machine) -> tuple[float, float]:
    """(ms alone, GiB of HBM traffic) of a call; launches in whole ns, as the simulator has them."""
    times = [work_time(work, machine) for work in cost]
    launch_ns = round(sum(time.launch_ns for time in times))
    # a unit of work takes its FLOPs or its bytes, whichever takes longer; units follow one another
    alone_ns = launch_ns + sum(max(time.compute_ns, time.memory_ns) for time in times)
    return alone_ns / 1e6, sum(work.hbm_bytes for work in cost) / GIB


def _negative(terms: Terms) -> Terms:
    return [(column, -value) for column, value in terms]
