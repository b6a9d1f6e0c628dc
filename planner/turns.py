"""Decide, judge, leave room on the links where compute waited for copies, and decide again."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.choices import Choices
from twinstream.planner.congestion import Shares, lowered
from twinstream.planner.deciding import Candidate, Decider, NotWanted, wastes
from twinstream.planner.emission import Emitted, Placement, emitted
from twinstream.planner.judge import Judge, Judged
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.timeline import PassSpans
from twinstream.schedule.verify_layout import arena_bytes

_WITHIN_REACH = 1.02
_PROMISING = 0.99
_NOTHING_NEW = 2e-5
GAIN = 0.998
_FAR = 1.025
_LESS_ROOM = 3
_LEAST_ROOM_BYTES = 2**20
_VERY_FAR = 1.04
_MORE_ROOM = 2
_TURNS_WITH_MORE_ROOM = 2
_WAITS_PER_ROOM = 0.5
_AS_FAST = 1.0002
_MENDED = 1.005  # what is packed with more than 3 % waste may be so much slower without
_STANDS_FOR_MORE = 2  # the round that further middle ones are like

Maker = Callable[[Chain], Schedule]


@dataclass(frozen=True)
class Plan:
    """How to make a schedule of a chain of any number of rounds, and its step time as judged.

    `at_home`: it was decided with all state at home on the host. `theirs`: it is another policy's.
    `tighter` finds one that is nearly as fast and takes less memory, if it wastes any.
    """

    step_ns: float
    make: Maker
    at_home: bool = False
    theirs: bool = False
    tighter: Callable[[], "Plan | None"] | None = None

    def tightened(self, others: Iterable["Plan"]) -> "Plan":
        """This plan, or a tighter one, if that is not slower than any by another policy."""
        tighter = self.tighter() if self.tighter is not None else None
        theirs_ns = fastest_ns([plan for plan in others if plan.theirs])
        return self if tighter is None or tighter.step_ns > theirs_ns else tighter


def fastest_ns(plans: Sequence[Plan]) -> float:
    return min((plan.step_ns for plan in plans), default=inf)


def step_ns(schedule: Schedule, judged: Judged, num_rounds: int) -> float:
    """Step time on the few rounds of a schedule, and what each further middle round adds."""
    more = num_rounds - schedule.workload.rounds_per_step
    if more <= 0:
        return judged.step_ns
    spans = judged.passes[-1]
    end_of_round: dict[int, int] = {}
    for op, end_ns in zip(schedule.ops, spans.end_ns, strict=True):
        if isinstance(op, Compute) and op.label.round is not None:
            end_of_round[op.label.round] = end_ns
    between_ns = end_of_round[_STANDS_FOR_MORE] - end_of_round[_STANDS_FOR_MORE - 1]
    return judged.step_ns + more * between_ns


def alone_ns(placement: Placement, machine: Machine, num_rounds: int) -> float:
    """What a step's tasks take alone, which is no more than `step_ns`."""
    chain = placement.chain
    more = max(0, num_rounds - chain.workload.rounds_per_step)
    call_ns = {name: cost_alone_ns(call.cost, machine) for name, call in chain.calls.items()}
    return sum(
        call_ns[task.call] * (1 + more if task.label.round == _STANDS_FOR_MORE else 1)
        for task in placement.tasks
    )


@dataclass(frozen=True)
class _Turn:
    """What was decided with so much room and these shares, and how it was judged.

    `decided_ns` is the step time that the program's decisions come to, `plan_ns` that of the plan.
    """

    room: int
    shares: Shares
    decided_ns: float
    plan_ns: float
    candidate: Candidate
    emitted: Emitted
    spans: PassSpans


@dataclass
class Turns:
    """Turns with the same choices.

    Args:
        decider: of the chain.
        judge: a simulator.
        choices: what is fixed.
        at_home: they have all state at home on the host, where it was open; that is not tried
            where already the program's decisions are no faster than `beat_ns`.
        bound_ns: no step is faster.
        beat_ns: the step time of the best plan known.
        most: turns to take.
        shares: how much of the links the program may use beside each task at first; after the
            turns, what the fastest of the plans was decided with, those with more room left out,
            unless even its decisions are far from the bound.
        rooms: bytes to leave for copies in flight, the first with which anything fits; after the
            turns, what that plan was decided with is the first, with the same exception.
    """

    decider: Decider
    judge: Judge
    choices: Choices
    at_home: bool
    bound_ns: float
    beat_ns: float
    most: int
    shares: Shares
    rooms: list[int]
    found: list[Plan] = field(default_factory=list)
    _best: _Turn | None = None
    _last: _Turn | None = None

    def take(self) -> None:
        """All turns that may pay; `found` has their plans."""
        rooms = list(self.rooms)
        going_on = self._take_usual()
        if self._best is None:
            return
        if self._best.decided_ns > _VERY_FAR * self.bound_ns:
            self.rooms = rooms
        else:
            self.shares, self.rooms[0] = self._best.shares, self._best.room
        if going_on and self.most > 1 and self._wants_more_room(self._best):
            self._take_with_more_room(self._best)
        fastest = min(range(len(self.found)), key=lambda number: self.found[number].step_ns)
        tighter = partial(self._tighter, self._best)
        self.found[fastest] = replace(self.found[fastest], tighter=tighter)

    def _take_usual(self) -> bool:
        """Turns with the room there is, or less; whether others may pay, too."""
        shares: Shares | None = self.shares
        room = self.rooms[0]
        while shares is not None and len(self.found) < self.most:
            before, turn = self._last, self._taken(room, shares)
            if turn is None:
                break
            going_on = self._goes_on(turn)
            best = self._recorded(turn)
            if not going_on:
                return False
            if turn is best and self._wants_less_room(turn):
                room = turn.room // _LESS_ROOM if turn.room > _LEAST_ROOM_BYTES else 0
                continue
            if before is not None and before.room != turn.room:
                turn = best
            room, shares = turn.room, self._lowered(turn)
        return True

    def _take_with_more_room(self, best: _Turn) -> None:
        """Turns with twice the room that the best so far had, while they are better."""
        room = _MORE_ROOM * best.room
        for _ in range(_TURNS_WITH_MORE_ROOM):
            if (shares := self._lowered(best)) is None:
                break
            if (turn := self._taken(room, shares)) is None:
                break
            best = self._recorded(turn)
            if turn is not best:
                break

    def _recorded(self, turn: _Turn) -> _Turn:
        """The best turn so far, this one among them, whose plan is found now."""
        if self._best is None or turn.plan_ns < self._best.plan_ns:
            self._best = turn
        make = partial(self.decider.schedule, turn.candidate, turn.emitted)
        self.found.append(Plan(turn.plan_ns, make, self.at_home))
        return self._best

    def _tighter(self, turn: _Turn) -> Plan | None:
        """Take no more memory than copies and packing need, where that costs next to nothing."""
        decider, wasteful = self.decider, wastes(turn.emitted)
        extent = arena_bytes(turn.emitted.schedule, DEVICE)
        mended, found = [], []
        for candidate, placement in decider.tightened(turn.candidate, turn.emitted, turn.spans):
            made = emitted(placement, decider.machine, decider.caps, "optimal")
            if arena_bytes(made.schedule, DEVICE) >= extent:
                continue
            plan_ns = step_ns(made.schedule, self.judge(made.schedule), decider.num_rounds)
            plan = Plan(plan_ns, partial(decider.schedule, candidate, made), self.at_home)
            if wasteful and not wastes(made) and plan_ns <= _MENDED * turn.plan_ns:
                mended.append(plan)
            elif plan_ns <= _AS_FAST * turn.plan_ns:
                found.append(plan)
        return min(mended or found, key=lambda plan: plan.step_ns, default=None)

    def _taken(self, room: int, shares: Shares) -> _Turn | None:
        """None where nothing fits, or nothing that is new."""
        fitting = self._fitting(room, shares)
        if fitting is None or (self._last and fitting[1].same_as(self._last.emitted.placement)):
            return None
        candidate, placement = fitting
        made = emitted(placement, self.decider.machine, self.decider.caps, "optimal")
        judged = self.judge(made.schedule)
        plan_ns = step_ns(made.schedule, judged, self.decider.num_rounds)
        self._last = _Turn(
            self.rooms[0] if self._last is None else room, shares, candidate.decisions.step_s * 1e9,
            plan_ns, candidate, made, judged.passes[-1],
        )  # fmt: skip
        return self._last

    def _fitting(self, room: int, shares: Shares) -> tuple[Candidate, Placement] | None:
        """The first time with as little room for copies in flight as it takes, then with that."""
        try:
            if self._last is not None:
                return self.decider.fitting(self.choices, room, shares, self._wanted)
            while self.rooms:
                fitting = self.decider.fitting(self.choices, self.rooms[0], shares, self._wanted)
                if fitting is not None:
                    return fitting
                del self.rooms[0]
        except NotWanted:
            pass
        return None

    def _wanted(self, decided_s: float) -> bool:
        """Whether the program learned from the turn before; or may have the fastest plan."""
        if self._last is not None:
            learned_ns = abs(decided_s * 1e9 - self._last.decided_ns)
            return learned_ns > _NOTHING_NEW * self._last.decided_ns
        return not self.at_home or decided_s * 1e9 <= GAIN * self.beat_ns

    def _goes_on(self, turn: _Turn) -> bool:
        """Whether another turn may pay after this one, the last."""
        worse = self.at_home and bool(self.found) and turn.plan_ns > GAIN * fastest_ns(self.found)
        promising = not self.found and turn.decided_ns < _PROMISING * self.beat_ns
        hopeless = turn.plan_ns > _WITHIN_REACH * self.beat_ns and not promising
        return not worse and not hopeless

    def _wants_less_room(self, turn: _Turn) -> bool:
        """Whether the room left for copies costs more than waiting for copies does."""
        waits_ns, room_ns = self._costs_ns(turn)
        far = turn.plan_ns > _FAR * self.bound_ns
        return turn.room > 0 and far and waits_ns < _WAITS_PER_ROOM * room_ns

    def _wants_more_room(self, turn: _Turn) -> bool:
        """Whether waiting for copies costs more than the room left for them does."""
        waits_ns, room_ns = self._costs_ns(turn)
        return turn.room > 0 and turn.plan_ns > _VERY_FAR * self.bound_ns and waits_ns > room_ns

    def _costs_ns(self, turn: _Turn) -> tuple[float, float]:
        """Of waits for copies, and of the room left for them: above what was decided, the bound."""
        return turn.plan_ns - turn.decided_ns, turn.decided_ns - self.bound_ns

    def _lowered(self, turn: _Turn) -> Shares | None:
        schedule, decider = turn.emitted.schedule, self.decider
        return lowered(turn.shares, schedule, turn.spans, decider.judged, decider.small)
