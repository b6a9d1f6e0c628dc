"""What the user fixes of a plan is so in it; what cannot be is refused."""

from dataclasses import fields
from functools import cache

import pytest

from tests.helpers.machines_for_plans import fast_link_machine, slow_link_machine
from tests.helpers.planning import plan_step
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.choices import OPEN, ChoiceError, Choices, PreferredHomes
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.request import TrainingStep
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute, Copy
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate_rank

SPEC = small("tiny")
STEP = TrainingStep(seq_len=64, tokens_per_step=192, chunk_tokens=64, chunks_per_round=1)
WORKLOAD = Workload(seq_len=64, chunk_tokens=64, chunks_per_round=1, rounds_per_step=3)
KIB = 1024
CAPS = Caps(device_bytes=420 * KIB)
FAST, SLOW = fast_link_machine(), slow_link_machine()
KINDS = {
    "parameter": ("parameter",),
    "gradient": ("gradient",),
    "optimizer_state": ("optimizer_state",),
    "activation": ("activation", "context"),
}


def planned(choices: Choices, machine: Machine = FAST, caps: Caps = CAPS) -> RankSchedule:
    return plan_step(SPEC, STEP, machine, caps, "optimal", choices)


@cache
def open_plan() -> RankSchedule:
    return planned(OPEN)


def copied_roles(schedule: RankSchedule) -> set[str]:
    roles = {tensor.tensor_id: tensor.role for tensor in schedule.tensors}
    return {roles[op.tensor] for op in schedule.ops if isinstance(op, Copy)}


def levels(schedule: RankSchedule) -> list[str]:
    ops = (op for op in schedule.ops if isinstance(op, Compute))
    return [op.label.level for op in ops if op.label.level is not None]


def bound_s(choices: Choices) -> float:
    found = lower_bound(lower(SPEC, WORKLOAD), FAST, CAPS, choices=choices)
    assert found is not None
    return found.step_s


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_at_home_on_the_device_is_never_copied(kind):
    schedule = planned(Choices(homes={kind: "device"}), caps=Caps(device_bytes=640 * KIB))
    assert copied_roles(schedule).isdisjoint(KINDS[kind])
    assert verify_rank(schedule) == []


def test_the_bound_of_an_open_plan_names_nothing_fixed():
    bound = open_plan().bound
    assert bound is not None
    assert bound.fixed == ()


def test_the_open_plan_copies_all_kinds():
    assert {role for roles in KINDS.values() for role in roles} <= copied_roles(open_plan())


@pytest.mark.parametrize("kind", ["parameter", "optimizer_state"])
def test_what_is_at_home_on_the_host_is_not_on_the_device_between_passes(kind):
    roles = {tensor.tensor_id: tensor.role for tensor in open_plan().tensors}

    def carried_on_device(choices: Choices) -> list[str]:
        schedule = planned(choices, SLOW, caps=Caps(device_bytes=2000 * KIB))
        tiers = {slot.slot_id: slot.tier for slot in schedule.slots}
        carried = [c.tensor for c in schedule.carried if tiers[c.slot] == DEVICE]
        return [tensor for tensor in carried if roles[tensor] == kind]

    assert len(carried_on_device(OPEN)) > SPEC.num_layers
    # The last task of a pass and the first of the next both use it.
    assert set(carried_on_device(Choices(homes={kind: "host"}))) <= {"param.embedding"}


def test_activations_at_home_on_the_host_leave_even_where_there_is_room():
    schedule = planned(Choices(homes={"activation": "host"}), caps=Caps(device_bytes=2000 * KIB))
    assert "activation" in copied_roles(schedule)


@pytest.mark.parametrize("level", ["INPUT", "ATTENTION"])
def test_every_block_is_recomputed_from_the_level_that_is_fixed(level):
    found = levels(planned(Choices(recompute=level)))
    assert found == [level] * SPEC.num_layers * WORKLOAD.rounds_per_step


def test_nothing_is_recomputed_where_that_is_fixed():
    assert levels(planned(OPEN, SLOW))
    assert levels(planned(Choices(recompute="none"), SLOW)) == []


@pytest.mark.parametrize(
    "choices",
    [
        Choices(homes={"parameter": "host"}),
        Choices(homes={"activation": "host"}),
        Choices(recompute="INPUT"),
        Choices(recompute="none"),
    ],
    ids=str,
)
def test_the_bound_of_what_is_fixed_is_no_lower_than_the_open_one_and_below_its_plan(choices):
    schedule = planned(choices)
    assert bound_s(OPEN) <= bound_s(choices)
    assert schedule.bound is not None
    assert schedule.bound.step_s == pytest.approx(bound_s(choices))
    assert len(schedule.bound.fixed) == 1
    assert schedule.bound.step_s <= simulate_rank(schedule, FAST).step_ns / 1e9


def test_a_fixed_level_raises_the_bound():
    assert bound_s(Choices(recompute="INPUT")) > bound_s(OPEN)


def test_without_prefetch_loads_come_right_before_the_first_use():
    schedule = planned(Choices(prefetch_blocks=0.0))
    parents = {tensor.tensor_id: tensor.parent for tensor in schedule.tensors}
    ops = schedule.ops
    for index, op in enumerate(ops):
        if isinstance(op, Copy) and op.stream.queue == "h2d":
            following = next(o for o in ops[index:] if isinstance(o, Compute))
            used = {operand.tensor for operand in following.operands}
            used |= {parents[name] for name in used}
            assert op.tensor in used or parents[op.tensor] in used, f"{op.op_id}"


def test_more_prefetch_issues_loads_earlier():
    def ahead(blocks: float) -> int:
        """Sum, over all loads, of compute ops between a load and the first use of its slot."""
        ops = planned(Choices(prefetch_blocks=blocks), MACHINE, Caps(device_bytes=600 * KIB)).ops
        total = 0
        for index, op in enumerate(ops):
            if isinstance(op, Copy) and op.stream.queue == "h2d":
                later = [o for o in ops[index:] if isinstance(o, Compute)]
                slots = [{operand.slot for operand in o.operands} for o in later]
                total += next(i for i, used in enumerate(slots) if op.destination in used)
        return total

    assert ahead(0.0) == 0
    assert ahead(4.0) > 0


def test_the_caps_named_for_fixed_homes_do():
    choices = Choices(homes={"optimizer_state": "device"})
    with pytest.raises(InfeasiblePlan) as refused:
        planned(choices, caps=Caps(device_bytes=320 * KIB))
    enough = refused.value.shortage.enough_device_bytes
    assert enough is not None
    assert planned(choices, caps=Caps(device_bytes=enough))


def test_where_no_larger_cap_on_one_side_does_a_refusal_names_none():
    caps = Caps(device_bytes=10 * KIB, host_bytes=10 * KIB)
    with pytest.raises(InfeasiblePlan) as refused:
        planned(Choices(homes={"activation": "device", "parameter": "host"}), caps=caps)
    message = str(refused.value)
    assert "does not fit 10.00 KiB of device memory (--device-mem)" in message
    assert "raise both" in message


@pytest.mark.parametrize("effort", ["quick", "normal"])
@pytest.mark.parametrize("device_bytes", [650_000, 800_000])
def test_where_homes_are_fixed_the_host_memory_that_a_refusal_names_does(effort, device_bytes):
    spec = small("tiny", num_layers=4)
    step = TrainingStep(seq_len=48, tokens_per_step=96, chunk_tokens=16, chunks_per_round=3)
    choices = Choices(homes={"activation": "device"}, effort=effort)

    def plan_within(host_bytes: int) -> RankSchedule:
        caps = Caps(device_bytes=device_bytes, host_bytes=host_bytes)
        return plan_step(spec, step, MACHINE, caps, "optimal", choices)

    with pytest.raises(InfeasiblePlan) as refused:
        plan_within(0)
    named = refused.value.shortage.enough_host_bytes
    assert named is not None
    schedule = plan_within(named)
    assert arena_bytes(schedule, HOST) <= named
    assert schedule.bound is not None and schedule.bound.fixed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Choices(homes={"weights": "host"}), "'weights' has no home to fix; known: param"),
        (lambda: Choices(homes={"parameter": "disk"}), "'parameter' is 'disk'; known: device"),  # type: ignore[dict-item]
        (lambda: Choices(prefetch_blocks=-1.0), "issued -1 blocks ahead"),
        (lambda: Choices(prefetch_blocks=float("nan")), "nan blocks ahead"),
        (lambda: Choices(effort="most"), "known: quick, normal"),  # type: ignore[arg-type]
        (lambda: Choices(optimizer="gpu"), "'gpu' is unknown; known: recipe, host, auto"),  # type: ignore[arg-type]
        (
            lambda: planned(Choices(recompute="Q")),
            "'Q' is nothing .*; known: none, attention, full",
        ),
    ],
)
def test_what_cannot_be_fixed_is_refused_with_what_can(make, message):
    with pytest.raises(ChoiceError, match=message):
        make()


def test_other_policies_take_no_choices():
    with pytest.raises(ChoiceError, match="'streaming' decides by its own rules"):
        plan_step(SPEC, STEP, FAST, CAPS, "streaming", Choices(recompute="INPUT"))


def test_only_what_a_bound_holds_for_can_be_fixed():
    """Homes that merely should be there are the search's own: its bound is no bound of plans."""
    assert [field.name for field in fields(Choices)] == [
        "homes", "recompute", "prefetch_blocks", "effort", "optimizer",
    ]  # fmt: skip
    liked = PreferredHomes({"parameter": "host"})
    assert liked != Choices({"parameter": "host"}) and not liked.strict_homes
