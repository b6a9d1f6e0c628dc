"""Decide, judge, leave room on the links where compute waited for copies, and decide again."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from twinstream.planner.choices import Choices
from twinstream.planner.decide.decider import Candidate, Decider, NotWanted, wastes
from twinstream.planner.emit.emission import Emitted, Placement, emitted
from twinstream.planner.judge import Judge
from twinstream.planner.search.congestion import Shares, full_shares, lowered, scaled
from twinstream.planner.search.judged_plan import MENDED, Plan, fastest_ns, step_ns
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.timeline import PassSpans

_WITHIN_REACH = 1.02
_PROMISING = 0.99
_NOTHING_NEW = 2e-5
GAIN = 0.998
_FAR = 1.025
_LESS_ROOM = 3
_LEAST_ROOM_BYTES = 2**20
_VERY_FAR = 1.04
_MORE_ROOM = 2
_LEARNED_TURNS = 2
_WIDER_ROOMS = (1.5, 2.0, 3.0, 4.0)
_WIDER_SHARES = (0.9, 0.8, 0.7, 0.6)
_WIDER_PLANS, _WIDER_TASKS = 24, 4000  # judged in a wider search, the tasks of all in all
_SHORT = 320
_WORSE_IN_A_ROW = 2
_WAITS_PER_ROOM = 0.5
_HARDLY_WAITS_PER_ROOM = 0.05
_NEAR = 1.008
_MORE_TURNS = 2
_AS_FAST = 1.0002


@dataclass(frozen=True)
class _Turn:
    """What was decided with so much room and these shares, and how it was judged.

    `decided_ns` is the step time that the program's decisions come to, `plan_ns` that of the plan,
    `pass_ns` that of its judged rounds.
    """

    room: int
    shares: Shares
    decided_ns: float
    plan_ns: float
    candidate: Candidate
    emitted: Emitted
    spans: PassSpans
    pass_ns: float


@dataclass
class Turns:
    """Turns with the same choices.

    Args:
        decider: of the chain.
        judge: a simulator.
        choices: what is fixed.
        at_home: they have all state at home on the host, where it was open; that is not tried
            where already the program's decisions are not 0.2 % faster than `beat_ns`, and no
            further once a turn does not gain as much.
        bound_ns: no step is faster.
        beat_ns: the step time of the best plan known.
        most: turns to take; twice as many while they gain and are very far from the bound.
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
    _judgements: int = 0

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
        if self._is_short_and_far(self._best):
            self._take_wider(self._best)
        elif self.most > 1 and going_on and self._wants_more_room(self._best):
            room = _MORE_ROOM * self._best.room
            for asked in self._while_better(((room, less) for less in self._learned()), 1):
                if (turn := self._taken(*asked)) is not None:
                    self._recorded(turn)

    def _take_usual(self) -> bool:
        """Turns with the room there is, or less; whether others may pay, too."""
        shares: Shares | None = self.shares
        room = self.rooms[0]
        while shares is not None and self._has_turns_left():
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

    def _take_wider(self, best: _Turn) -> None:
        """Many turns with other rooms and shares, each with time for copies as judged, too."""
        plans = min(_WIDER_PLANS, _WIDER_TASKS // len(self.decider.judged.tasks))
        enough = self._judgements + plans
        for turn in (*self._tightened(best), *self._reclocked(best)):
            self._recorded(turn)
        for asked in self._wider(best):
            if (taken := self._taken(*asked)) is not None:
                for turn in (taken, *self._reclocked(taken)):
                    self._recorded(turn)
            if self._judgements >= enough:
                break

    def _wider(self, first: _Turn) -> Iterator[tuple[int, Shares]]:
        """Ever more room, then ever less of the links beside all tasks, then what was learned."""
        full = full_shares(len(self.decider.small.tasks))
        rooms = ((round(more * first.room), full) for more in _WIDER_ROOMS)
        yield from self._while_better(rooms, _WORSE_IN_A_ROW)
        room = (self._best or first).room
        less = ((room, scaled(full, share)) for share in _WIDER_SHARES)
        yield from self._while_better(less, _WORSE_IN_A_ROW)
        if self._best is not None and self._best is not first:
            room = self._best.room
            yield from self._while_better(((room, shares) for shares in self._learned()), 1)

    def _while_better(
        self, asked: Iterable[tuple[int, Shares]], worse: int
    ) -> Iterator[tuple[int, Shares]]:
        """What is asked for, until so many turns in a row were no better than the best before."""
        left = worse
        for one in asked:
            best = self._best
            yield one
            left = left - 1 if self._best is best else worse
            if not left:
                return

    def _learned(self) -> Iterator[Shares]:
        """Less of the links where the best turn so far waited for copies, a few times."""
        for _ in range(_LEARNED_TURNS):
            shares = None if self._best is None else self._lowered(self._best)
            if shares is None:
                return
            yield shares

    def _recorded(self, turn: _Turn) -> _Turn:
        """The best turn so far, this one among them, whose plan is found now."""
        if self._best is None or turn.plan_ns < self._best.plan_ns:
            self._best = turn
        plan = self._plan_of(turn)
        self.found.append(replace(plan, tighter=partial(self._tighter, turn)))
        return self._best

    def _plan_of(self, turn: _Turn) -> Plan:
        make = partial(self.decider.schedule, turn.candidate, turn.emitted)
        return Plan(turn.plan_ns, make, wasteful=partial(wastes, turn.emitted))

    def _tighter(self, turn: _Turn) -> Plan | None:
        """Take no more memory than copies and packing need, where that costs next to nothing."""
        wasteful = wastes(turn.emitted)
        mended, found = [], []
        for tight in self._tightened(turn):
            if wasteful and not wastes(tight.emitted) and tight.plan_ns <= MENDED * turn.plan_ns:
                mended.append(tight)
            elif tight.plan_ns <= _AS_FAST * turn.plan_ns:
                found.append(tight)
        best = min(mended or found, key=lambda tight: tight.plan_ns, default=None)
        return None if best is None else self._plan_of(best)

    def _tightened(self, turn: _Turn) -> Iterator[_Turn]:
        """The same decisions in less memory, if any is wasted, as judged."""
        extent = arena_bytes(turn.emitted.schedule, DEVICE)
        ways = self.decider.tightened(turn.candidate, turn.emitted, turn.spans, turn.pass_ns)
        for candidate, placement in ways:
            made = self._emitted(placement)
            if arena_bytes(made.schedule, DEVICE) < extent:
                yield self._judged(turn.room, turn.shares, candidate, made)

    def _taken(self, room: int, shares: Shares) -> _Turn | None:
        """None where nothing fits, or nothing that is new."""
        fitting = self._fitting(room, shares)
        if fitting is None or (self._last and fitting[1].same_as(self._last.emitted.placement)):
            return None
        candidate, placement = fitting
        room = self.rooms[0] if self._last is None else room
        self._last = self._judged(room, shares, candidate, self._emitted(placement))
        return self._last

    def _reclocked(self, turn: _Turn) -> Iterator[_Turn]:
        """The same decisions, with time for copies by when tasks ran as judged, while it helps.

        The program's slots are too short where compute waits: copies begin by more tasks earlier,
        and hold more memory, than it takes.
        """
        while turn.plan_ns > _VERY_FAR * self.bound_ns:
            way = self.decider.reclocked(turn.candidate, turn.emitted, turn.spans, turn.pass_ns)
            if way is None or way[1].same_as(turn.emitted.placement):
                return
            candidate, placement = way
            again = self._judged(turn.room, turn.shares, candidate, self._emitted(placement))
            if again.plan_ns > GAIN * turn.plan_ns:
                return
            turn = again
            yield turn

    def _emitted(self, placement: Placement) -> Emitted:
        return emitted(placement, self.decider.machine, self.decider.caps, "optimal")

    def _judged(self, room: int, shares: Shares, candidate: Candidate, made: Emitted) -> _Turn:
        judged = self.judge(made.schedule)
        self._judgements += 1
        plan_ns = step_ns(made.schedule, judged, self.decider.num_rounds)
        return _Turn(
            room, shares, candidate.decisions.step_s * 1e9, plan_ns, candidate, made,
            judged.passes[-1], judged.step_ns,
        )  # fmt: skip

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

    def _has_turns_left(self) -> bool:
        """More while the last was the best so far, and very far from the bound."""
        last, most = self._last, self.most
        far = last is not None and last.plan_ns > _VERY_FAR * self.bound_ns
        if far and last is self._best and most > 1:
            most *= _MORE_TURNS
        return len(self.found) < most

    def _wants_less_room(self, turn: _Turn) -> bool:
        """Whether the room left for copies costs more than waiting for copies does.

        Much more, if the plan is not far from the bound.
        """
        waits_ns, room_ns = self._costs_ns(turn)
        most = _WAITS_PER_ROOM if turn.plan_ns > _FAR * self.bound_ns else _HARDLY_WAITS_PER_ROOM
        near = turn.plan_ns <= _NEAR * self.bound_ns
        return turn.room > 0 and not near and waits_ns < most * room_ns

    def _is_short_and_far(self, turn: _Turn) -> bool:
        """Whether a step of one round is far from its bound, and judged in no time."""
        short = self.decider.num_rounds == 1 and len(self.decider.judged.tasks) <= _SHORT
        return short and self.most > 1 and turn.plan_ns > _VERY_FAR * self.bound_ns

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
