"""A proven lower bound on the step time of every schedule of a chain; docs/bound.md has the proof.

The program decides, for every tensor and every gap between two of its uses (cyclically, across the
boundary too), which fractions stay on the device, stay valid on the host, are loaded, and are
recomputed; and for every task how long its slot is and what is copied meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from threading import Lock

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound.gap_columns import GIB, GapProgram, Terms, occupancy
from twinstream.planner.bound.gaps import Element, Gap
from twinstream.planner.bound.host_rows import HostRows
from twinstream.planner.bound.program import Basis, Program, Solution
from twinstream.planner.bound.round_classes import RoundClasses
from twinstream.planner.bound.segments import Segments
from twinstream.planner.bound.slot_columns import LinkShares, Resource, SlotProgram
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.library_memory import with_library_memory
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps

COPY_COST_MS_PER_GIB = 0.4  # step time that a plan may lose to save copying a GiB
_SOLVER_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Choice:
    """What the program does with one gap: fractions kept on the device, loaded, on the host.

    `between_middles`: the gap stands for those between two middle rounds, of more than three.
    """

    element: Element
    gap: Gap
    between_middles: bool
    kept: float
    loaded: float
    on_host: float


@dataclass(frozen=True)
class LowerBound:
    """Seconds per step that no schedule of the chain can beat, and what it hangs on.

    Prices are the seconds that one more unit saves: a GiB of device or host memory, a GB/s of a
    link direction. `limits` are the resources without which the bound would be lower.
    `choices`, `recomputed` (by recompute task) and `slot_ms` (by task, from the start of the
    recompute before it) are the optimum found; positions in them are segments of tasks. `basis` is
    what the solver needs to go on from there.
    """

    step_s: float
    device_s_per_gib: float
    host_s_per_gib: float
    link_s_per_gb_per_s: dict[str, float]
    limits: tuple[str, ...]
    choices: tuple[Choice, ...]
    recomputed: dict[str, float]
    slot_ms: tuple[float, ...]
    segment_of_task: tuple[int, ...]
    basis: Basis | None = field(default=None, compare=False, repr=False)


def lower_bound(
    chain: Chain,
    machine: Machine,
    caps: Caps,
    *,
    num_rounds: int | None = None,
    most_segments: int | None = None,
    choices: Choices = OPEN,
) -> LowerBound | None:
    """Solve the program for a chain; None when no schedule can satisfy the caps.

    Args:
        chain: one step. Of more than three rounds, only the first three are to be lowered, the
            middle one standing for all: `num_rounds` says how many there really are.
        machine: its rates.
        caps: of the arenas.
        num_rounds: rounds of the step; by default those of the chain.
        most_segments: of longer chains, chunks are taken together: that relaxes the program and
            makes it smaller. By default 450.
        choices: what is fixed: the bound is of schedules that have it so.

    Raises:
        MissingNumberError: the profile lacks a rate.
    """
    program = BoundProgram(
        chain, machine, num_rounds=num_rounds, most_segments=most_segments, choices=choices
    )
    return program.bound(caps)


def _persistent_bytes(chain: Chain) -> int:
    """What is somewhere all the time: of a tensor with parts these, without its padding."""
    persistent, with_parts = set(chain.persistent), {t.parent for t in chain.tensors}
    return sum(
        t.size_bytes
        for t in chain.tensors
        if (t.parent or t.tensor_id) in persistent and t.tensor_id not in with_parts
    )


def _bytes_of_both(caps: Caps) -> float:
    arenas = caps.arena_bytes("device"), caps.arena_bytes("host")
    return inf if None in arenas else float(sum(arena or 0 for arena in arenas))


class BoundProgram:
    """The program of a chain, for any caps; it may be asked from several threads."""

    def __init__(
        self,
        chain: Chain,
        machine: Machine,
        *,
        num_rounds: int | None = None,
        most_segments: int | None = None,
        choices: Choices = OPEN,
        tied: bool = False,
    ) -> None:
        """The arguments are those of `lower_bound`.

        With `tied`, all crossings from round to round are decided alike, as a plan needs it.
        """
        self.chain, self._machine, self._num_rounds = chain, machine, num_rounds
        self._most_segments, self._choices, self._tied = most_segments, choices, tied
        self._lock = Lock()
        self._starts: dict[Caps, Basis | None] = {}

    def bound(self, caps: Caps, *, of_many: bool = False) -> LowerBound | None:
        """As `lower_bound`; within one of many caps from the optimum at the next powers of two.

        From there it is a quarter as much to solve, and does not hang on what was asked before.
        """
        if _persistent_bytes(self.chain) > _bytes_of_both(with_library_memory(caps, self.chain)):
            return None
        with self._lock:
            return self._program.solve(caps, 0.0, start=self._start(caps) if of_many else None)

    def _start(self, caps: Caps) -> Basis | None:
        sizes = {"device_bytes": caps.device_bytes, "host_bytes": caps.host_bytes}
        powers = {name: size and 1 << (size - 1).bit_length() for name, size in sizes.items()}
        larger = caps.model_copy(update=powers)
        if larger not in self._starts:
            found = self._program.solve(larger, 0.0)
            self._starts[larger] = None if found is None else found.basis
        return self._starts[larger]

    def fewest_copies(
        self,
        caps: Caps,
        shares: LinkShares | None = None,
        start: LowerBound | None = None,
    ) -> LowerBound | None:
        """Decisions near the optimum that move little: copies cost a little, too.

        What comes back is a guide for a plan; its `step_s` is what the decisions come to, no bound.

        Args:
            caps: of the arenas.
            shares: how much of the links may be used beside each task.
            start: what was decided with other caps or shares: from there it is less to solve.
        """
        basis = None if start is None else start.basis
        with self._lock:
            return self._program.solve(caps, COPY_COST_MS_PER_GIB, shares, basis)

    def least_home_bytes(self, caps: Caps) -> float | None:
        """What homes on the host take at least, however long it takes, of a tied program.

        None where nothing fits the device cap; the host's is not looked at.
        """
        with self._lock:
            return self._program.least_home_bytes(caps)

    @cached_property
    def _program(self) -> "_Bound":
        segments = Segments.of(self.chain, self._most_segments)
        return _Bound(
            self.chain, self._machine, self._num_rounds, segments, self._choices, tied=self._tied
        )


class _Bound:
    def __init__(
        self,
        chain: Chain,
        machine: Machine,
        num_rounds: int | None,
        segments: Segments,
        choices: Choices,
        *,
        tied: bool,
    ) -> None:
        self.chain, self.machine, self.segments = chain, machine, segments
        rounds = RoundClasses.of(chain, self.segments, num_rounds)
        self.program = Program()
        self.gaps = GapProgram(self.program, chain, self.segments, rounds, choices, tied=tied)
        self.slots = SlotProgram(self.program, chain, self.segments, machine, rounds)
        self._all_gib = 1.0 + sum(t.size_bytes for t in chain.tensors) / GIB
        self._host = HostRows(
            self.program, self.gaps, self.slots.slots, self._used_gib, self._all_gib
        )

    def solve(
        self,
        caps: Caps,
        copy_cost: float,
        shares: LinkShares | None = None,
        start: Basis | None = None,
    ) -> LowerBound | None:
        """May be called again with other arguments: it leaves the program as it was."""
        with self.program.extended():
            caps = with_library_memory(caps, self.chain)
            arenas = caps.arena_bytes("device"), caps.arena_bytes("host")
            return self._solved(*arenas, copy_cost, shares, start)

    def least_home_bytes(self, caps: Caps) -> float | None:
        with self.program.extended():
            device_cap = with_library_memory(caps, self.chain).arena_bytes("device")
            self.slots.add_loads(self.gaps)
            self.slots.add_stores(self.gaps)
            if device_cap is not None:
                self._device_rows(self._occupied(self.gaps.kept_at), self._used_gib, device_cap)
            solution = self.program.minimise(dict(self.gaps.home_gib()))
            return None if solution is None else max(0.0, solution.dual_objective) * GIB

    def _solved(
        self,
        device_cap: int | None,
        host_cap: int | None,
        copy_cost: float,
        shares: LinkShares | None,
        start: Basis | None,
    ) -> LowerBound | None:
        compute = self.slots.add_compute(self.gaps.recompute)
        resources = self.slots.add_resources(shares)
        self.slots.add_loads(self.gaps)
        self.slots.add_stores(self.gaps)
        kept = [] if device_cap is None else self._occupied(self.gaps.kept_at)
        device = self._device_rows(kept, self._used_gib, device_cap)
        step_ms = dict(self.slots.step_ms())
        costs = dict(step_ms)
        for column, gib in (*self.gaps.loaded_gib(), *self.gaps.written_gib()):
            if copy_cost:
                costs[column] = costs.get(column, 0.0) + copy_cost * gib
        solution, host, both = self._minimised(costs, kept, device_cap, host_cap, start)
        if solution is None:
            return None
        resources.append(Resource("compute", compute, 0))
        found = self._result(solution, device + both, host + both, resources)
        if not copy_cost:
            return found
        reached_ms = sum(cost * float(solution.values[c]) for c, cost in step_ms.items())
        return replace(found, step_s=reached_ms / 1e3)

    def _minimised(
        self,
        costs: dict[int, float],
        kept: Sequence[int],
        device_cap: int | None,
        host_cap: int | None,
        start: Basis | None,
    ) -> tuple[Solution | None, list[int], list[int]]:
        """The optimum, with rows of the host and of both memories if these are needed."""
        if self._host.may_be_left_out(host_cap):
            solution = self.program.minimise(costs, start)
            if solution is None or self._host.are_kept(solution.values, device_cap, host_cap):
                return solution, [], []
        host, both = self._host.add(kept, device_cap, host_cap)
        return self.program.minimise(costs, start), host, both

    def _occupied(self, segments: Sequence[tuple[int, int, Terms]]) -> list[int]:
        return occupancy(self.program, segments, self.segments.count, self._all_gib)

    def _device_rows(
        self, kept: Sequence[int], used_gib: Sequence[float], cap: int | None
    ) -> list[int]:
        """At every task: its operands, what is kept, early loads, and unfinished offloads."""
        if cap is None:
            return []
        if not self.segments.single:  # copies in flight within a segment are left out
            inside = [
                self.program.at_most([(column, 1.0)], cap / GIB - used)
                for column, used in zip(kept, used_gib, strict=True)
            ]
            return inside + self._rows_between(cap)
        # An operand, or kept, and perhaps not yet stored.
        twice = self._less((*self.gaps.evicted_at_uses(), *self.gaps.kept_or_waiting()))
        return [
            self.program.at_most(
                [(column, 1.0), (slot.ahead, 1.0), (slot.behind, 1.0), *again], cap / GIB - used
            )
            for column, slot, again, used in zip(
                kept, self.slots.slots, twice, used_gib, strict=True
            )
        ]

    def _rows_between(self, cap: int) -> list[int]:
        """Where a segment begins: what is kept into it or over it, and copies in flight."""
        kept = self._occupied(self.gaps.kept_into)
        twice = self._less(self.gaps.kept_or_waiting())
        return [
            self.program.at_most(
                [(column, 1.0), (slot.ahead, 1.0), (slot.behind, 1.0), *again], cap / GIB
            )
            for column, slot, again in zip(kept, self.slots.slots, twice, strict=True)
        ]

    def _less(self, counted: Sequence[tuple[int, Terms]]) -> list[Terms]:
        """By segment: terms that take off what is counted twice there."""
        found: list[Terms] = [[] for _ in range(self.segments.count)]
        for segment, terms in counted:
            found[segment] += [(column, -gib) for column, gib in terms]
        return found

    @cached_property
    def _used_gib(self) -> list[float]:
        """GiB that each task itself must have on the device; of a segment the most of any."""
        parts: dict[str, list[str]] = {}
        sizes = {t.tensor_id: t.size_bytes for t in self.chain.tensors}
        for tensor in self.chain.tensors:
            if tensor.parent is not None:
                parts.setdefault(tensor.parent, []).append(tensor.tensor_id)
        found = [0.0] * self.segments.count
        for i, task in enumerate(self.chain.tasks):
            leaves = {
                leaf
                for o in task.operands
                for leaf in parts.get(o.tensor, [o.tensor])[: o.num_parts]
            }
            segment = self.segments.of_task[i]
            found[segment] = max(found[segment], sum(sizes[leaf] for leaf in leaves) / GIB)
        return found

    def _result(
        self, solution: Solution, device: list[int], host: list[int], resources: list[Resource]
    ) -> LowerBound:
        values, prices = solution.values, solution.row_prices
        spans_ms = values[[slot.span_ms for slot in self.slots.slots]]
        step_ms = max(0.0, solution.dual_objective * (1.0 - _SOLVER_TOLERANCE))
        pressed = {r.name: float(-prices[r.rows].sum()) for r in resources}
        return LowerBound(
            step_s=step_ms / 1e3,
            device_s_per_gib=float(-prices[device].sum()) / 1e3,
            host_s_per_gib=float(-prices[host].sum()) / 1e3,
            link_s_per_gb_per_s={
                r.name: float(-prices[r.rows] @ spans_ms) * 1e9 / GIB / 1e6
                for r in resources
                if r.name != "compute"
            },
            limits=tuple(name for name, pressure in pressed.items() if pressure > 1e-6),
            choices=tuple(
                Choice(
                    self.gaps.elements[number],
                    self.gaps.elements[number].gaps[index],
                    extra,
                    float(values[columns.kept]),
                    float(values[columns.loaded]),
                    float(sum(values[column] for column in columns.on_host)),
                )
                for (number, index, extra), columns in self.gaps.columns.items()
            ),
            recomputed={name: float(values[c]) for name, c in self.gaps.recompute.items()},
            slot_ms=tuple(self.slots.task_ms(values, self.gaps.recompute)),
            segment_of_task=self.segments.of_task,
            basis=solution.basis,
        )
