"""Decide, judge, leave room on the links where compute waited for copies, and decide again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from twinstream.planner.choices import Choices
from twinstream.planner.congestion import Shares, lowered
from twinstream.planner.deciding import Candidate, Decider, NotWanted
from twinstream.planner.emission import Placement, emit
from twinstream.planner.judge import Judge
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.timeline import Timeline

_WITHIN_REACH = 1.02
_PROMISING = 0.99
_NOTHING_NEW = 2e-5
GAIN = 0.998

Maker = Callable[[Chain], Schedule]


@dataclass(frozen=True)
class Plan:
    """How to make a schedule of a chain of any number of rounds, and its step time as judged.

    `at_home`: it was decided with all state at home on the host.
    """

    step_ns: float
    make: Maker
    at_home: bool = False


def fastest_ns(plans: Sequence[Plan]) -> float:
    return min((plan.step_ns for plan in plans), default=inf)


def step_ns(schedule: Schedule, timeline: Timeline, num_rounds: int) -> float:
    """Step time on the few rounds of a schedule, and what each further middle round adds."""
    more = num_rounds - schedule.workload.rounds_per_step
    if more <= 0:
        return timeline.step_ns
    spans = timeline.passes[-1]
    end_of_round: dict[int, int] = {}
    for op, end_ns in zip(schedule.ops, spans.end_ns, strict=True):
        if isinstance(op, Compute) and op.label.round is not None:
            end_of_round[op.label.round] = end_ns
    return timeline.step_ns + more * (end_of_round[2] - end_of_round[1])


@dataclass
class Turns:
    """Turns with the same choices.

    Args:
        decider: of the chain.
        judge: a simulator.
        choices: what is fixed.
        at_home: they have all state at home on the host, where it was open; that is not tried
            where already the program's decisions are no faster than `beat_ns`.
        beat_ns: the step time of the best plan known.
        most: turns to take.
        shares: how much of the links the program may use beside each task at first; after the
            turns, what the fastest of the plans was decided with.
        rooms: bytes to leave for copies in flight, the first with which anything fits.
    """

    decider: Decider
    judge: Judge
    choices: Choices
    at_home: bool
    beat_ns: float
    most: int
    shares: Shares
    rooms: list[int]
    found: list[Plan] = field(default_factory=list)
    _decided_s: float = 0.0
    _before_s: float = 0.0
    _before: Placement | None = None

    def take(self) -> None:
        """All turns that may pay; `found` has their plans."""
        shares = self.shares
        while len(self.found) < self.most:
            fitting = self._fitting(shares)
            if fitting is None or (self._before and fitting[1].same_as(self._before)):
                break
            candidate, self._before = fitting
            self._before_s = self._decided_s
            schedule = emit(self._before, self.decider.machine, self.decider.caps, "optimal")
            timeline = self.judge(schedule)
            plan_ns = step_ns(schedule, timeline, self.decider.num_rounds)
            if plan_ns < fastest_ns(self.found):
                self.shares = shares
            going_on = self._goes_on(plan_ns)
            make = partial(self.decider.schedule, candidate)
            self.found.append(Plan(plan_ns, make, self.at_home))
            spans = timeline.passes[-1]
            less = lowered(shares, schedule, spans, self.decider.judged, self.decider.small)
            if not going_on or less is None:
                break
            shares = less

    def _fitting(self, shares: Shares) -> tuple[Candidate, Placement] | None:
        """The first time with as little room for copies in flight as it takes, then with that."""
        while self.rooms:
            try:
                fitting = self.decider.fitting(self.choices, self.rooms[0], shares, self._wanted)
            except NotWanted:
                return None
            if fitting is not None or self.found:
                return fitting
            del self.rooms[0]
        return None

    def _wanted(self, decided_s: float) -> bool:
        """Whether the program learned from the turn before; or may have the fastest plan."""
        self._decided_s = decided_s
        if self.found:
            return abs(decided_s - self._before_s) > _NOTHING_NEW * self._before_s
        return not self.at_home or decided_s * 1e9 <= GAIN * self.beat_ns

    def _goes_on(self, plan_ns: float) -> bool:
        """Whether another turn may pay after one with such a plan."""
        worse = self.at_home and bool(self.found) and plan_ns > GAIN * fastest_ns(self.found)
        promising = not self.found and self._before_s * 1e9 < _PROMISING * self.beat_ns
        hopeless = plan_ns > _WITHIN_REACH * self.beat_ns and not promising
        return not worse and not hopeless
