"""Plan one cut of the step: relax, decide, pack, emit and simulate, each a step of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Protocol

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.arena_caps import holds_all_state, with_library_memory
from twinstream.planner.bound.lower_bound import BoundProgram, ProgramKind
from twinstream.planner.bound.relaxation import Relaxation
from twinstream.planner.choices import Choices
from twinstream.planner.decide.decisions import Decisions
from twinstream.planner.decide.filling import Pressure
from twinstream.planner.decide.margins import QueueModel
from twinstream.planner.emit.emission import Emitted, emitted
from twinstream.planner.emit.unrolling import with_all_rounds
from twinstream.planner.evaluator import Evaluator, step_ns_of
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS, SIMULATED_ROUNDS
from twinstream.planner.lifetimes.view import ChainView
from twinstream.planner.limits import SearchLimits
from twinstream.planner.pack.disk_homes import Drive, ring_bytes
from twinstream.planner.pack.packer import Packed, Packer
from twinstream.planner.search.clock import simulated_clock
from twinstream.planner.search.cuts import StepCut
from twinstream.planner.search.knobs import Attempt, Knobs, Rule, SimulatedPlan
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.workload import Workload

_ROUNDING = 5  # host steps that the program does not get at first: units are moved whole


class CutSource(Protocol):
    """A source of cuts for a cut planner: `Cuts` of a step, or one chain as it is."""

    @property
    def machine(self) -> Machine: ...

    @property
    def caps(self) -> Caps: ...

    @property
    def choices(self) -> Choices: ...

    @property
    def limits(self) -> SearchLimits: ...

    @property
    def is_frozen(self) -> bool: ...

    def view(self, workload: Workload, most_rounds: int) -> ChainView: ...

    def program(self, workload: Workload, kind: ProgramKind) -> BoundProgram: ...


@dataclass(frozen=True)
class CutPlanner:
    """Plans one cut of the step: each attempt is the plan that comes of one set of knobs."""

    cuts: CutSource
    cut: StepCut
    evaluator: Evaluator

    def attempt(self, knobs: Knobs, tried: Sequence[Attempt], best: Attempt | None) -> Attempt:
        """Make a plan with these knobs.

        Args:
            knobs: to plan with.
            tried: what came of those before on this cut; solving goes on from there.
            best: the fastest of other cuts: decisions that come to more are not worth a plan.
        """
        if knobs.rule is not None:
            return self._by_rule(knobs, knobs.rule)
        if knobs.after is not None:
            return self._reclocked(knobs)
        last = next((one for one in reversed(tried) if one.knobs.rule is None), None)
        found = self._packed(knobs, last, best)
        if found.packed is None or not found.packed.fits or _same(found.packed, last):
            return replace(found, packed=None)
        return replace(found, simulated=self._simulated(self.emit(found.packed)))

    def fits(self) -> bool:
        """Return whether decisions that fit are found at once, with room for copies or none."""
        for room_bytes in (self.room_bytes(), 0):
            found = self._packed(self.first_knobs(self.cuts.choices, room_bytes), None, None)
            if found.packed is not None and found.packed.fits:
                return True
        return False

    def _packed(self, knobs: Knobs, last: Attempt | None, best: Attempt | None) -> Attempt:
        """Relax, decide and pack with these knobs, and with as much of the host as then fits.

        Args:
            knobs: to plan with.
            last: the attempt on this cut before, from which solving goes on.
            best: the fastest of other cuts.
        """
        found = Attempt(self.cut.workload, knobs, None if last is None else last.relaxed)
        for number in range(self.cuts.limits.tries):
            relaxed = self.relax(knobs, found.relaxed)
            if relaxed is None:
                break
            if last is None and best is not None and relaxed.step_s * 1e9 > best.step_ns:
                return replace(found, relaxed=relaxed, skipped=True)
            packed = self.pack(self.decide(relaxed, knobs), relaxed, knobs)
            if packed is None or (found.packed is not None and not packed.fits):
                break
            found = replace(found, knobs=knobs, relaxed=relaxed, packed=packed)
            host_bytes = self._next_host_bytes(found, number)
            if host_bytes is None:
                break
            knobs = replace(knobs, host_bytes=host_bytes)
        return found

    def relax(self, knobs: Knobs, start: Relaxation | None) -> Relaxation | None:
        """Return the program's optimum within the caps less the room; None where nothing fits."""
        device, host = self.caps.arena_bytes("device"), self.caps.arena_bytes("host")
        room = None if device is None else device - knobs.room_bytes
        at_most = host if knobs.host_bytes is None else knobs.host_bytes
        caps = self.caps.with_arenas(room, at_most)
        return self._program(knobs.choices).fewest_copies(
            caps, knobs.shares, start, self.cuts.limits.copy_cost
        )

    def relaxed_s(self, choices: Choices, room_bytes: int) -> float:
        """Return the seconds of the program's first decisions; infinite where none fit."""
        relaxed = self.relax(self.first_knobs(choices, room_bytes), None)
        return inf if relaxed is None else relaxed.step_s

    def decide(self, relaxed: Relaxation, knobs: Knobs) -> Decisions:
        """Round the program's fractions to whole decisions."""
        return Decisions.of(relaxed, self.small, knobs.choices)

    def pack(self, decisions: Decisions, relaxed: Relaxation, knobs: Knobs) -> Packed | None:
        """Give the decisions offsets; None where nothing fits the device."""
        pressure = Pressure.of(relaxed, self.num_rounds, self.cuts.limits)
        return self._packer(knobs).pack(decisions, pressure, knobs.room_bytes)

    def emit(self, packed: Packed) -> Emitted:
        """Write out the schedule of a few rounds."""
        return emitted(packed.placement, self.machine, self.caps, "optimal")

    def schedule(self, attempt: Attempt, chain: Chain) -> RankSchedule | None:
        """Return the attempt with all rounds of the step; None where these do not fit after all."""
        packed, simulated, rule = attempt.packed, attempt.simulated, attempt.knobs.rule
        assert simulated is not None, "a plan was found"
        if rule is not None:
            few = simulated.emitted
            return with_all_rounds(few, lambda of: rule(of, self.machine, self.caps), chain)
        assert packed is not None, "it was packed"
        packer = self._packer(attempt.knobs)

        def make(of: Chain) -> Emitted | None:
            whole = packer.with_all_rounds(packed, ChainView(of))
            return self.emit(whole) if whole.fits else None

        return with_all_rounds(simulated.emitted, make, chain)

    def first_knobs(self, choices: Choices, room_bytes: int) -> Knobs:
        """Return the knobs of a first attempt: all of the links, nearly all of the host."""
        host = self.caps.arena_bytes("host")
        at_most = (
            None if host is None else round(host * (1.0 - _ROUNDING * self.cuts.limits.host_step))
        )
        drive = None if at_most is None else Drive.of(self.machine, self.caps)
        if at_most is not None and drive is not None:
            at_most = max(0, at_most - ring_bytes(self.small.chain, self.small.units, drive))
        return Knobs(choices, room_bytes, self.full_shares, at_most)

    @property
    def full_shares(self) -> dict[str, tuple[float, ...]]:
        """The full rate of both links beside every task."""
        return dict.fromkeys(("h2d", "d2h"), (1.0,) * len(self.small.chain.tasks))

    def room_bytes(self) -> int:
        """Return the bytes to leave for copies in flight: what both directions copy beside a block.

        It is at most a share of the device.
        """
        limits = self.cuts.limits
        rates = [self.machine.rate(f"pcie_{way}_bytes_per_s") for way in ("h2d", "d2h")]
        beside = self._longest_task_ns / 1e9 * sum(rate for rate in rates if rate < inf)
        wanted = round(limits.room_blocks * beside)
        device = self.caps.arena_bytes("device")
        return wanted if device is None else min(wanted, round(limits.room_of_device * device))

    @property
    def holds_all_state(self) -> bool:
        """Return whether the device has room for all that persists."""
        return holds_all_state(self.small.chain, self.caps)

    @property
    def num_rounds(self) -> int:
        return self.cut.workload.rounds_per_step

    @property
    def machine(self) -> Machine:
        return self.cuts.machine

    @cached_property
    def small(self) -> ChainView:
        """The chain with the rounds that the program knows."""
        return self.cuts.view(self.cut.workload, PROGRAM_ROUNDS)

    @cached_property
    def few(self) -> ChainView:
        """The chain with the rounds that are simulated."""
        return self.cuts.view(self.cut.workload, SIMULATED_ROUNDS)

    @cached_property
    def caps(self) -> Caps:
        return with_library_memory(self.cuts.caps, self.small.chain)

    @cached_property
    def _longest_task_ns(self) -> float:
        call_ns = self.few.call_ns(self.machine)
        return max(call_ns[task.call] for task in self.few.chain.tasks)

    def _program(self, choices: Choices) -> BoundProgram:
        with_disk = self.cuts.caps.disk_bytes is not None
        kind = ProgramKind(choices, self.cuts.limits.guide_segments, True, with_disk)
        return self.cuts.program(self.cut.workload, kind)

    def _packer(self, knobs: Knobs) -> Packer:
        blocks = knobs.choices.prefetch_blocks
        blocks = self.cuts.limits.ahead_blocks if blocks is None else blocks
        queues = QueueModel(
            self.machine, blocks * self._longest_task_ns, knobs.outlasting,
            self.small.begins_with_updates, self.cuts.limits.tries,
        )  # fmt: skip
        return Packer(self.small, self.few, self.machine, self.caps, queues, self.cuts.limits)

    def _by_rule(self, knobs: Knobs, rule: Rule) -> Attempt:
        found = Attempt(self.cut.workload, knobs)
        try:
            made = rule(self.few.chain, self.machine, self.caps)
        except InfeasiblePlan:
            return found
        return replace(found, simulated=self._simulated(made))

    def _simulated(self, made: Emitted) -> SimulatedPlan:
        result = self.evaluator(made.schedule, self.machine)
        step_ns = step_ns_of(made.schedule, result, self.num_rounds)
        return SimulatedPlan(made, result.passes[-1], result.step_ns, step_ns)

    def _reclocked(self, knobs: Knobs) -> Attempt:
        """Give copies their time by when tasks ran in the simulation, and place again.

        The program's intervals are too short where compute waits, so that copies held memory too
        long.
        """
        after = knobs.after
        assert after is not None and after.packed is not None and after.simulated is not None
        simulated = after.simulated
        clock = simulated_clock(simulated.emitted.schedule, simulated.spans, simulated.pass_ns)
        packed = self._packer(knobs).reclocked(after.packed, clock)
        if not packed.fits or _same(packed, after):
            return replace(after, knobs=knobs, packed=None, simulated=None)
        return replace(
            after, knobs=knobs, packed=packed, simulated=self._simulated(self.emit(packed))
        )

    def _next_host_bytes(self, found: Attempt, tried: int) -> int | None:
        """Return what the program gets of the host next; None where it is as it should be.

        The program moves shares of units, a plan whole ones, and takes a little more or less. After
        one that did not fit it gets less by what was missing, and more: how units are rounded
        changes with it, or hardly, so that the same may be missing again. After one that left room
        it gets most of that, where the room is worth something.
        """
        cap, program, packed = self.caps.arena_bytes("host"), found.knobs.host_bytes, found.packed
        if cap is None or program is None or packed is None or found.relaxed is None:
            return None
        if packed.missing_host_bytes:
            less = round(self.cuts.limits.host_step * cap) << 2 * tried
            return program - packed.missing_host_bytes * 5 // 4 - less
        # what the room left would save, by the host's price in the program
        left = cap - packed.placement.host_bytes
        worth_s = left / 2**30 * found.relaxed.host_s_per_gib
        return (
            program + left * 3 // 4
            if worth_s > self.cuts.limits.host_step * found.relaxed.step_s
            else None
        )


def _same(packed: Packed, last: Attempt | None) -> bool:
    """Whether a packing comes to the schedule that was simulated last."""
    if last is None or last.simulated is None:
        return False
    return packed.placement.same_as(last.simulated.emitted.placement)
