"""Planning a step with `optimal`: how it is cut, what the plan promises, and what is refused."""

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.hardware_profiles.machines import number
from tests.helpers.machines_for_plans import fast_link_machine, slow_link_machine
from tests.helpers.planning import plan_chain
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipe import Recipe
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.choices import Choices, Effort
from twinstream.planner.decide.decider import Decider
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.refuse.last_resort import LastResort
from twinstream.planner.rules.streaming import streaming_placement
from twinstream.planner.search import optimal
from twinstream.planner.search.chunking import TrainingStep, admissible, possible
from twinstream.planner.search.cuts import Cuts
from twinstream.planner.search.family import Family
from twinstream.planner.search.judged_plan import Plan, alone_ns
from twinstream.planner.search.optimal import optimal_plans, streamed
from twinstream.planner.step_plan import gc_paused, plan_step, with_tokens
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate

SPEC = small("tiny")
KIB = 1024
MACHINES = {"cpu": MACHINE, "fast link": fast_link_machine(), "slow link": slow_link_machine()}
STEPS = {
    "one size": TrainingStep(seq_len=64, tokens_per_step=256),
    "several sizes": TrainingStep(seq_len=1024, tokens_per_step=4096),
    "sliced": TrainingStep(
        seq_len=64, tokens_per_step=128, chunk_tokens=32, chunks_per_round=2
    ),
    "twenty rounds": TrainingStep(
        seq_len=64, tokens_per_step=1280, chunk_tokens=64, chunks_per_round=1
    ),
}  # fmt: skip
LARGEST_CAPS_KIB = {"several sizes": 12 * 1024}


def caps_of(step: str) -> list[Caps]:
    """None, one that holds nearly everything, and ever less."""
    largest = LARGEST_CAPS_KIB.get(step, 900)
    return [Caps()] + [Caps(device_bytes=largest * share // 10 * KIB) for share in (10, 7, 5)]


@cache
def planned(step: str, caps: Caps, machine: str = "cpu") -> Schedule:
    return plan_step(SPEC, STEPS[step], MACHINES[machine], caps, "optimal", judge_of(machine))


def judge_of(machine: str):
    def judge(schedule: Schedule) -> Timeline:
        return simulate(schedule, MACHINES[machine])

    return judge


CASES = [(step, caps) for step in STEPS for caps in caps_of(step)]


def extent_bytes(schedule: Schedule) -> int:
    return max(s.offset_bytes + s.size_bytes for s in schedule.slots if s.tier == DEVICE)


# --- how the step is cut


@pytest.mark.parametrize(("step", "caps"), CASES)
def test_the_workload_is_admissible_or_one_of_smaller_chunks_where_no_admissible_one_fits(
    step, caps
):
    schedule = planned(step, caps)
    assert (schedule.policy, schedule.caps) == ("optimal", caps)
    if schedule.workload in admissible(SPEC, STEPS[step]):
        return
    assert schedule.workload in possible(SPEC, STEPS[step])
    for workload in admissible(SPEC, STEPS[step]):
        with pytest.raises(InfeasiblePlan):
            plan_chain(lower(SPEC, workload), MACHINE, caps, "optimal", judge_of("cpu"))


def test_of_several_admissible_workloads_the_one_with_the_fastest_plan_is_chosen():
    """A small cap favours smaller chunks, much memory the largest."""
    chosen = set()
    for caps in caps_of("several sizes"):
        schedule = planned("several sizes", caps)
        chosen.add(schedule.workload.chunk_tokens)
        ours_ns = judge_of("cpu")(schedule).step_ns
        for workload in admissible(SPEC, STEPS["several sizes"]):
            chain = lower(SPEC, workload)
            try:
                other = plan_chain(chain, MACHINE, caps, "optimal", judge_of("cpu"))
            except InfeasiblePlan:
                continue
            other_ns = judge_of("cpu")(other).step_ns
            assert ours_ns <= 1.01 * other_ns
            assert workload != schedule.workload or ours_ns == other_ns
    assert len(chosen) > 1


@pytest.mark.parametrize(
    "fixed",
    [
        {"tokens_per_step": 512},
        {"chunk_tokens": 128},
        {"chunks_per_round": 2},
        {"tokens_per_step": 512, "chunk_tokens": 64, "chunks_per_round": 4},
    ],
)
def test_what_the_user_fixes_stays_fixed(fixed):
    step = TrainingStep(seq_len=64, optimizer_overhead=0.2, **fixed)
    caps = Caps(device_bytes=900 * KIB)
    found = plan_step(SPEC, step, MACHINE, caps, "optimal", judge_of("cpu")).workload
    assert found.seq_len == 64
    assert found.chunk_tokens == fixed.get("chunk_tokens", found.chunk_tokens)
    assert found.chunks_per_round == fixed.get("chunks_per_round", found.chunks_per_round)
    tokens = found.chunk_tokens * found.chunks_per_round * found.rounds_per_step
    assert tokens == with_tokens(SPEC, step, MACHINE, caps).tokens_per_step
    assert tokens == fixed.get("tokens_per_step", tokens)


@pytest.mark.parametrize("place", ["device", "device_after_backward"])
@pytest.mark.parametrize("policy", ["optimal", "streaming"])
def test_the_optimizer_runs_when_the_recipe_says(policy, place):
    step = TrainingStep(seq_len=64, tokens_per_step=256, recipe=Recipe(optimizer=place))
    schedule = plan_step(
        SPEC, step, MACHINE, Caps(device_bytes=900 * KIB), policy, judge_of("cpu")
    )  # fmt: skip
    kinds = [op.label.kind for op in schedule.ops if isinstance(op, Compute)]
    updates_before_backward_is_over = "embed_backward" in kinds[kinds.index("optimizer_step") :]
    assert updates_before_backward_is_over == (place == "device")
    assert schedule.recipe["optimizer"] == place


# --- bounds


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("step", STEPS)
def test_the_bound_of_the_family_is_below_its_own_and_that_below_the_simulated_step(step, machine):
    for caps in caps_of(step)[:3]:
        schedule = planned(step, caps, machine)
        bound = schedule.bound
        assert bound is not None and bound.family_step_s is not None
        assert 0 < bound.family_step_s <= bound.step_s
        assert bound.step_s <= judge_of(machine)(schedule).step_ns / 1e9


def test_no_admissible_workload_has_a_bound_below_that_of_the_family():
    """But for half a percent: by that much a workload must be better to be bounded at all."""
    for caps in caps_of("several sizes"):
        bound = planned("several sizes", caps).bound
        assert bound is not None and bound.family_step_s is not None
        bounds_s = [
            found.step_s
            for workload in admissible(SPEC, STEPS["several sizes"])
            if (found := lower_bound(lower(SPEC, workload), MACHINE, caps)) is not None
        ]
        assert min(bounds_s) / 1.005 <= bound.family_step_s <= min(bounds_s) * 1.005


def test_without_a_cap_the_step_is_at_its_bound_but_for_latencies():
    schedule = planned("several sizes", Caps())
    assert schedule.bound is not None
    assert judge_of("cpu")(schedule).step_ns / 1e9 <= 1.01 * schedule.bound.step_s


# --- the plan


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("step", ["one size", "several sizes", "sliced"])
def test_it_is_never_slower_than_another_policy_on_the_same_chain(step, machine):
    compared = 0
    for caps in caps_of(step)[:: 1 if machine == "cpu" else 2]:
        schedule = planned(step, caps, machine)
        chain = lower(SPEC, schedule.workload)
        ours_ns = judge_of(machine)(schedule).step_ns
        for policy in ("resident", "streaming", "full_recompute"):
            try:
                other = plan_chain(chain, MACHINES[machine], caps, policy)
            except InfeasiblePlan:
                continue
            compared += 1
            assert ours_ns <= judge_of(machine)(other).step_ns, (policy, caps)
    assert compared >= 4


@pytest.mark.parametrize(("num_layers", "device_kib"), [(4, 430), (3, 408), (2, 424)])
def test_where_streaming_beats_the_programs_decisions_its_plan_is_taken(num_layers, device_kib):
    rates = {f"pcie_{way}_bytes_per_s": number(3e8) for way in ("h2d", "d2h")}
    machine = MACHINE.model_copy(update=rates)
    step = TrainingStep(seq_len=64, tokens_per_step=128, chunk_tokens=32, chunks_per_round=2)
    spec, caps = small("tiny", num_layers=num_layers), Caps(device_bytes=device_kib * KIB)

    def judge(schedule: Schedule) -> Timeline:
        return simulate(schedule, machine)

    def step_ns(effort: Effort) -> float:
        choices = Choices(effort=effort)
        return judge(plan_step(spec, step, machine, caps, "optimal", judge, choices)).step_ns

    chain = lower(spec, plan_step(spec, step, machine, caps, "optimal", judge).workload)
    streaming_ns = judge(plan_chain(chain, machine, caps, "streaming")).step_ns
    assert step_ns("normal") <= streaming_ns < step_ns("quick")


@pytest.mark.parametrize(("host_kib", "judged"), [(None, True), (800, False)])
def test_streaming_is_not_judged_where_its_tasks_alone_take_longer(host_kib, judged):
    """With little host memory it recomputes everything."""
    machine = MACHINE.model_copy(
        update={f"pcie_{way}_bytes_per_s": number(3e9) for way in ("h2d", "d2h")}
    )
    step = TrainingStep(seq_len=64, tokens_per_step=384, chunk_tokens=32, chunks_per_round=2)
    host_bytes = None if host_kib is None else host_kib * KIB
    caps = Caps(device_bytes=600 * KIB, host_bytes=host_bytes)
    asked: list[str] = []

    def judge(schedule: Schedule) -> Timeline:
        asked.append(schedule.policy)
        return simulate(schedule, machine)

    schedule = plan_step(small("tiny", num_layers=4), step, machine, caps, "optimal", judge)
    chain = lower(small("tiny", num_layers=4), schedule.workload)
    placement = streaming_placement(chain, machine, caps)
    alone = alone_ns(placement, machine, step.tokens_per_step // 64)
    best_ns = simulate(schedule, machine).step_ns
    streaming = plan_chain(chain, machine, caps, "streaming")
    assert alone <= simulate(streaming, machine).step_ns
    assert (alone < best_ns) == judged
    assert ("streaming" in asked) == judged


@pytest.mark.parametrize(("above_bound", "judged"), [(1e-6, True), (0.0, False)])
def test_streaming_is_judged_however_near_the_best_plan_is_to_its_bound(above_bound, judged):
    machine, caps = MACHINE, Caps(device_bytes=900 * KIB)
    workload = Workload(seq_len=64, chunk_tokens=64, chunks_per_round=1, rounds_per_step=2)
    chain = lower(small("tiny"), workload)
    best_s = simulate(plan_chain(chain, machine, caps, "streaming"), machine).step_ns / 1e9
    plans = streamed(
        chain, machine, caps, lambda schedule: simulate(schedule, machine), Choices(),
        num_rounds=2, bound_s=best_s / (1 + above_bound), best_ns=best_s * 1e9,
    )  # fmt: skip
    assert bool(plans) == judged


def test_after_planning_garbage_is_collected_as_before():
    """What the caller has frozen stays so."""
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with gc_paused():
            pass
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("step", "caps"), [case for case in CASES if case[0] != "one size"])
def test_a_plan_keeps_its_cap_is_safe_and_conforms(step, caps):
    schedule = planned(step, caps)
    assert verify(schedule) == []
    assert conforms(schedule, lower(SPEC, schedule.workload)) == []
    assert caps.device_bytes is None or extent_bytes(schedule) <= caps.device_bytes


def test_a_plan_of_twenty_rounds_keeps_tight_caps_and_takes_what_its_rounds_take():
    few = TrainingStep(seq_len=64, tokens_per_step=320, chunk_tokens=64, chunks_per_round=1)
    for cap_kib in (800, 600, 450, 400):
        caps = Caps(device_bytes=cap_kib * KIB)
        schedule = planned("twenty rounds", caps)
        assert schedule.workload.rounds_per_step == 20
        assert extent_bytes(schedule) <= cap_kib * KIB
        assert verify(schedule) == []
        short = plan_step(SPEC, few, MACHINE, caps, "optimal", judge_of("cpu"))
        assert short.workload.rounds_per_step == 5
        ratio = judge_of("cpu")(schedule).step_ns / judge_of("cpu")(short).step_ns
        assert 3 < ratio < 4.1


@pytest.mark.parametrize("step", STEPS)
def test_planning_twice_gives_the_same_schedule(step):
    caps = caps_of(step)[2]
    again = plan_step(SPEC, STEPS[step], MACHINE, caps, "optimal", judge_of("cpu"))
    assert again.model_dump_json() == planned(step, caps).model_dump_json()


# --- refusals


@pytest.mark.parametrize("machine", ["cpu", "slow link"])
@pytest.mark.parametrize("step", STEPS)
def test_the_device_cap_that_a_refusal_names_would_do(step, machine):
    judge = judge_of(machine)
    caps = Caps(device_bytes=200 * KIB, device_reserve_bytes=1000)
    with pytest.raises(InfeasiblePlan) as raised:
        plan_step(SPEC, STEPS[step], MACHINES[machine], caps, "optimal", judge)
    found = raised.value.shortage
    assert (found.policy, found.cap, found.cap_bytes) == ("optimal", "device", 200 * KIB)
    least = found.enough_device_bytes
    assert least is not None and least == found.needed_bytes > 200 * KIB
    assert not found.smallest  # a whole search may fit less
    enough = Caps(device_bytes=least, device_reserve_bytes=1000)
    schedule = plan_step(SPEC, STEPS[step], MACHINES[machine], enough, "optimal", judge)
    assert extent_bytes(schedule) <= least - 1000


def test_the_host_cap_that_a_refusal_names_is_of_the_way_to_cut_that_has_the_least_there(
    monkeypatch,
):
    caps = Caps(device_bytes=800 * KIB, host_bytes=0)

    def named(**fixed: int) -> int | None:
        step = TrainingStep(seq_len=64, tokens_per_step=512, **fixed)
        with pytest.raises(InfeasiblePlan) as raised:
            plan_step(
                SPEC, step, MACHINE, caps, "optimal", judge_of("cpu"), Choices(effort="quick")
            )
        return raised.value.shortage.enough_host_bytes

    least, more, most = (named(chunk_tokens=t, chunks_per_round=1) for t in (64, 128, 256))
    assert least is not None and more is not None and most is not None
    assert named() == least < more < most
    sizes = {64: 3.0, 128: 1.0, 256: 2.0, 512: 4.0}
    monkeypatch.setattr(Cuts, "least_host_bytes", lambda _, w: sizes[w.chunk_tokens])
    assert named() == more


def test_where_nothing_else_fits_streaming_is_tried_unless_the_chain_is_long(monkeypatch):
    chain = lower(
        SPEC, Workload(seq_len=64, chunk_tokens=64, chunks_per_round=1, rounds_per_step=4)
    )
    caps = Caps(device_bytes=350 * KIB)

    def plans() -> list[Plan]:
        return optimal_plans(
            chain, MACHINE, caps, judge_of("cpu"), num_rounds=4, bound_s=1e-9, decide=False
        )

    assert [plan.theirs for plan in plans()] == [True]
    monkeypatch.setattr(optimal, "_MOST_STREAMED", 5)
    assert plans() == []


def test_every_way_to_cut_that_may_fit_is_tried_at_last(monkeypatch):
    tried: list[int] = []

    def not_the_first(resort: LastResort, make: Callable[[], Chain], caps: Caps) -> Schedule | None:
        tried.append(make().workload.chunk_tokens)
        return None if len(tried) == 1 else schedule(resort, make, caps)

    def refused(*_: object) -> Schedule:
        raise InfeasiblePlan(Shortage("streaming", "device", 1, 2, "a task", 2, None))

    schedule = LastResort.schedule
    monkeypatch.setattr(LastResort, "schedule", not_the_first)
    monkeypatch.setattr(Family, "search", lambda _: None)
    monkeypatch.setattr(Family, "_streaming_plan", refused)
    step = TrainingStep(seq_len=64, tokens_per_step=512, chunks_per_round=1)
    caps = Caps(device_bytes=800 * KIB, host_bytes=2000 * KIB)
    found = plan_step(SPEC, step, MACHINE, caps, "optimal", judge_of("cpu"))
    assert found.workload.chunk_tokens == tried[1] != tried[0]
    assert verify(found) == []


def test_where_nothing_can_be_packed_offloads_end_with_the_step(monkeypatch):
    asked: list[bool] = []
    packed = Decider._packed

    def only_so(decider: Decider, *given: Any) -> Any:
        asked.append(decider._outlasting)
        return None if decider._outlasting else packed(decider, *given)

    def never(*_: object) -> Schedule:
        raise AssertionError("the search finds a plan")

    monkeypatch.setattr(Decider, "_packed", only_so)
    monkeypatch.setattr(optimal, "_MOST_STREAMED", 0)
    monkeypatch.setattr(Family, "_last_resort", never)
    caps = Caps(device_bytes=600 * KIB, host_bytes=2000 * KIB)
    found = plan_step(SPEC, STEPS["one size"], MACHINE, caps, "optimal", judge_of("cpu"))
    assert verify(found) == []
    assert set(asked) == {True, False}


@pytest.mark.parametrize("step", ["one size", "sliced", "twenty rounds"])
def test_the_host_cap_that_a_refusal_names_would_do(step):
    caps = Caps(device_bytes=500 * KIB, host_bytes=10 * KIB)
    with pytest.raises(InfeasiblePlan) as raised:
        plan_step(SPEC, STEPS[step], MACHINE, caps, "optimal", judge_of("cpu"))
    found = raised.value.shortage
    assert found.policy == "optimal"
    assert found.enough_host_bytes is not None or found.enough_device_bytes is not None
    for field, least in (
        ("host_bytes", found.enough_host_bytes),
        ("device_bytes", found.enough_device_bytes),
    ):
        if least is not None:
            enough = caps.model_copy(update={field: least})
            assert plan_step(SPEC, STEPS[step], MACHINE, enough, "optimal", judge_of("cpu"))


# --- small steps in smaller chunks


def small_step(device_bytes: int, host_bytes: int, policy: str, **fixed: int) -> Schedule:
    step = TrainingStep(seq_len=64, tokens_per_step=256, **fixed)  # type: ignore[arg-type]
    caps = Caps(device_bytes=device_bytes, host_bytes=host_bytes)
    return plan_step(load_preset("tiny"), step, MACHINE, caps, policy, judge_of("cpu"))


@pytest.mark.parametrize("chunk_tokens", [64, 128])
def test_where_chunks_that_might_be_named_fit_they_are_found_without(chunk_tokens):
    caps = 4_767_744, 10 * 2**20
    assert verify(small_step(*caps, "optimal", chunk_tokens=chunk_tokens)) == []
    with pytest.raises(InfeasiblePlan):
        small_step(*caps, "optimal", chunk_tokens=256)
    assert verify(small_step(*caps, "optimal")) == []


@pytest.mark.parametrize("side", ["device", "host"])
def test_the_caps_that_other_policies_name_are_the_smallest_of_all_ways_to_cut(side):
    """In chunks of 256 tokens `streaming` takes less of the host here than in smaller ones."""
    device_bytes, host_bytes = 4 * 2**20, 11_000_000
    with pytest.raises(InfeasiblePlan) as error:
        small_step(device_bytes, host_bytes, "streaming")
    short = error.value.shortage
    assert short.needed_bytes == short.enough_host_bytes
    least = short.enough_device_bytes if side == "device" else short.enough_host_bytes
    assert least is not None

    def within(size: int) -> Schedule:
        caps = (size, host_bytes) if side == "device" else (device_bytes, size)
        return small_step(*caps, "streaming")

    assert verify(within(least)) == []
    with pytest.raises(InfeasiblePlan):
        within(least - 1)
