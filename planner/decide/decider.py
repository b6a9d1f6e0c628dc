"""From the program's fractions to a placement that fits both memories."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound.kept_programs import kept_program
from twinstream.planner.bound.lower_bound import BoundProgram, LowerBound
from twinstream.planner.choices import Choices
from twinstream.planner.decide.decisions import Decisions
from twinstream.planner.decide.filling import Pressure, filled
from twinstream.planner.decide.host_room import HostIsFull, HostRoom, require_room
from twinstream.planner.decide.margins import Allowances, QueueModel, alive_bytes
from twinstream.planner.decide.task_sequence import TaskSequence
from twinstream.planner.emit.emission import Emitted, Placement, emitted
from twinstream.planner.emit.unrolling import of_all_rounds
from twinstream.planner.kept import kept_units
from twinstream.planner.library_memory import with_library_memory
from twinstream.planner.lifetimes.rounds import JUDGED_ROUNDS, PROGRAM_ROUNDS, with_rounds
from twinstream.planner.lifetimes.stays import Stay, stay_intervals
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.planner.pack.folded_packing import pack_folded
from twinstream.planner.pack.live_bytes import live_peak
from twinstream.planner.search.congestion import Shares, full_shares
from twinstream.planner.search.timed import judged_clock, timed_allowances, timed_stays
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.timeline import PassSpans

_LONGEST_IN_BLOCKS = 4.0
_IN_FLIGHT_BLOCKS = 0.5
_IN_FLIGHT_SHARE = 0.25
_MOST_UNITS_IN_FLIGHT = 3
_REPAIRS = 8
_SHARES_OF_COPIES = (0.5, 0.5, 0.25, 0.0)
_LESS_KEPT = 0.85
_TRIES = 5
_SEGMENTS = 900
_MOST_WASTE = 1.03


class DoesNotFit(TwinstreamError):
    """A plan that fits few rounds does not fit all of them."""


class NotWanted(TwinstreamError):
    """The program's decisions are not worth a plan."""


@dataclass(frozen=True)
class Candidate:
    """Decisions, how much time their copies get, and whether to waste little memory."""

    decisions: Decisions
    allowances: Allowances
    tight: bool = False


@dataclass(frozen=True)
class _Decided:
    """What the program decided within caps, with shares of the links; None where nothing fits."""

    caps: Caps
    shares: Shares
    found: LowerBound | None


class Decider:
    """Decides on a chain of a few rounds, for a step of so many.

    Offloads may be `outlasting` the pass and hold their bytes in the next.
    """

    def __init__(
        self,
        chain: Chain,
        machine: Machine,
        caps: Caps,
        num_rounds: int,
        *,
        outlasting: bool = True,
    ) -> None:
        self._outlasting = outlasting
        self.machine, self.num_rounds = machine, num_rounds
        self.caps = with_library_memory(caps, chain)
        self.small = with_rounds(chain, PROGRAM_ROUNDS)
        self.judged = with_rounds(chain, JUDGED_ROUNDS)
        self._units, self._judged_units = kept_units(self.small), kept_units(self.judged)
        self._call_ns = {name: cost_alone_ns(c.cost, machine) for name, c in chain.calls.items()}
        self._longest_task_ns = max(self._call_ns[task.call] for task in self.small.tasks)
        self._hosts: dict[str, HostRoom] = {}  # by what is fixed
        self._decided_last: dict[str, _Decided] = {}  # likewise
        self._starts: dict[str, LowerBound] = {}  # likewise, where to go on from
        self._start: LowerBound | None = None

    def schedule(self, candidate: Candidate, judged: Emitted, chain: Chain) -> Schedule:
        """The decisions as a schedule of a chain of any number of rounds.

        Args:
            candidate: the decisions.
            judged: the schedule of the judged rounds that they came to.
            chain: the judged one, or with more rounds.
        """
        return of_all_rounds(judged, partial(self._emitted, candidate), chain)

    def _emitted(self, candidate: Candidate, chain: Chain) -> Emitted:
        """The decisions as a schedule of a chain, all its rounds made one by one."""
        sequence = TaskSequence.of(chain, UnitMap(chain), candidate.decisions, self._call_ns)
        placement, over = self._place(sequence, candidate)
        if over:
            raise DoesNotFit(f"{max(over.values()):,} bytes of device memory are missing")
        return emitted(placement, self.machine, self.caps, "optimal")

    def in_flight(self) -> int:
        """Bytes to leave for copies: what both directions copy beside a block, within reason.

        That is a share of the device, and a few of the largest activations, if there are any.
        """
        rates = [self.machine.rate(f"pcie_{way}_bytes_per_s") for way in ("h2d", "d2h")]
        beside = self._longest_task_ns / 1e9 * sum(rate for rate in rates if rate < inf)
        units = self._units.units.values()
        saved = [u.tensor.size_bytes for u in units if u.tensor.role == "activation"]
        wanted = round(_IN_FLIGHT_BLOCKS * beside)
        if saved:
            wanted = min(wanted, _MOST_UNITS_IN_FLIGHT * max(saved))
        device = self.caps.arena_bytes("device")
        return wanted if device is None else min(wanted, round(_IN_FLIGHT_SHARE * device))

    def guide(self, choices: Choices) -> BoundProgram:
        """The program that decides."""
        return kept_program(
            self.small, self.machine, num_rounds=self.num_rounds, choices=choices, tied=True,
            most_segments=_SEGMENTS,
        )  # fmt: skip

    def decided_within(self, choices: Choices, caps: Caps) -> tuple[Candidate, Placement] | None:
        """What fits the device, from decisions for other caps; they may leave room on the device.

        It takes a little more or less of the host than those allow.

        Raises:
            HostIsFull: it takes more than the host cap.
        """
        solved = self.guide(choices).fewest_copies(caps, full_shares(len(self.small.tasks)))
        if solved is None:
            return None
        have, wanted = self.caps.arena_bytes("device"), caps.arena_bytes("device")
        spare = 0 if have is None or wanted is None else have - wanted
        decisions = Decisions.of(solved, self.small, self._units, choices)
        return self._packed(decisions, Pressure.of(solved, self.num_rounds), spare)

    def _longest_ahead_ns(self, choices: Choices) -> float:
        blocks = choices.prefetch_blocks
        return self._longest_task_ns * (_LONGEST_IN_BLOCKS if blocks is None else blocks)

    def decided_s(self, choices: Choices, in_flight: int, shares: Shares) -> float:
        """What the program's decisions come to, with all of the host; infinite where none fit.

        The arguments are those of `fitting`.
        """
        device, host = self.caps.arena_bytes("device"), self.caps.arena_bytes("host")
        room = None if device is None else device - in_flight
        solved = self._decided(choices, self.caps.with_arenas(room, host), shares)
        return inf if solved is None else solved.step_s

    def _decided(self, choices: Choices, caps: Caps, shares: Shares) -> LowerBound | None:
        """What the program decides: from what it decided before it is less to solve."""
        fixed = repr(choices)
        last = self._decided_last.get(fixed)
        if last is not None and (last.caps, last.shares) == (caps, shares):
            return last.found
        found = self.guide(choices).fewest_copies(
            caps, shares, self._starts.get(fixed, self._start)
        )
        self._decided_last[fixed] = _Decided(caps, shares, found)
        if found is not None:
            self._starts[fixed] = self._start = found
        return found

    def fitting(
        self,
        choices: Choices,
        in_flight: int,
        shares: Shares,
        wanted: Callable[[float], bool] = lambda step_s: True,
        *,
        fast: bool = True,
    ) -> tuple[Candidate, Placement] | None:
        """Decisions that fit both caps, with so many bytes left for copies in flight.

        Args:
            choices: what is fixed.
            in_flight: those bytes.
            shares: how much of the links may be used beside each task.
            wanted: whether a plan is, by the step time that the program's decisions come to.
            fast: once it fits, whether to use what is left of the host.

        Raises:
            NotWanted: it is not.
        """
        host = self._hosts.setdefault(repr(choices), HostRoom.of(self.caps.arena_bytes("host")))
        device, host_room = self.caps.arena_bytes("device"), host.program_bytes
        room = None if device is None else device - in_flight
        fits: tuple[Candidate, Placement] | None = None
        for tried in range(_TRIES):
            solved = self._decided(choices, self.caps.with_arenas(room, host_room), shares)
            if solved is None:
                break
            if fits is None and not wanted(solved.step_s):
                raise NotWanted(f"decisions that come to {solved.step_s:.3f} s a step")
            decisions = Decisions.of(solved, self.small, self._units, choices)
            try:
                found = self._packed(decisions, Pressure.of(solved, self.num_rounds), in_flight)
            except HostIsFull as full:
                if fits is not None:
                    break
                host_room = host.less(host_room, full.missing_bytes, tried)
                continue
            if found is None:
                break
            host.program_bytes = host_room
            if fits is not None or not fast:
                return found
            fits, host_room = found, host.more(host_room, found[1], solved)
            if host_room is None:
                break
        return fits

    def _packed(
        self, decisions: Decisions, pressure: Pressure, in_flight: int
    ) -> tuple[Candidate, Placement] | None:
        """What fits the device; where bytes cannot be packed, less is kept.

        First at the tasks where something sticks out; if that does not help, everywhere.

        Raises:
            HostIsFull: it does not fit the host.
        """
        device = self.caps.arena_bytes("device")
        sequence = TaskSequence.of(self.small, self._units, decisions, self._call_ns)
        judged = TaskSequence.of(self.judged, self._judged_units, decisions, self._call_ns)
        if device is None:
            candidate, placement, _ = self._placed(sequence, judged, decisions)
            require_room(placement, self.caps)
            return candidate, placement
        room = np.full(len(sequence.tasks), device, dtype=np.int64)
        shortage = 0
        for _ in range(_REPAIRS):
            fitting = filled(sequence, decisions, room - in_flight, pressure)
            fitting = fitting or filled(sequence, decisions, room, pressure)
            if fitting is None:
                break
            if pressure.home > 0.0:  # packing takes long where memory is tight
                require_room(_placement(judged, judged.stays(fitting), ()), self.caps)
            candidate, placement, over = self._placed(sequence, judged, fitting)
            if not over:
                require_room(placement, self.caps)
                return candidate, placement
            decisions = fitting
            shortage = max(2 * shortage, max(over.values()))
            for task in over:
                room[task] = min(room[task], device - shortage)
        return None if in_flight else self._packed_with_less(sequence, judged, decisions, pressure)

    def _packed_with_less(
        self,
        sequence: TaskSequence,
        judged: TaskSequence,
        decisions: Decisions,
        pressure: Pressure,
    ) -> tuple[Candidate, Placement] | None:
        """With ever less kept, and ever less room for copies: pieces find room more easily."""
        device = self.caps.arena_bytes("device")
        assert device is not None, "without a cap everything fits"
        most_alive = device
        for share in _SHARES_OF_COPIES:
            room = np.full(len(sequence.tasks), most_alive, dtype=np.int64)
            fitting = filled(sequence, decisions, room, pressure)
            if fitting is None:
                return None
            alive = int(alive_bytes(sequence, sequence.stays(fitting)).max())
            most = alive + round(share * (device - alive))
            candidate, placement, over = self._placed(sequence, judged, fitting, most)
            if not over:
                require_room(placement, self.caps)
                return candidate, placement
            most_alive = round(_LESS_KEPT * alive)
        return None

    def reclocked(
        self, candidate: Candidate, judged: Emitted, spans: PassSpans, pass_ns: float
    ) -> tuple[Candidate, Placement] | None:
        """The same decisions, with time for copies by when tasks ran in a judged pass.

        None where that does not fit either memory.

        Args:
            candidate: as it was judged.
            judged: its schedule of the judged rounds.
            spans: of the steady pass.
            pass_ns: from one pass to the next.
        """
        decisions = candidate.decisions
        sequence = TaskSequence.of(self.judged, self._judged_units, decisions, self._call_ns)
        sequence = replace(sequence, clock=judged_clock(judged.schedule, spans, pass_ns))
        again, placement, over = self._placed(sequence, sequence, decisions)
        try:
            require_room(placement, self.caps)
        except HostIsFull:
            return None
        return None if over else (again, placement)

    def tightened(
        self, candidate: Candidate, judged: Emitted, spans: PassSpans, pass_ns: float
    ) -> Iterator[tuple[Candidate, Placement]]:
        """The candidate in less memory, if any is wasted.

        First with no more time for copies than they took; then, if it is packed badly, with all the
        time they had.

        Args:
            candidate: as it was judged.
            judged: its schedule of the judged rounds.
            spans: of the steady pass.
            pass_ns: from one pass to the next.
        """
        sequence = TaskSequence.of(
            self.judged, self._judged_units, candidate.decisions, self._call_ns
        )
        timed = timed_stays(judged, spans, pass_ns)
        extent = arena_bytes(judged.schedule, DEVICE)
        if extent <= _MOST_WASTE * int(alive_bytes(sequence, timed).max()):
            return
        ways = [timed_allowances(candidate.allowances, sequence, timed)]
        if wastes(judged):
            ways.append(candidate.allowances)
        for allowances in ways:
            tighter = Candidate(candidate.decisions, allowances, tight=True)
            placement, over = self._place(sequence, tighter)
            if not over:
                yield tighter, placement

    def _placed(
        self,
        sequence: TaskSequence,
        judged: TaskSequence,
        decisions: Decisions,
        most_bytes: int | None = None,
    ) -> tuple[Candidate, Placement, dict[int, int]]:
        """Decisions with time for their copies, and what then sticks out of the device where."""
        longest_ns = self._longest_ahead_ns(decisions.choices)
        queues = QueueModel(self.machine, longest_ns, self._outlasting)
        device = self.caps.arena_bytes("device")
        most = device if most_bytes is None else most_bytes
        allowances = queues.allowances(sequence, sequence.stays(decisions), most)
        candidate = Candidate(decisions, allowances)
        return candidate, *self._place(judged, candidate)

    def _place(
        self, sequence: TaskSequence, candidate: Candidate
    ) -> tuple[Placement, dict[int, int]]:
        """The candidate with offsets, and what sticks out of the device's arena at which task."""
        stays = candidate.allowances.widened(sequence, sequence.stays(candidate.decisions))
        cap = self.caps.arena_bytes("device")
        packed = pack_folded(stays, sequence.units, sequence.folding, cap, tight=candidate.tight)
        return _placement(sequence, packed.stays, packed.offsets), packed.over_bytes


def wastes(made: Emitted) -> bool:
    """Whether its stays are packed with more than 3 % waste."""
    peak, _ = live_peak(stay_intervals(made.placement.units, made.placement.stays))
    return arena_bytes(made.schedule, DEVICE) > _MOST_WASTE * peak


def _placement(sequence: TaskSequence, stays: Sequence[Stay], offsets: Sequence[int]) -> Placement:
    return Placement(sequence.chain, sequence.tasks, sequence.units, stays, offsets)
