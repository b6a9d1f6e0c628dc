"""`optimal`: decisions from the lower bound's program, made whole, filled, judged, and again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.choices import OPEN, Choices, Home
from twinstream.planner.decide.decider import Decider, DoesNotFit, wastes
from twinstream.planner.emit.emission import Emitted, Placement, emitted
from twinstream.planner.emit.unrolling import of_all_rounds
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.judge import Judge
from twinstream.planner.lifetimes.rounds import JUDGED_ROUNDS, PROGRAM_ROUNDS, with_rounds
from twinstream.planner.refuse.last_resort import LastResort
from twinstream.planner.refuse.refusal import refused
from twinstream.planner.rules.full_recompute import full_recompute_plan
from twinstream.planner.rules.resident import holds_all_state, resident_plan
from twinstream.planner.rules.streaming import (
    plan_streaming,
    streaming_placement,
    streaming_plan,
)
from twinstream.planner.search.congestion import Shares, full_shares
from twinstream.planner.search.judged_plan import Plan, alone_ns, fastest_ns, step_ns, tightest
from twinstream.planner.search.turns import Turns
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.errors import TwinstreamError

_LESS_IN_FLIGHT = 3
_TURNS = 3
_NEAR_ENOUGH = 1.005
_FAR = 1.02
_REACHED = 1.004
_WORTH_IT = 0.5
_COSTS_NOTHING = 0.0012
_MOST_STREAMED = 5000

_STATE_AT_HOME: Mapping[str, Home] = {
    "parameter": "host", "gradient": "host", "optimizer_state": "host",
}  # fmt: skip

Policy = Callable[[Chain, Machine, Caps], Emitted]


def plan_optimal(
    chain: Chain, machine: Machine, caps: Caps, judge: Judge | None = None
) -> Schedule:
    """The fastest schedule found within the caps, by the judge.

    The program behind the lower bound says which content stays over which gap, what is offloaded
    and what is recomputed; its shares are made whole, memory is filled, and the judge says where
    compute waits for copies: there the program gets less of the links, and decides again. The
    plans of `resident` and `streaming` are judged, too.

    Raises:
        TwinstreamError: there is no judge.
        InfeasiblePlan: nothing fits the caps; it says what would do.
    """
    judge, num_rounds = required(judge), len(chain.round_starts)
    bound = lower_bound(with_rounds(chain, PROGRAM_ROUNDS), machine, caps, num_rounds=num_rounds)
    plans: list[Plan] = []
    if bound is not None:
        plans = optimal_plans(
            chain, machine, caps, judge, num_rounds=num_rounds, bound_s=bound.step_s
        )
        if plans:
            plans += streamed(
                chain, machine, caps, judge, OPEN, num_rounds=num_rounds, bound_s=bound.step_s,
                best_ns=fastest_ns(plans),
            )  # fmt: skip
    ranked = sorted(plans, key=lambda plan: plan.step_ns)
    for rank in range(len(ranked)):
        try:
            plan = tightest(ranked[rank:])
            return plan.make(chain).model_copy(update={"policy": "optimal"})
        except (InfeasiblePlan, DoesNotFit):
            continue
    try:
        return plan_streaming(chain, machine, caps).model_copy(update={"policy": "optimal"})
    except InfeasiblePlan as error:
        few = with_rounds(chain, JUDGED_ROUNDS)
        resort = LastResort(few, machine, OPEN, num_rounds)
        if (schedule := resort.schedule(lambda: chain, caps)) is not None:
            return schedule
        raise refused(few, caps, error, resort, search=True) from None


def required(judge: Judge | None) -> Judge:
    """The judge; without one there is no plan."""
    if judge is None:
        raise TwinstreamError("policy 'optimal' needs a simulator as its judge; pass one")
    return judge


def optimal_plans(  # noqa: PLR0913
    chain: Chain,
    machine: Machine,
    caps: Caps,
    judge: Judge | None,
    choices: Choices = OPEN,
    *,
    num_rounds: int,
    bound_s: float,
    beat_ns: float = inf,
    thorough: bool = True,
    decide: bool = True,
    outlasting: bool = True,
) -> list[Plan]:
    """Plans for a step of so many rounds, the fastest first; the chain may have as few as four.

    Nothing more is tried once `resident` or `full_recompute` is as good as the bound, to a fraction
    of a percent, or after two turns that are not near the step time to beat. State that is open is
    at home on the host at once where that costs next to nothing, else where plans are far from the
    bound. The plan of `streaming` is made only if `thorough` and there is no other (else see
    `streamed`), of no more than 5,000 tasks. Without `decide` other policies' plans are all.
    Where memory is very tight, packing may succeed only where offloads are not `outlasting` the
    step.
    """
    search = _Search(chain, machine, caps, required(judge), choices, num_rounds, outlasting)
    return search.plans(bound_s * 1e9, beat_ns, thorough=thorough, decide=decide)


class _Search:
    def __init__(  # noqa: PLR0913
        self,
        chain: Chain,
        machine: Machine,
        caps: Caps,
        judge: Judge,
        choices: Choices,
        num_rounds: int,
        outlasting: bool = True,
    ) -> None:
        self.decider = Decider(chain, machine, caps, num_rounds, outlasting=outlasting)
        self.machine, self.judge, self.num_rounds = machine, judge, num_rounds
        self.caps, self.choices = self.decider.caps, choices
        self.small, self.judged = self.decider.small, self.decider.judged

    def plans(self, bound_ns: float, beat_ns: float, *, thorough: bool, decide: bool) -> list[Plan]:
        """All plans that fit, the fastest first."""
        found: list[Plan] = []
        if self.choices.open and holds_all_state(self.small, self.caps):
            found += [*self._of(resident_plan), *self._of(full_recompute_plan)]
        if decide and fastest_ns(found) > bound_ns * _NEAR_ENOUGH:
            found += self._turns(beat_ns, bound_ns)
        last = thorough and not found and beat_ns == inf
        if last and self.choices.open and len(self.small.tasks) <= _MOST_STREAMED:
            found += self._of(streaming_plan)
        return sorted(found, key=lambda plan: plan.step_ns)

    def streamed(self, best_ns: float, bound_ns: float) -> list[Plan]:
        """The plan of `streaming`, where it may be faster than the best there is."""
        if self.choices.effort == "quick" or not self.choices.open:
            return []
        if best_ns <= bound_ns or len(self.small.tasks) > _MOST_STREAMED:
            return []

        def fast(placement: Placement) -> bool:
            return alone_ns(placement, self.machine, self.num_rounds) < best_ns

        try:
            placement = streaming_placement(self.judged, self.machine, self.caps, fast)
        except InfeasiblePlan:
            return []
        if not fast(placement):
            return []
        made = emitted(placement, self.machine, self.caps, "streaming")
        plan = self._plan_of(partial(streaming_plan, fast=fast), made)
        return [replace(plan, wasteful=partial(wastes, made))]

    def _of(self, policy: Policy) -> list[Plan]:
        """The plan of another policy, if it has one."""
        try:
            return [self._plan_of(policy, policy(self.judged, self.machine, self.caps))]
        except InfeasiblePlan:
            return []

    def _plan_of(self, policy: Policy, made: Emitted) -> Plan:
        """The plan of another policy, by what it made of the judged rounds."""

        def make(chain: Chain) -> Emitted:
            return policy(chain, self.machine, self.caps)

        plan_ns = step_ns(made.schedule, self.judge(made.schedule), self.num_rounds)
        return Plan(plan_ns, partial(of_all_rounds, made, make), theirs=True)

    def _turns(self, beat_ns: float, bound_ns: float) -> list[Plan]:
        """Plans by the program; of one that is far from the bound, with state elsewhere, too.

        The program may split what persists over both memories wherever that saves a copy; at home
        on the host it all takes turns on the device, which packs better than it bounds. That comes
        first where it costs next to nothing, and last with what the other learned of the links.
        """
        in_flight = self.decider.in_flight()
        rooms = [in_flight, in_flight // _LESS_IN_FLIGHT, 0] if in_flight else [0]
        fresh = full_shares(len(self.small.tasks)), rooms
        if not self.choices.open:
            return self._turns_of(self.choices, bound_ns, beat_ns, *fresh).found
        at_home = replace(self.choices, homes=_STATE_AT_HOME, strict_homes=False)
        costs, hoped_s = self._costs(at_home, *fresh)
        hoped_ns = max(bound_ns, hoped_s * 1e9)
        found: list[Plan] = []

        def more_pays() -> bool:
            best_ns = fastest_ns(found)
            far = best_ns > _FAR * bound_ns or best_ns > _REACHED * hoped_ns
            dear = costs * bound_ns > _WORTH_IT * (best_ns - bound_ns)
            return not found or (far and not dear and bound_ns * _NEAR_ENOUGH < beat_ns)

        def taken(choices: Choices, shares: Shares, rooms: Sequence[int]) -> Turns:
            best_ns = min(beat_ns, fastest_ns(found))
            turns = self._turns_of(choices, bound_ns, best_ns, shares, rooms)
            found.extend(turns.found)
            return turns

        if costs <= _COSTS_NOTHING:
            taken(at_home, *fresh)
        learned = fresh
        if more_pays():
            turns = taken(self.choices, *fresh)
            learned = turns.shares, turns.rooms or rooms
        if costs > _COSTS_NOTHING and more_pays():
            taken(at_home, *fresh)
        if learned != fresh and self.choices.effort != "quick" and more_pays():
            taken(at_home, *learned)
        return found

    def _costs(self, at_home: Choices, shares: Shares, rooms: Sequence[int]) -> tuple[float, float]:
        """What share of the step it costs to have all state at home, and seconds of it elsewhere.

        By the program, with as much room for copies as there may be; infinite where it never fits.
        """
        for room in rooms:
            some_s = self.decider.decided_s(self.choices, room, shares)
            home_s = self.decider.decided_s(at_home, room, shares)
            if home_s < inf:
                return max(0.0, home_s / some_s - 1.0) if some_s else 0.0, some_s
        return inf, inf

    def _turns_of(
        self,
        choices: Choices,
        bound_ns: float,
        beat_ns: float,
        shares: Shares,
        rooms: Sequence[int],
    ) -> Turns:
        """Turns with these choices, taken."""
        turns = Turns(
            self.decider, self.judge, choices, choices is not self.choices, bound_ns, beat_ns,
            self._most_turns(), shares, list(rooms),
        )  # fmt: skip
        turns.take()
        return turns

    def _most_turns(self) -> int:
        return 1 if self.choices.effort == "quick" else _TURNS


def streamed(  # noqa: PLR0913
    chain: Chain,
    machine: Machine,
    caps: Caps,
    judge: Judge | None,
    choices: Choices,
    *,
    num_rounds: int,
    bound_s: float,
    best_ns: float,
) -> list[Plan]:
    """The plan of `streaming` for a chain of which there is a plan, if it may be faster.

    None with effort `quick`, where something is fixed, at the bound, and of more than 5,000 tasks.
    """
    search = _Search(chain, machine, caps, required(judge), choices, num_rounds)
    return search.streamed(best_ns, bound_s * 1e9)
