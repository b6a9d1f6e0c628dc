"""`optimal`: decisions from the lower bound's program, made whole, filled, judged, and again."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np

from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound import fewest_copies, lower_bound
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.congestion import Shares, full_shares, lowered
from twinstream.planner.emission import Placement, emit, host_bytes
from twinstream.planner.filling import Pressure, filled
from twinstream.planner.folded_packing import pack_folded
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.judge import Judge
from twinstream.planner.library_memory import with_library_memory
from twinstream.planner.margins import Allowances, QueueModel
from twinstream.planner.policies.full_recompute import plan_full_recompute
from twinstream.planner.policies.resident import plan_resident
from twinstream.planner.policies.streaming import plan_streaming
from twinstream.planner.refusal import refused
from twinstream.planner.rounding import Decisions
from twinstream.planner.rounds import PROGRAM_ROUNDS, with_rounds
from twinstream.planner.task_sequence import TaskSequence
from twinstream.planner.uses import UnitMap
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Compute
from twinstream.schedule.timeline import Timeline

JUDGED_ROUNDS = 4
_LONGEST_IN_BLOCKS = 4.0
_IN_FLIGHT_BLOCKS = 0.5
_IN_FLIGHT_SHARE = 0.25
_MOST_UNITS_IN_FLIGHT = 3
_LESS_IN_FLIGHT = 3
_TURNS = 3
_REPAIRS = 8
_HOST_REPAIRS = 3
_HOST_SHARE = 0.99
_NEAR_ENOUGH = 1.005
_FAR_ENOUGH = 1.01
_FAR_FROM_BOUND = 1.05
_WITHIN_REACH = 1.02
_GAIN = 0.998
_TURNS_OF_MANY = 3
MANY_TASKS = 1500

_STATE_AT_HOME = Choices(homes={"parameter": "host", "gradient": "host", "optimizer_state": "host"})

Maker = Callable[[Chain], Schedule]
Policy = Callable[[Chain, Machine, Caps], Schedule]


class DoesNotFit(TwinstreamError):
    """A plan that fits few rounds does not fit all of them."""


@dataclass(frozen=True)
class Plan:
    """How to make a schedule of a chain of any number of rounds, and its step time as judged.

    `at_home`: it was decided with all state at home on the host.
    """

    step_ns: float
    make: Maker
    at_home: bool = False


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
    for plan in plans:
        try:
            return plan.make(chain).model_copy(update={"policy": "optimal"})
        except (InfeasiblePlan, DoesNotFit):
            continue
    few = with_rounds(chain, JUDGED_ROUNDS)
    fits = partial(has_plan, few, machine, judge, OPEN, num_rounds)
    try:
        return plan_streaming(chain, machine, caps).model_copy(update={"policy": "optimal"})
    except InfeasiblePlan as error:
        raise refused(few, caps, error, fits) from None


def required(judge: Judge | None) -> Judge:
    """The judge; without one there is no plan."""
    if judge is None:
        raise TwinstreamError("policy 'optimal' needs a simulator as its judge; pass one")
    return judge


def has_plan(
    chain: Chain, machine: Machine, judge: Judge, choices: Choices, num_rounds: int, caps: Caps
) -> bool:
    """Whether any plan fits the caps; none is judged."""
    return _Search(chain, machine, caps, judge, choices, num_rounds).fits()


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
    at_home: bool = False,
) -> list[Plan]:
    """Plans for a step of so many rounds, the fastest first; the chain may have as few as four.

    Nothing more is tried once a plan is as good as the bound, to a fraction of a percent, or
    after two turns that are not near the step time to beat. State is tried at home on the host
    where it is open and plans are far from the bound, or at once with `at_home`. The plan of
    `streaming` is judged where the others are far from the bound; of chains of very many tasks
    only if `thorough` and there is no other.
    """
    search = _Search(chain, machine, caps, required(judge), choices, num_rounds)
    return search.plans(bound_s * 1e9, beat_ns, thorough=thorough, at_home=at_home)


@dataclass(frozen=True)
class _Candidate:
    decisions: Decisions
    allowances: Allowances


class _Search:
    def __init__(
        self,
        chain: Chain,
        machine: Machine,
        caps: Caps,
        judge: Judge,
        choices: Choices,
        num_rounds: int,
    ) -> None:
        self.machine, self.judge, self.num_rounds = machine, judge, num_rounds
        self.choices = choices
        self.caps = with_library_memory(caps, chain)
        self.small = with_rounds(chain, PROGRAM_ROUNDS)
        self.judged = with_rounds(chain, JUDGED_ROUNDS)
        self.call_ns = {name: cost_alone_ns(c.cost, machine) for name, c in chain.calls.items()}
        self.block_ns = max(self.call_ns[task.call] for task in self.small.tasks)

    def plans(
        self, bound_ns: float, beat_ns: float, *, thorough: bool, at_home: bool
    ) -> list[Plan]:
        """All plans that fit, the fastest first."""
        found: list[Plan] = []
        if self.choices.open and self._holds_all_state():
            found += [*self._of(plan_resident), *self._of(plan_full_recompute)]
        if _fastest_ns(found) > bound_ns * _NEAR_ENOUGH:
            found += self._turns(beat_ns, bound_ns, at_home=at_home)
        if self._may_stream(min(_fastest_ns(found), beat_ns), bound_ns, thorough=thorough):
            found += self._of(plan_streaming)
        return sorted(found, key=lambda plan: plan.step_ns)

    def _may_stream(self, best_ns: float, bound_ns: float, *, thorough: bool) -> bool:
        """Whether the plan of `streaming` may be wanted."""
        if not self.choices.open:
            return False
        if best_ns == inf:
            return thorough
        if self.choices.effort == "quick":
            return False
        return best_ns > bound_ns * _FAR_FROM_BOUND and len(self.small.tasks) <= MANY_TASKS

    def fits(self) -> bool:
        """Whether a plan would be found by the program, with no bytes left for copies in flight."""
        may_reside = self.choices.open and self._holds_all_state()
        if may_reside and self._made(plan_resident) is not None:
            return True
        return self._fitting(self.choices, 0, full_shares(len(self.small.tasks))) is not None

    def _holds_all_state(self) -> bool:
        """Whether the device has room for what persists at the least."""
        cap, persistent = self.caps.arena_bytes("device"), set(self.small.persistent)
        state = sum(t.size_bytes for t in self.small.tensors if t.tensor_id in persistent)
        return cap is None or state <= cap

    def _of(self, policy: Policy) -> list[Plan]:
        """The plan of another policy, if it has one."""
        schedule = self._made(policy)
        if schedule is None:
            return []
        make = partial(_plain, policy, self.machine, self.caps)
        return [Plan(self._step_ns(schedule, self.judge(schedule)), make)]

    def _made(self, policy: Policy) -> Schedule | None:
        """The judged rounds by another policy, if they fit."""
        try:
            return policy(self.judged, self.machine, self.caps)
        except InfeasiblePlan:
            return None

    def _turns(self, beat_ns: float, bound_ns: float, *, at_home: bool) -> list[Plan]:
        """Plans by the program; of one that is far from the bound, with all state at home, too.

        The program may split what persists over both memories wherever that saves a copy; at home
        on the host it all takes turns on the device, which at times packs better than it bounds.
        """
        shares = full_shares(len(self.small.tasks))
        found: list[Plan] = []
        if not (at_home and self.choices.open):
            found, shares = self._turns_of(self.choices, shares, beat_ns)
            near = _fastest_ns(found) <= bound_ns * _FAR_ENOUGH
            if near or not self.choices.open or self.choices.effort == "quick":
                return found
        fastest_ns = min(beat_ns, _fastest_ns(found))
        return found + self._turns_of(_STATE_AT_HOME, shares, fastest_ns)[0]

    def _turns_of(
        self, choices: Choices, shares: Shares, beat_ns: float
    ) -> tuple[list[Plan], Shares]:
        """Decide, judge, and leave room on the links where compute waited for copies.

        What is returned are the plans, and the shares that the fastest of them was decided with.
        """
        in_flight = self._in_flight()
        best_shares = shares
        found: list[Plan] = []
        before: _Candidate | None = None
        less_in_flight = iter((in_flight // _LESS_IN_FLIGHT, 0) if in_flight else ())
        while len(found) < self._most_turns():
            fitting = self._fitting(choices, in_flight, shares)
            if fitting is None:
                in_flight = next(less_in_flight, -1)
                if found or in_flight < 0:
                    break
                continue
            candidate, placement = fitting
            if candidate == before:
                break
            before = candidate
            schedule = emit(placement, self.machine, self.caps, "optimal")
            timeline = self.judge(schedule)
            step_ns = self._step_ns(schedule, timeline)
            plan = Plan(step_ns, partial(self.schedule, candidate), choices is _STATE_AT_HOME)
            tried = len(found) > (1 if choices is self.choices else 0)
            worse = tried and plan.step_ns > _GAIN * _fastest_ns(found)
            hopeless = bool(found) and plan.step_ns > _WITHIN_REACH * beat_ns
            if plan.step_ns < _fastest_ns(found):
                best_shares = shares
            found.append(plan)
            spans = timeline.passes[-1]
            less = lowered(shares, schedule, spans, self.judged, self.small)
            if worse or hopeless or less is None:
                break
            shares = less
        return found, best_shares

    def schedule(self, candidate: _Candidate, chain: Chain) -> Schedule:
        """The decisions as a schedule of a chain of any number of rounds."""
        sequence = TaskSequence.of(chain, candidate.decisions, self.call_ns)
        placement, over = self._place(sequence, candidate)
        if over:
            raise DoesNotFit(f"{max(over.values()):,} bytes of device memory are missing")
        return emit(placement, self.machine, self.caps, "optimal")

    def _most_turns(self) -> int:
        if self.choices.effort == "quick":
            return 1
        return _TURNS_OF_MANY if len(self.small.tasks) > MANY_TASKS else _TURNS

    def _in_flight(self) -> int:
        """Bytes to leave for copies: what both directions copy beside a block, within reason.

        That is a share of the device, and a few of the largest activations, if there are any.
        """
        rates = [self.machine.rate(f"pcie_{way}_bytes_per_s") for way in ("h2d", "d2h")]
        beside = self.block_ns / 1e9 * sum(rate for rate in rates if rate < inf)
        units = UnitMap(self.small).units.values()
        saved = [u.tensor.size_bytes for u in units if u.tensor.role == "activation"]
        wanted = round(_IN_FLIGHT_BLOCKS * beside)
        if saved:
            wanted = min(wanted, _MOST_UNITS_IN_FLIGHT * max(saved))
        device = self.caps.arena_bytes("device")
        return wanted if device is None else min(wanted, round(_IN_FLIGHT_SHARE * device))

    def _longest_ahead_ns(self) -> float:
        blocks = self.choices.prefetch_blocks
        return self.block_ns * (_LONGEST_IN_BLOCKS if blocks is None else blocks)

    def _fitting(
        self, choices: Choices, in_flight: int, shares: Shares
    ) -> tuple[_Candidate, Placement] | None:
        """Decisions that fit both caps, with so many bytes left for copies in flight."""
        device, host = self.caps.arena_bytes("device"), self.caps.arena_bytes("host")
        units = UnitMap(self.small)
        host_room = None if host is None else round(host * _HOST_SHARE)
        for _ in range(_HOST_REPAIRS):
            caps = _caps_of_arenas(
                self.caps, None if device is None else device - in_flight, host_room
            )
            solved = fewest_copies(
                self.small, self.machine, caps, num_rounds=self.num_rounds, shares=shares,
                choices=choices,
            )  # fmt: skip
            if solved is None:
                return None
            decisions = Decisions.of(solved, self.small, units, choices)
            found = self._packed(decisions, Pressure.of(solved.link_s_per_gb_per_s), in_flight)
            if found is None:
                return None
            over = _over(host_bytes(found[1]), host)
            if not over:
                return found
            host_room = None if host_room is None else host_room - over
        return None

    def _packed(
        self, decisions: Decisions, pressure: Pressure, in_flight: int
    ) -> tuple[_Candidate, Placement] | None:
        """What fits the device; where bytes cannot be packed, less is kept."""
        device = self.caps.arena_bytes("device")
        sequence = TaskSequence.of(self.small, decisions, self.call_ns)
        judged = TaskSequence.of(self.judged, decisions, self.call_ns)
        queues = QueueModel(self.machine, self._longest_ahead_ns())
        room = np.full(len(sequence.tasks), 0 if device is None else device, dtype=np.int64)
        shortage = 0
        for _ in range(_REPAIRS):
            if device is not None:
                fitting = filled(sequence, decisions, room - in_flight, pressure)
                fitting = fitting or filled(sequence, decisions, room, pressure)
                if fitting is None:
                    return None
                decisions = fitting
            allowances = queues.allowances(sequence, sequence.stays(decisions), device)
            candidate = _Candidate(decisions, allowances)
            placement, over = self._place(judged, candidate)
            if device is None or not over:
                return candidate, placement
            shortage = max(2 * shortage, max(over.values()))
            for task in over:
                room[task] = min(room[task], device - shortage)
        return None

    def _place(
        self, sequence: TaskSequence, candidate: _Candidate
    ) -> tuple[Placement, dict[int, int]]:
        """The candidate with offsets, and what sticks out of the device's arena at which task."""
        stays = candidate.allowances.widened(sequence, sequence.stays(candidate.decisions))
        cap = self.caps.arena_bytes("device")
        packed = pack_folded(stays, sequence.units, sequence.folding, cap)
        placement = Placement(
            sequence.chain, sequence.tasks, sequence.units, packed.stays, packed.offsets
        )
        return placement, packed.over_bytes

    def _step_ns(self, schedule: Schedule, timeline: Timeline) -> float:
        """Step time on a few rounds, and what each further middle round adds."""
        more = self.num_rounds - len(self.judged.round_starts)
        if more <= 0:
            return timeline.step_ns
        spans = timeline.passes[-1]
        end_of_round: dict[int, int] = {}
        for op, end_ns in zip(schedule.ops, spans.end_ns, strict=True):
            if isinstance(op, Compute) and op.label.round is not None:
                end_of_round[op.label.round] = end_ns
        return timeline.step_ns + more * (end_of_round[2] - end_of_round[1])


def _fastest_ns(plans: list[Plan]) -> float:
    return min((plan.step_ns for plan in plans), default=inf)


def _plain(policy: Policy, machine: Machine, caps: Caps, chain: Chain) -> Schedule:
    return policy(chain, machine, caps)


def _over(needed_bytes: int, cap_bytes: int | None) -> int:
    """By how much a cap is to be lowered: what is missing, and a quarter more."""
    return 0 if cap_bytes is None else max(0, needed_bytes - cap_bytes) * 5 // 4


def _caps_of_arenas(caps: Caps, device_arena: int | None, host_arena: int | None) -> Caps:
    """Caps whose arenas have these sizes."""
    reserve = caps.outside_arena_bytes
    return caps.model_copy(
        update={
            "device_bytes": None if device_arena is None else max(0, device_arena) + reserve,
            "host_bytes": None if host_arena is None else max(0, host_arena),
        }
    )
