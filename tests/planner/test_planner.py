"""Planning a step with `optimal`: how it is cut, what the plan promises, and what is refused."""

import gc
from functools import cache

import pytest

from tests.helpers.machines_for_plans import fast_link_machine, slow_link_machine
from tests.helpers.planning import plan_chain, plan_step, request_of
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipe import Recipe
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.planner import Planner, gc_paused
from twinstream.planner.request import TrainingStep
from twinstream.planner.search.chunking import admissible, possible
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.tensors import DEVICE
from twinstream.simulator.replay import simulate_rank, steady_state

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
def planned(step: str, caps: Caps, machine: str = "cpu") -> RankSchedule:
    return plan_step(SPEC, STEPS[step], MACHINES[machine], caps)


def step_ns(schedule: RankSchedule, machine: str = "cpu") -> float:
    return simulate_rank(schedule, MACHINES[machine]).step_ns


CASES = [(step, caps) for step in STEPS for caps in caps_of(step)]


def extent_bytes(schedule: RankSchedule) -> int:
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
            plan_chain(lower(SPEC, workload), MACHINE, caps, "optimal")


def test_of_several_admissible_workloads_the_one_with_the_fastest_plan_is_chosen():
    """A small cap favours smaller chunks, much memory the largest."""
    chosen = set()
    for caps in caps_of("several sizes"):
        schedule = planned("several sizes", caps)
        chosen.add(schedule.workload.chunk_tokens)
        ours_ns = step_ns(schedule)
        for workload in admissible(SPEC, STEPS["several sizes"]):
            chain = lower(SPEC, workload)
            try:
                other = plan_chain(chain, MACHINE, caps, "optimal")
            except InfeasiblePlan:
                continue
            other_ns = step_ns(other)
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
    found = plan_step(SPEC, step, MACHINE, caps, "optimal").workload
    assert found.seq_len == 64
    assert found.chunk_tokens == fixed.get("chunk_tokens", found.chunk_tokens)
    assert found.chunks_per_round == fixed.get("chunks_per_round", found.chunks_per_round)
    tokens = found.chunk_tokens * found.chunks_per_round * found.rounds_per_step
    request = request_of(SPEC, step, MACHINE, caps)
    assert tokens == Planner(steady_state).prepared(request).step.tokens_per_step
    assert tokens == fixed.get("tokens_per_step", tokens)


@pytest.mark.parametrize("place", ["device", "device_after_backward"])
@pytest.mark.parametrize("policy", ["optimal", "streaming"])
def test_the_optimizer_runs_when_the_recipe_says(policy, place):
    step = TrainingStep(seq_len=64, tokens_per_step=256, recipe=Recipe(optimizer=place))
    schedule = plan_step(SPEC, step, MACHINE, Caps(device_bytes=900 * KIB), policy)
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
        assert bound.step_s <= step_ns(schedule, machine) / 1e9


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
    assert step_ns(schedule) / 1e9 <= 1.01 * schedule.bound.step_s


# --- the plan


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("step", ["one size", "several sizes", "sliced"])
def test_it_is_no_slower_than_another_policy_on_the_same_chain(step, machine):
    compared = 0
    for caps in caps_of(step)[:: 1 if machine == "cpu" else 2]:
        schedule = planned(step, caps, machine)
        chain = lower(SPEC, schedule.workload)
        ours_ns = step_ns(schedule, machine)
        for policy in ("resident", "streaming", "full_recompute"):
            try:
                other = plan_chain(chain, MACHINES[machine], caps, policy)
            except InfeasiblePlan:
                continue
            compared += 1
            assert ours_ns <= step_ns(other, machine), (policy, caps)
    assert compared >= 4


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
        assert 0.99 * frozen < gc.get_freeze_count() <= frozen  # some may have died meanwhile
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("step", "caps"), [case for case in CASES if case[0] != "one size"])
def test_a_plan_keeps_its_cap_is_safe_and_conforms(step, caps):
    schedule = planned(step, caps)
    assert verify_rank(schedule) == []
    assert conforms(schedule, lower(SPEC, schedule.workload)) == []
    assert caps.device_bytes is None or extent_bytes(schedule) <= caps.device_bytes


def test_a_plan_of_twenty_rounds_keeps_tight_caps_and_takes_what_its_rounds_take():
    few = TrainingStep(seq_len=64, tokens_per_step=320, chunk_tokens=64, chunks_per_round=1)
    for cap_kib in (800, 600, 450, 400):
        caps = Caps(device_bytes=cap_kib * KIB)
        schedule = planned("twenty rounds", caps)
        assert schedule.workload.rounds_per_step == 20
        assert extent_bytes(schedule) <= cap_kib * KIB
        assert verify_rank(schedule) == []
        short = plan_step(SPEC, few, MACHINE, caps, "optimal")
        assert short.workload.rounds_per_step == 5
        ratio = step_ns(schedule) / step_ns(short)
        assert 3 < ratio < 4.1


@pytest.mark.parametrize("step", STEPS)
def test_planning_twice_gives_the_same_schedule(step):
    caps = caps_of(step)[2]
    again = plan_step(SPEC, STEPS[step], MACHINE, caps, "optimal")
    assert again.model_dump_json() == planned(step, caps).model_dump_json()


# --- small steps in smaller chunks


def small_step(device_bytes: int, host_bytes: int, policy: str, **fixed: int) -> RankSchedule:
    step = TrainingStep(seq_len=64, tokens_per_step=256, **fixed)  # type: ignore[arg-type]
    caps = Caps(device_bytes=device_bytes, host_bytes=host_bytes)
    return plan_step(load_preset("tiny"), step, MACHINE, caps, policy)


@pytest.mark.parametrize("chunk_tokens", [64, 128])
def test_where_chunks_that_might_be_named_fit_they_are_found_without(chunk_tokens):
    caps = 4_767_744, 10 * 2**20
    assert verify_rank(small_step(*caps, "optimal", chunk_tokens=chunk_tokens)) == []
    with pytest.raises(InfeasiblePlan):
        small_step(*caps, "optimal", chunk_tokens=256)
    assert verify_rank(small_step(*caps, "optimal")) == []


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

    def within(size: int) -> RankSchedule:
        caps = (size, host_bytes) if side == "device" else (device_bytes, size)
        return small_step(*caps, "streaming")

    assert verify_rank(within(least)) == []
    with pytest.raises(InfeasiblePlan):
        within(least - 1)
