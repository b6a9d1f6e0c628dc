"""Who names a plan for less memory or a slower link gets none that is slower."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hardware_profiles.machines import number
from tests.helpers.machines_for_plans import slow_link_machine
from tests.helpers.planning import plan_step, request_of
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from tests.planner.test_plan_properties import SPECS, STEPS
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.recipe import Recipe
from twinstream.planner.choices import EFFORTS, OPEN, Choices
from twinstream.planner.evaluate.evaluation import evaluation_of
from twinstream.planner.evaluator import Evaluator
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.planner import Planner
from twinstream.planner.request import TrainingStep
from twinstream.planner.warm_start import WarmStartError
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Copy
from twinstream.schedule.proof.verify import UnsafeSchedule, verify_rank
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import HOST
from twinstream.schedule.workload import Packing
from twinstream.simulator.replay import simulate_rank, steady_state

KIB = 1024
SPEC, STEP = small("tiny"), TrainingStep(seq_len=64, tokens_per_step=256)
SLOW = slow_link_machine()


def planned(device_kib: int, machine: Machine = SLOW, **more: object) -> RankSchedule:
    options = {"step": STEP, "policy": "streaming", "host_bytes": 2**30, **more}
    step, host_bytes = options.pop("step"), options.pop("host_bytes")
    caps = Caps(device_bytes=device_kib * KIB, host_bytes=host_bytes)
    return plan_step(SPEC, step, machine, caps, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tight() -> RankSchedule:
    return planned(350)


@pytest.fixture(scope="module")
def roomy() -> RankSchedule:
    return planned(900)


def fastest(
    plan: RankSchedule,
    *known: RankSchedule,
    machine: Machine = SLOW,
    choices: Choices = OPEN,
    evaluator: Evaluator = steady_state,
) -> RankSchedule:
    """Of a new plan and known ones, as the answer to what the new one was made for."""
    caps = plan.caps.model_copy(update={"library_bytes": 0})
    request = request_of(SPEC, STEP, machine, caps, plan.policy, choices)
    return Planner(evaluator).fastest_of(plan, known, request)


def test_a_faster_plan_that_fits_is_the_answer_to_what_was_asked(roomy):
    worse, other = planned(400, MACHINE), planned(900, MACHINE)
    assert simulate_rank(other, SLOW).step_ns < simulate_rank(worse, SLOW).step_ns
    poor = worse.model_copy(update={"caps": roomy.caps, "machine": roomy.machine})
    found = fastest(poor, worse, other)
    assert (found.ops, found.slots) == (other.ops, other.slots)
    assert found.caps == roomy.caps
    assert found.machine == roomy.machine != other.machine
    assert found.bound == roomy.bound != other.bound
    assert verify_rank(found) == []


def test_one_that_does_not_fit_or_is_no_faster_stands_aside(tight, roomy):
    assert fastest(tight, roomy) is tight
    assert fastest(roomy, tight, planned(900)) is roomy
    on_host = tight.model_copy(update={"caps": roomy.caps.model_copy(update={"host_bytes": 1000})})
    assert fastest(on_host, roomy) is on_host


@pytest.mark.parametrize("choices", [OPEN, Choices(homes={"gradient": "host"}, recompute="INPUT")])
def test_the_bounds_are_those_of_what_was_asked_with_all_that_is_fixed(choices):
    large = planned(900, MACHINE, policy="optimal", choices=choices)
    cut = {"chunk_tokens": 64, "chunks_per_round": 1}
    small_chunks = planned(
        700, MACHINE, policy="optimal", choices=choices, step=replace(STEP, **cut)
    )
    assert small_chunks.workload != large.workload
    slower = planned(400, MACHINE, policy="optimal", choices=choices)
    slower = slower.model_copy(update={"caps": large.caps, "bound": large.bound})
    found = fastest(slower, small_chunks, machine=MACHINE, choices=choices)
    direct = planned(900, MACHINE, policy="optimal", choices=choices, step=replace(STEP, **cut))
    assert found.workload == small_chunks.workload
    assert found.bound is not None and direct.bound is not None and large.bound is not None
    assert found.bound.step_s == pytest.approx(direct.bound.step_s, rel=1e-6)
    assert found.bound.fixed == choices.fixed
    assert found.bound.family_step_s == pytest.approx(large.bound.family_step_s, rel=1e-6)


def test_a_plan_that_fits_is_the_answer_where_nothing_else_fits():
    """`streaming` by itself takes the largest chunks that it can, which need more of the host."""
    known = planned(900, step=replace(STEP, chunk_tokens=64, chunks_per_round=1))
    host_bytes = arena_bytes(known, HOST)
    with pytest.raises(InfeasiblePlan):
        planned(900, host_bytes=host_bytes)
    found = planned(900, host_bytes=host_bytes, known=[known])
    assert found.ops == known.ops
    assert found.caps.host_bytes == host_bytes
    with pytest.raises(InfeasiblePlan):
        planned(900, host_bytes=host_bytes - 1, known=[known])


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_refusal_that_need_not_name_caps_names_none(effort):
    caps = Caps(device_bytes=20 * KIB, host_bytes=300 * KIB)
    request = request_of(SPEC, STEP, SLOW, caps, choices=Choices(effort=effort))
    with pytest.raises(InfeasiblePlan) as error:
        Planner(steady_state).plan(request, name_caps=False)
    short = error.value.shortage
    assert short.enough_device_bytes is short.enough_host_bytes is None
    assert short.less_may_do
    assert "is known to do" in str(error.value)


def test_tokens_that_are_open_are_those_of_the_known_plan(roomy):
    step = TrainingStep(seq_len=64)
    assert planned(900, step=step).workload.tokens_per_step != 256
    assert planned(900, step=step, known=[roomy]).workload.tokens_per_step == 256


@pytest.mark.parametrize(
    ("what", "more"),
    [
        ("policy", {"policy": "full_recompute"}),
        ("the recipe's gradients", {"step": replace(STEP, recipe=Recipe(gradients="float32"))}),
        ("tokens per step", {"step": TrainingStep(seq_len=64, tokens_per_step=512)}),
        ("sequence length", {"step": TrainingStep(seq_len=32, tokens_per_step=256)}),
        ("chunk tokens", {"step": TrainingStep(64, 256, chunk_tokens=32)}),
    ],
)
def test_only_plans_of_the_same_step_are_taken(roomy, what, more):
    with pytest.raises(WarmStartError, match=f"differs in {what}: "):
        planned(900, **{"known": [roomy], **more})


def test_an_evaluation_stands_in_for_no_step(roomy):
    """Faster it is, though, and of one round otherwise the same."""
    with pytest.raises(WarmStartError, match="the forward of one alone, not a training step"):
        planned(900, known=[evaluation_of(roomy)])


def test_only_plans_of_the_same_model_with_the_same_fixed_are_taken():
    known, other = [planned(900, policy="optimal")], small("tiny", num_layers=1)
    with pytest.raises(
        WarmStartError, match=r"known plan 2 differs in model: tiny \(\w+\), not tiny"
    ):
        plan_step(other, STEP, SLOW, Caps(), known=[plan_step(other, STEP, SLOW, Caps()), *known])
    with pytest.raises(WarmStartError, match="fixed choices: none, not parameter at home on the h"):
        planned(900, policy="optimal", choices=Choices(homes={"parameter": "host"}), known=known)
    with pytest.raises(WarmStartError, match="prefetch"):
        planned(900, policy="optimal", choices=Choices(prefetch_blocks=1.0), known=known)


def test_what_is_fixed_may_be_given_in_any_order():
    one, other = (
        Choices(homes=dict.fromkeys(kinds, "host"))
        for kinds in (("parameter", "gradient"), ("gradient", "parameter"))
    )
    known = planned(900, policy="optimal", choices=one)
    assert planned(900, policy="optimal", choices=other, known=[known]) == known


def test_what_is_wrong_without_a_known_plan_is_told_as_without(roomy):
    for wrong in ({"policy": "greedy"}, {"choices": Choices(prefetch_blocks=1.0)}):
        with pytest.raises(TwinstreamError) as without:
            planned(900, **wrong)
        with pytest.raises(TwinstreamError) as with_known:
            planned(900, **wrong, known=[roomy])
        assert str(with_known.value) == str(without.value)


def test_unequal_lengths_are_those_of_the_step_however_often_a_chunk_has_them():
    def asked(*lengths: int, known: Sequence[RankSchedule] = ()) -> RankSchedule:
        step = TrainingStep(30, 256, chunk_tokens=128, packing=Packing.of(lengths))
        return plan_step(SPEC, step, SLOW, Caps(), "streaming", known=known)

    plan = asked(30, 5, 1, 28)
    assert plan.workload.packing == Packing.of(2 * (30, 5, 1, 28))
    assert asked(30, 5, 1, 28, known=[plan]) == plan
    for lengths in ((30, 5, 28, 1), (30, 4, 30), (30, 5, 1, 28, 30, 4, 30)):
        with pytest.raises(WarmStartError, match="differs in packing"):
            asked(*lengths, known=[plan])


def test_a_known_plan_that_is_not_safe_is_refused_before_it_is_simulated(tight, roomy):
    ops = [op.model_copy(update={"waits": ()}) if isinstance(op, Copy) else op for op in tight.ops]
    with pytest.raises(UnsafeSchedule):
        broken = tight.model_copy(update={"ops": tuple(ops)})
        fastest(roomy, broken, evaluator=pytest.fail)


@settings(max_examples=12, deadline=None)
@given(
    spec=SPECS,
    step=STEPS,
    log_rate=st.floats(7.0, 9.5),
    factor=st.sampled_from([1.05, 1.25, 2.0]),
    device_kib=st.tuples(st.integers(350, 1000), st.integers(0, 200)),
    host_kib=st.integers(400, 1500),
)
def test_faster_links_and_more_memory_are_never_slower_where_the_plan_before_is_known(
    spec, step, log_rate, factor, device_kib, host_kib
):
    def machine(rate: float) -> Machine:
        links = ("pcie_h2d_bytes_per_s", "pcie_d2h_bytes_per_s")
        return MACHINE.model_copy(update={name: number(rate) for name in links})

    slow, fast = machine(10**log_rate), machine(factor * 10**log_rate)
    device, more = device_kib
    caps = Caps(device_bytes=device * KIB, host_bytes=host_kib * KIB)
    try:
        before = plan_step(spec, step, slow, caps)
    except InfeasiblePlan:
        return
    caps = caps.model_copy(update={"device_bytes": (device + more) * KIB})
    after = plan_step(spec, step, fast, caps, known=[before])
    before_ns, after_ns = simulate_rank(before, slow).step_ns, simulate_rank(after, fast).step_ns
    assert after_ns <= 1.005 * before_ns
