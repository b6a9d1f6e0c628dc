"""A proven lower bound on the step time of every schedule of a chain; docs/bound.md has the proof.

A linear program decides, for every tensor and every gap between two of its uses (cyclically, over
the boundary between steps too), which fractions are kept on the device, kept on the host, loaded
and recomputed. For every task it decides how long its interval is and what is copied in it. Its
optimum is a lower bound since real schedules can only be slower: they copy whole tensors, one after
the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from twinstream.hardware_profiles.memories import DRIVE, disk_links
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.arena_caps import is_hopeless, with_library_memory
from twinstream.planner.bound.gap_columns import GIB, ChainGaps, Terms
from twinstream.planner.bound.host_rows import Cap, HostRows
from twinstream.planner.bound.host_updates import HostUpdates
from twinstream.planner.bound.interval_columns import ChainIntervals, LinkShares, Resource
from twinstream.planner.bound.program import Basis, LinearProgram, Solution
from twinstream.planner.bound.relaxation import GapFractions, Relaxation
from twinstream.planner.bound.round_classes import RoundClasses
from twinstream.planner.bound.segments import Segments
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.lifetimes.view import ChainView
from twinstream.planner.limits import LIMITS
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.ops import HOST_COMPUTE

_SOLVER_TOLERANCE = 1e-9

Side = Literal["device", "host"]


def lower_bound(
    chain: Chain,
    machine: Machine,
    caps: Caps,
    *,
    num_rounds: int | None = None,
    most_segments: int | None = None,
    choices: Choices = OPEN,
) -> Relaxation | None:
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
    kind = ProgramKind(choices, most_segments, with_disk=caps.disk_bytes is not None)
    return BoundProgram(ChainView(chain), machine, num_rounds, kind).bound(caps)


@dataclass(frozen=True)
class ProgramKind:
    """The kind of a chain's program: what is fixed, how coarse it is, for bounds or for plans.

    With `tied`, all crossings from round to round are decided alike, as a plan needs it. With
    `with_disk`, content may lie on a disk: what is only read, or any where its writes have a rate.
    With `any_updates`, each update may be the host's or the device's, and a share of it either's.
    """

    choices: Choices = OPEN
    most_segments: int | None = None
    tied: bool = False
    with_disk: bool = False
    any_updates: bool = False


class BoundProgram:
    """The program of a chain, to be solved for any caps."""

    def __init__(
        self,
        view: ChainView,
        machine: Machine,
        num_rounds: int | None = None,
        kind: ProgramKind = ProgramKind(),
        on_host: Chain | None = None,
    ) -> None:
        """Make the program; `on_host`: see `HostUpdates`."""
        self.chain, self.segments = view.chain, Segments.of(view.chain, kind.most_segments)
        rounds = RoundClasses.of(self.chain, self.segments, num_rounds)
        self.program = LinearProgram()
        links = disk_links(machine) if kind.with_disk else ()
        self.updates = HostUpdates(self.program, view, self.segments, machine, on_host)
        self.gaps = ChainGaps(
            self.program, view, self.segments, rounds, kind.choices, self.updates, tied=kind.tied,
            disk="written" if len(links) > 1 else "read" if links else None,
        )  # fmt: skip
        self.intervals = ChainIntervals(
            self.program, self.chain, self.segments, machine, rounds, self.updates, disk_links=links
        )
        self._all_gib = 1.0 + sum(t.size_bytes for t in self.chain.tensors) / GIB
        self._host = HostRows(
            self.program, self.gaps, self.intervals.intervals, self._used_gib, self._all_gib
        )

    def bound(self, caps: Caps) -> Relaxation | None:
        """Return the lower bound within these caps, as `lower_bound` does."""
        caps = with_library_memory(caps, self.chain)
        return (
            None
            if is_hopeless(self.chain, caps, self.intervals.machine)
            else self._solved(caps, 0.0)
        )

    def fewest_copies(
        self,
        caps: Caps,
        shares: LinkShares | None = None,
        start: Relaxation | None = None,
        copy_cost: float = LIMITS.copy_cost,
    ) -> Relaxation | None:
        """Return decisions near the optimum that copy little: copies get a small cost.

        What comes back is a guide for a plan; its `step_s` is what the decisions come to, no bound.

        Args:
            caps: of the arenas.
            shares: how much of the links may be used beside each task.
            start: what was decided with other caps or shares: from there it is less to solve.
            copy_cost: ms of a step that they may lose to save copying a GiB.
        """
        basis = None if start is None else start.basis
        caps = with_library_memory(caps, self.chain)
        return self._solved(caps, copy_cost, shares, basis)

    def least_cap_bytes(self, caps: Caps, side: Side) -> float | None:
        """Return the smallest cap of one memory that the program allows, for any step time.

        No schedule of the chain does with less, the other cap as it is; None where none does.
        """
        caps = with_library_memory(caps, self.chain)
        device, host = (_gib(caps.arena_bytes(tier)) for tier in ("device", "host"))
        with self.program.extended():
            self.intervals.add_loads(self.gaps)
            self.intervals.add_stores(self.gaps)
            # minimise the cap itself, as a column: the rows that cap a memory take it off
            least = self.program.column(upper=2.0 * self._all_gib)
            device, host = (Cap(least), host) if side == "device" else (device, Cap(least))
            kept = [] if device is None else self._occupied(self.gaps.kept_at)
            self._device_rows(kept, self._used_gib, device)
            self._host.add(kept, device, host)
            solution = self.program.minimise({least: 1.0})
        if solution is None:
            return None
        outside = caps.outside_arena_bytes if side == "device" else 0
        return max(0.0, solution.dual_objective) * GIB + outside

    def _solved(
        self,
        caps: Caps,
        copy_cost: float,
        shares: LinkShares | None = None,
        start: Basis | None = None,
    ) -> Relaxation | None:
        """Leaves the program as it was: it may be solved again with other arguments."""
        device_cap, host_cap = (_gib(caps.arena_bytes(tier)) for tier in ("device", "host"))
        with self.program.extended():
            compute = self.intervals.add_compute(self.gaps.recompute)
            resources = self.intervals.add_resources(shares) + self.intervals.add_disk(self.gaps)
            resources += self.intervals.add_host_updates()
            self.intervals.add_loads(self.gaps)
            self.intervals.add_stores(self.gaps)
            kept = [] if device_cap is None else self._occupied(self.gaps.kept_at)
            device = self._device_rows(kept, self._used_gib, device_cap)
            # the step: lengths of all intervals, each as often as there are rounds of its class
            step_ms = dict(self.intervals.step_ms())
            costs = dict(step_ms)
            gaps = self.gaps
            for column, gib in (
                *gaps.loaded_gib(), *gaps.written_gib(), *gaps.read_gib(), *gaps.filed_gib(),
            ):  # fmt: skip
                if copy_cost:
                    costs[column] = costs.get(column, 0.0) + copy_cost * gib
            solution, host, both = self._minimised(costs, kept, device_cap, host_cap, start)
        if solution is None:
            return None
        resources.append(Resource("compute", compute, 0))
        found = self._relaxation(solution, device + both, host + both, resources)
        if not copy_cost:
            return found
        reached_ms = sum(cost * float(solution.values[c]) for c, cost in step_ms.items())
        return replace(found, step_s=reached_ms / 1e3)

    def _minimised(
        self,
        costs: dict[int, float],
        kept: Sequence[int],
        device_cap: Cap | None,
        host_cap: Cap | None,
        start: Basis | None,
    ) -> tuple[Solution | None, list[int], list[int]]:
        """The optimum, with rows of the host and of both memories if these are needed."""
        if self._host.may_be_left_out(host_cap):
            return self.program.minimise(costs, start), [], []
        host, both = self._host.add(kept, device_cap, host_cap)
        return self.program.minimise(costs, start), host, both

    def _occupied(self, segments: Sequence[tuple[int, int, Terms]]) -> list[int]:
        return self.program.occupancy(segments, self.segments.count, self._all_gib)

    def _device_rows(
        self, kept: Sequence[int], used_gib: Sequence[float], cap: Cap | None
    ) -> list[int]:
        """At every task: its operands, what is kept, early loads, and unfinished offloads."""
        if cap is None:
            return []
        if not self.segments.single:
            # kept all through + most operands of a task <= cap; copies in flight are left out
            inside = [
                cap.above(self.program, [(column, 1.0)], used)
                for column, used in zip(kept, used_gib, strict=True)
            ]
            return inside + self._rows_between(cap)
        # operands + kept + ahead + behind - counted twice <= cap, in GiB at each task; what is an
        # operand, or kept, and not yet stored is counted twice
        twice = self._less((*self.gaps.evicted_at_uses(), *self.gaps.kept_or_waiting()))
        return [
            cap.above(
                self.program,
                [(column, 1.0), (interval.ahead, 1.0), (interval.behind, 1.0), *again],
                used,
            )
            for column, interval, again, used in zip(
                kept, self.intervals.intervals, twice, used_gib, strict=True
            )
        ]

    def _rows_between(self, cap: Cap) -> list[int]:
        """Where a segment begins: what is kept into it or over it, and copies in flight."""
        kept = self._occupied(self.gaps.kept_into)
        twice = self._less(self.gaps.kept_or_waiting())
        # kept into it + ahead + behind - counted twice <= cap, in GiB where a segment begins
        return [
            cap.above(
                self.program,
                [(column, 1.0), (interval.ahead, 1.0), (interval.behind, 1.0), *again],
            )
            for column, interval, again in zip(kept, self.intervals.intervals, twice, strict=True)
        ]

    def _less(self, counted: Sequence[tuple[int, Terms]]) -> list[Terms]:
        """By segment: terms that take off what is counted twice there."""
        found: list[Terms] = [[] for _ in range(self.segments.count)]
        for segment, terms in counted:
            found[segment] += [(column, -gib) for column, gib in terms]
        return found

    @cached_property
    def _used_gib(self) -> list[float]:
        """GiB that each task needs on the device; a segment needs the most of any of its tasks."""
        parts: dict[str, list[str]] = {}
        sizes = {t.tensor_id: t.size_bytes for t in self.chain.tensors}
        for tensor in self.chain.tensors:
            if tensor.parent is not None:
                parts.setdefault(tensor.parent, []).append(tensor.tensor_id)
        found = [0.0] * self.segments.count
        for i, task in enumerate(self.chain.tasks):
            if task.task_id in self.updates.by_task:  # what the host has, or may have, for itself
                continue
            leaves = {
                leaf
                for o in task.operands
                for leaf in parts.get(o.tensor, [o.tensor])[: o.num_parts]
            }
            segment = self.segments.of_task[i]
            found[segment] = max(found[segment], sum(sizes[leaf] for leaf in leaves) / GIB)
        return found

    def _relaxation(
        self, solution: Solution, device: list[int], host: list[int], resources: list[Resource]
    ) -> Relaxation:
        values, prices = solution.values, solution.row_prices
        lengths_ms = values[[interval.length_ms for interval in self.intervals.intervals]]
        # weak duality holds of exact sums: a little less covers how these floats are added up
        step_ms = max(0.0, solution.dual_objective * (1.0 - _SOLVER_TOLERANCE))
        # what the row of a resource has its rate for: an interval, or the whole step
        lasting_ms = (
            lengths_ms,
            np.asarray([sum(values[c] * w for c, w in self.intervals.step_ms())]),
        )
        pressed: dict[str, float] = {}
        prices_of: dict[str, float] = {}
        for r in resources:
            pressed[r.name] = pressed.get(r.name, 0.0) - float(prices[r.rows].sum())
            price = float(-prices[r.rows] @ lasting_ms[r.of_step]) * 1e9 / GIB / 1e6
            prices_of[r.name] = prices_of.get(r.name, 0.0) + price
        return Relaxation(
            step_s=step_ms / 1e3,
            device_s_per_gib=float(-prices[device].sum()) / 1e3,
            host_s_per_gib=float(-prices[host].sum()) / 1e3,
            link_s_per_gb_per_s={
                name: price
                for name, price in prices_of.items()
                if name not in ("compute", DRIVE, HOST_COMPUTE)
            },
            limits=tuple(name for name, pressure in pressed.items() if pressure > 1e-6),
            fractions=tuple(
                GapFractions(
                    self.gaps.elements[number],
                    self.gaps.elements[number].gaps[index],
                    extra,
                    float(values[columns.kept]),
                    float(values[columns.loaded]),
                )
                for (number, index, extra), columns in self.gaps.columns.items()
            ),
            recomputed={name: float(values[c]) for name, c in self.gaps.recompute.items()},
            interval_ms=tuple(self.intervals.task_ms(values, self.gaps.recompute)),
            segment_of_task=self.segments.of_task,
            basis=solution.basis,
            on_host={name: float(values[u.column]) for name, u in self.updates.by_task.items()},
        )


def _gib(size_bytes: int | None) -> Cap | None:
    return None if size_bytes is None else Cap(gib=size_bytes / GIB)
