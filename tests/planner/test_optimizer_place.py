"""Where the update is: what `optimal` chooses, and loads for updates that a pass begins with."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from tests.helpers.planning import plan_chain, request_of
from tests.helpers.plans import MACHINE, enough_device_bytes
from tests.helpers.relaxed_residencies import sequence_and_residencies
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower
from twinstream.models.recipe import OptimizerPlace, Recipe
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.decide.margins import QueueModel, _trim, alive_bytes
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.lifetimes.residencies import Residency
from twinstream.planner.lifetimes.view import ChainView
from twinstream.planner.limits import SearchLimits
from twinstream.planner.pack.folded_packing import pack_folded, trimmed
from twinstream.planner.planner import Planner
from twinstream.planner.policies import ON_DEVICE
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.planner.warm_start import WarmStartError
from twinstream.schedule.document import Caps, RankSchedule, Schedule
from twinstream.schedule.ops import Copy
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import steady_state

AFTER: OptimizerPlace = "device_after_backward"
BEFORE: OptimizerPlace = "device_before_next_use"
SPEC = small("tiny", num_layers=3)


def linked(times_slower: float) -> Machine:
    """The CPU with slower copies."""
    names = [f"pcie_{way}_bytes_per_s" for way in ("h2d", "d2h")]
    numbers = {name: getattr(MACHINE, name) for name in names}
    return MACHINE.model_copy(
        update={
            name: was.model_copy(update={"value": was.value / times_slower})
            for name, was in numbers.items()
        }
    )


def request(place: OptimizerPlace = "device", *, clips: bool = True) -> PlanRequest:
    step = TrainingStep(
        seq_len=32, tokens_per_step=256, chunk_tokens=64, chunks_per_round=1,
        recipe=Recipe(clips=clips, optimizer=place),
    )  # fmt: skip
    quick = Choices(effort="quick")
    return request_of(SPEC, step, linked(30.0), Caps(device_bytes=250_000), choices=quick)


def step_ns(schedule: RankSchedule) -> float:
    return steady_state(schedule, linked(30.0)).step_ns


@pytest.fixture(scope="module")
def by_place() -> dict[OptimizerPlace, RankSchedule]:
    return {place: Planner(steady_state).plan(request(place)).only for place in (AFTER, BEFORE)}


# --- which is chosen


def test_the_faster_place_is_chosen_where_it_is_open(by_place):
    planner = Planner(steady_state)
    assert planner.prepared(request()).recipe.optimizer == "device", "it stays open"
    found = planner.plan(request())
    best = min(by_place.values(), key=step_ns)
    assert found.recipe == best.recipe
    assert found.ops == best.ops
    bounds = [plan.bound for plan in by_place.values()]
    assert found.bound is not None and None not in bounds
    assert found.bound.step_s == best.bound.step_s
    assert found.bound.family_step_s == min(bound.family_step_s for bound in bounds)


def test_a_place_that_is_named_and_no_clipping_leave_no_choice(by_place):
    for place, plan in by_place.items():
        assert plan.recipe["optimizer"] == place
    for place in ON_DEVICE:
        asked = request(place, clips=False)
        assert [each.recipe.optimizer for each in asked.placed(ON_DEVICE)] == [place]


@pytest.mark.parametrize("fails", [(AFTER,), (BEFORE,), (AFTER, BEFORE)])
def test_where_one_place_does_not_fit_the_other_is_the_answer(by_place, monkeypatch, fails):
    def optimal(planner: Planner, asked: PlanRequest, *, name_caps: bool) -> RankSchedule:
        place = asked.recipe.optimizer
        if place in fails:
            raise refusal if name_caps else InfeasiblePlan(refusal.shortage)
        return by_place[place]

    with pytest.raises(InfeasiblePlan) as caught:
        Planner(steady_state).plan(replace(request(AFTER), caps=Caps(device_bytes=50_000)))
    refusal = caught.value
    monkeypatch.setattr(Planner, "_optimal", optimal)
    if len(fails) == 2:
        with pytest.raises(InfeasiblePlan):
            Planner(steady_state).plan(request())
    else:
        found = Planner(steady_state).plan(request())
        assert found.recipe["optimizer"] not in fails


def test_a_known_plan_counts_for_its_own_place(by_place):
    """Where the place is open; a plan of another than the one named stands for nothing."""
    for known in by_place.values():
        found = Planner(steady_state).plan(request(), [Schedule.of_rank(known)]).only
        assert step_ns(found) <= step_ns(known)
    with pytest.raises(WarmStartError, match="the recipe's optimizer"):
        Planner(steady_state).plan(request(AFTER), [Schedule.of_rank(by_place[BEFORE])])


@pytest.mark.parametrize("policy", ["streaming", "resident"])
def test_a_rule_keeps_to_the_place_that_is_named(policy):
    asked = replace(request(BEFORE), policy=policy, caps=Caps(), choices=OPEN)
    assert Planner(steady_state).plan(asked).recipe["optimizer"] == BEFORE
    after = replace(request(), policy=policy, caps=Caps(), choices=OPEN)
    assert Planner(steady_state).plan(after).recipe["optimizer"] == AFTER


# --- plans


@pytest.mark.parametrize(
    ("workload", "slower", "quarters"),
    [("packed", 1.0, 8), ("packed", 100.0, 5), ("sliced", 1.0, 5), ("sliced", 100.0, 8)],
)
def test_plans_are_never_faster_than_their_bound(workload, slower, quarters):
    """All are proven by the planner."""
    chain = tiny_chain(workload, "tiny", Recipe(clips=True, optimizer=BEFORE))
    caps = Caps(device_bytes=enough_device_bytes(chain, "streaming") * quarters // 4)
    plan = plan_chain(chain, linked(slower), caps, "optimal", SearchLimits(cuts=1, turns=1))
    assert plan.bound is not None
    assert steady_state(plan, linked(slower)).step_ns >= plan.bound.step_s * 1e9


def test_what_is_loaded_for_the_next_pass_is_carried_on_the_device_and_at_home(by_place):
    plan = by_place[BEFORE]
    slots: dict[str, set[str]] = {}
    for item in plan.carried:
        slots.setdefault(item.tensor, set()).add(item.slot.split(".")[0])
    twice = {tensor for tensor, found in slots.items() if len(found) == 2}
    assert twice
    last = {}
    for op in plan.ops:
        if isinstance(op, Copy) and op.tensor in twice and op.stream.queue == "h2d":
            last[op.tensor] = op
    for tensor in twice:
        assert last[tensor].version > 0, "what this pass has made of it"
        (slot,) = {c.slot for c in plan.carried if c.tensor == tensor and "device" in c.slot}
        assert last[tensor].destination == slot


# --- loads in the pass before


WORKLOAD = Workload(seq_len=16, chunk_tokens=32, chunks_per_round=2, rounds_per_step=3)
VIEW = ChainView(lower(SPEC, WORKLOAD, Recipe(clips=True, optimizer=BEFORE)))
CALL_NS = VIEW.call_ns(MACHINE)
SEQUENCE, RESIDENCIES = sequence_and_residencies(VIEW)
NUM_TASKS = len(SEQUENCE.tasks)


def widened(slower: float, most_bytes: int | None = None, *, ahead: bool = True) -> list[Residency]:
    queues = QueueModel(linked(slower), 8 * max(CALL_NS.values()), ahead=ahead)
    return queues.allowances(SEQUENCE, RESIDENCIES, most_bytes).widened(SEQUENCE, RESIDENCIES)


def test_loads_for_the_first_tasks_begin_in_the_pass_before_the_slower_the_earlier():
    assert VIEW.begins_with_updates
    assert not any(residency.ahead for residency in widened(30.0, ahead=False))
    early = [sum(s.ahead[1] - s.ahead[0] for s in widened(x) if s.ahead) for x in (0.01, 10, 60)]
    assert early[0] <= early[1] < early[2]
    for residency in widened(60.0):
        if residency.ahead is not None:
            assert residency.begin == 0 and not residency.enters
            assert residency.ahead[1] == NUM_TASKS
            assert VIEW.units.units[residency.unit].persistent


def test_a_unit_is_not_loaded_for_the_next_pass_while_it_is_still_there():
    last = {residency.unit: residency for residency in widened(60.0)}
    for residency in widened(60.0):
        if residency.ahead is not None:
            end = last[residency.unit].uses[-1].position + 1
            assert end <= last[residency.unit].end <= residency.ahead[0]
            assert not last[residency.unit].later


def test_what_is_alive_counts_what_is_loaded_for_the_next_pass():
    slow = widened(60.0)
    without = alive_bytes(SEQUENCE, [replace(residency, ahead=None) for residency in slow])
    more = alive_bytes(SEQUENCE, slow) - without
    assert more.max() > 0
    assert not more[: min(residency.ahead[0] for residency in slow if residency.ahead)].any()


@pytest.mark.parametrize("share", [0.0, 1 / 3, 5 / 6])
def test_where_too_much_is_alive_loads_for_the_next_pass_come_later(share):
    bare, full = (
        alive_bytes(SEQUENCE, residencies).max() for residencies in (RESIDENCIES, widened(60.0))
    )
    most = int(bare + share * (full - bare))
    found = widened(60.0, most)
    assert alive_bytes(SEQUENCE, found).max() <= most < full


def test_what_is_due_last_is_loaded_later_first():
    slow = [residency for residency in widened(60.0) if residency.ahead]
    assert len(slow) > 1
    begins = np.asarray([residency.ahead[0] - NUM_TASKS for residency in slow])
    ends = np.asarray([residency.uses[-1].position + 1 for residency in slow])
    bare = [replace(s, begin=s.uses[0].position, ahead=None) for s in slow]
    excess = np.zeros(NUM_TASKS, dtype=np.int64)
    excess[-1] = 1
    cut = begins.copy()
    _trim(SEQUENCE, bare, cut, ends, excess)
    changed = np.flatnonzero(cut != begins)
    assert cut[changed].tolist() == [0]
    assert bare[changed[0]].begin == max(residency.begin for residency in bare)
    assert excess.max() <= 0


@pytest.mark.parametrize("cap", [None, 260_000])
def test_what_is_loaded_ahead_shares_its_bytes_with_nothing_there(cap):
    found = pack_folded(widened(60.0), VIEW.units, SEQUENCE.folding, cap)
    assert any(residency.ahead for residency in found.residencies)
    units = VIEW.units.units
    placed: Sequence[tuple[Residency, int]] = list(
        zip(found.residencies, found.offsets, strict=True)
    )
    for (one, low), (other, other_low) in combinations(placed, 2):
        meet = any(a < d and c < b for a, b in one.ranges for c, d in other.ranges)
        if meet and one.unit != other.unit:
            size, other_size = (units[s.unit].tensor.size_bytes for s in (one, other))
            assert low + size <= other_low or other_low + other_size <= low


def test_a_residency_at_a_share_of_its_time_first_gives_up_what_lies_in_the_pass_before():
    residency = next(s for s in RESIDENCIES if 4 <= s.uses[0].position < 20 and not s.enters)
    first = residency.uses[0].position
    early = replace(residency, begin=0, ahead=(NUM_TASKS - first, NUM_TASKS))
    assert trimmed(early, 1.0) is early
    assert trimmed(early, 0.75).ahead == (NUM_TASKS - (3 * 2 * first // 4 - first), NUM_TASKS)
    assert trimmed(early, 0.5) == replace(early, ahead=None)
    assert trimmed(early, 0.0) == replace(early, begin=first, ahead=None)
