"""What `optimal` says where it finds no plan: what any plan needs, and caps that were tried."""

from dataclasses import replace

import pytest

from tests.helpers.machines_for_plans import slow_link_machine
from tests.helpers.planning import cuts_of, plan_step
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_model
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.request import TrainingStep
from twinstream.planner.search.chunking import admissible, chunkings, possible, with_few_blocks
from twinstream.schedule.document import Caps
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.workload import Workload

KIB, GIB = 1024, 2**30
TOLERANCE_BYTES = 256  # of the solver: 1e-7 GiB
SPEC = small("tiny")
STEPS = {
    "one size": TrainingStep(seq_len=64, tokens_per_step=256),
    "sliced": TrainingStep(seq_len=64, tokens_per_step=128, chunk_tokens=32, chunks_per_round=2),
    "rounds": TrainingStep(seq_len=64, tokens_per_step=640, chunk_tokens=64, chunks_per_round=1),
}
CAPS = {
    "device": Caps(device_bytes=200 * KIB, device_reserve_bytes=1000),
    "device beside a host cap": Caps(device_bytes=150 * KIB, host_bytes=900 * KIB),
    "host": Caps(device_bytes=500 * KIB, host_bytes=10 * KIB),
}


def shortage_of(
    step: TrainingStep, caps: Caps, choices: Choices = OPEN, machine: Machine = MACHINE
) -> Shortage:
    with pytest.raises(InfeasiblePlan) as refused:
        plan_step(SPEC, step, machine, caps, choices=choices)
    return refused.value.shortage


def sides(found: Shortage, caps: Caps) -> list[tuple[str, int | None, int | None]]:
    """Of each memory its cap, what is proven to be needed, and what is named."""
    assert found.proven is not None
    named = (found.enough_device_bytes, found.enough_host_bytes)
    fields = ("device_bytes", "host_bytes")
    return [
        (field, needed, enough)
        for field, needed, enough in zip(fields, found.proven, named, strict=True)
        if getattr(caps, field) is not None
    ]


@pytest.mark.parametrize("caps", CAPS.values(), ids=CAPS)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_with_less_than_what_is_proven_to_be_needed_no_way_to_cut_the_step_has_a_bound(step, caps):
    found = shortage_of(step, caps)
    assert found.policy == "optimal" and found.less_may_do
    for field, needed, _ in sides(found, caps):
        if needed is None:  # no size of that memory would do
            needed = 2**40
        below = caps.model_copy(update={field: needed - TOLERANCE_BYTES})
        above = caps.model_copy(update={field: round(1.25 * needed) + TOLERANCE_BYTES})
        chains = [lower(SPEC, workload) for workload in possible(SPEC, step)]
        assert all(lower_bound(chain, MACHINE, below) is None for chain in chains)
        bounded = any(lower_bound(chain, MACHINE, above) is not None for chain in chains)
        assert bounded == (needed < 2**40)


@pytest.mark.parametrize("machine", [MACHINE, slow_link_machine()], ids=["cpu", "slow link"])
@pytest.mark.parametrize("caps", CAPS.values(), ids=CAPS)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_caps_that_are_named_do(step, caps, machine):
    found = shortage_of(step, caps, machine=machine)
    assert found.enough_device_bytes or found.enough_host_bytes
    for field, needed, enough in sides(found, caps):
        if enough is None:
            continue
        assert needed is not None and enough >= needed
        schedule = plan_step(SPEC, step, machine, caps.model_copy(update={field: enough}))
        tier = DEVICE if field == "device_bytes" else HOST
        assert arena_bytes(schedule, tier) <= enough


@pytest.mark.parametrize("caps", CAPS.values(), ids=CAPS)
def test_the_cap_that_is_short_is_one_below_what_is_proven(caps):
    found = shortage_of(STEPS["one size"], caps)
    fields = {f"{found.cap}_bytes": found.needed_bytes}
    assert [(f, n) for f, n, _ in sides(found, caps) if f in fields] == list(fields.items())
    assert found.cap_bytes == getattr(caps, f"{found.cap}_bytes") < found.needed_bytes


def test_the_message_tells_what_is_proven_and_what_was_tried():
    with pytest.raises(InfeasiblePlan) as refused:
        plan_step(SPEC, STEPS["one size"], MACHINE, Caps(device_bytes=200 * KIB))
    message, found = str(refused.value), refused.value.shortage
    assert found.proven is not None and found.proven[0] is not None
    assert message.startswith("The step does not fit 200.00 KiB of device memory")
    least = f"it needs at least {found.proven[0] / KIB:.2f} KiB of device memory"
    assert f"With this host memory {least}" in message
    assert "by the bound" in message
    assert "Tried, and fits: --device-mem" in message


@pytest.mark.parametrize(
    ("device", "host", "told"),
    [
        (24 * GIB, 128 * GIB, "24.00 GiB of device memory and 128.00 GiB of host memory. With"),
        (10 * GIB, 128 * GIB, "10.00 GiB of device memory (--device-mem) and 128.00 GiB of host"),
        (24 * GIB, 9 * GIB, "24.00 GiB of device memory and 9.00 GiB of host memory (--host-mem)"),
        (0, 128 * GIB, "0.00 KiB of device memory (--device-mem) and 128.00 GiB of host memory"),
    ],
)
def test_a_refusal_names_the_flags_that_were_given_alone(device, host, told):
    shortage = Shortage(
        "optimal", "device", device, 35 * GIB, "a task", None, None, proven=(35 * GIB, 139 * GIB),
        other_cap_bytes=host,
    )  # fmt: skip
    leaner = ("--optimizer-state 8bit", "--lora r=16")
    given = [side for side in ("device", "host") if f"(--{side}-mem)" in told]
    message = str(InfeasiblePlan(shortage).on(24.0 * GIB, 128.0 * GIB, (), leaner, given))
    assert f"The step does not fit {told}" in message
    assert "35.00 GiB of device memory, or with this device memory" in message
    assert "139.00 GiB of host memory" in message
    assert "Less is needed with --optimizer-state 8bit or --lora r=16: `twinstream fit`" in message


def test_a_device_without_memory_is_what_is_short():
    assert shortage_of(STEPS["one size"], Caps(device_bytes=0, host_bytes=GIB)).cap == "device"


def test_where_homes_are_fixed_the_caps_that_are_named_do_with_them():
    choices = Choices(homes={"optimizer_state": "device"})
    caps = Caps(device_bytes=320 * KIB)
    named = shortage_of(STEPS["one size"], caps, choices).enough_device_bytes
    assert named is not None
    step, enough = STEPS["one size"], Caps(device_bytes=named)
    schedule = plan_step(SPEC, step, MACHINE, enough, choices=choices)
    assert schedule.bound is not None and schedule.bound.fixed


@pytest.mark.parametrize("policy", ["streaming", "optimal"])
@pytest.mark.parametrize(
    "fixed", [{}, {"chunk_tokens": 64}, {"chunk_tokens": 64, "chunks_per_round": 2}], ids=str
)
def test_other_ways_to_cut_are_recommended_only_where_the_user_fixed_one(policy, fixed):
    """Otherwise smaller chunks were tried, and do not do either."""
    step, caps = replace(TrainingStep(64, 256), **fixed), Caps(device_bytes=2**20)
    with pytest.raises(InfeasiblePlan) as refused:
        plan_step(load_model("tiny"), step, MACHINE, caps, policy)
    flags = [f"--{name.replace('_', '-')}" for name in fixed]
    assert refused.value.shortage.fixed_options == tuple(flags)
    said = f"Without {' and '.join(flags)} other ways to cut the step are tried"
    assert (said in str(refused.value)) == bool(fixed)


@pytest.mark.parametrize(("library_gib", "told"), [(21, True), (3, False)])
def test_much_memory_of_a_library_is_told_with_the_flag_that_may_save_it(library_gib, told):
    shortage = Shortage(
        "optimal", "device", 24 * GIB, 38 * GIB, "a task", 38 * GIB, None,
        library_bytes=library_gib * GIB,
    )  # fmt: skip
    message = str(InfeasiblePlan(shortage))
    assert (f"{library_gib}.000 GiB are for what attention's library" in message) == told
    assert ("--attention" in message) == told


# --- long sequences in very small chunks are not looked at


def test_cuts_of_very_many_blocks_are_left_out():
    spec, step = load_model("8b"), TrainingStep(2**20, 2**20)
    found = [*admissible(spec, step), *chunkings(spec, step)]
    assert min(workload.chunk_tokens for workload in found) == 1024
    few = with_few_blocks(spec, found, 3, 20_000)
    assert {workload.chunk_tokens for workload in few} == {2**15, 2**14, 2**13, 2**12}
    (least,) = with_few_blocks(spec, found, 3, 100)
    assert least.chunk_tokens == 2**15
    cuts = cuts_of(spec, step, MACHINE, Caps())
    assert {workload.chunk_tokens for workload in cuts.workloads} == {2**15, 2**14, 2**13, 2**12}


def test_only_so_many_rounds_count():
    workload = Workload(seq_len=128, chunk_tokens=16, chunks_per_round=8, rounds_per_step=6)
    most = 3 * 8 * 2 * SPEC.num_layers
    assert with_few_blocks(SPEC, [workload], 3, most) == [workload]
    longer = workload.model_copy(update={"chunks_per_round": 16})
    assert with_few_blocks(SPEC, [longer, workload], 3, most) == [workload]
