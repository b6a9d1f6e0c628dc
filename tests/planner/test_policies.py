"""What the policies promise, read off the schedules they make."""

from types import SimpleNamespace

import pytest

from tests.helpers.machines_for_plans import fast_link_machine, slow_link_machine
from tests.helpers.planning import plan_chain, plan_step
from tests.helpers.plans import (
    MACHINE,
    copied_tensors,
    enough_device_bytes,
    enough_host_bytes,
    planned,
    recompute_levels,
    tiny_plans,
)
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner import policies
from twinstream.planner.policies import Policy, UnknownPolicyError
from twinstream.planner.request import TrainingStep
from twinstream.planner.rules.resident import plan_resident
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Compute, Op
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import UnsafeSchedule, verify_rank
from twinstream.schedule.tensors import DEVICE, HOST, Tier

CASES = [("packed", "tiny"), ("sliced", "tiny-qwen3"), ("one chunk", "tiny-qwen3")]
POLICIES = ["resident", "streaming", "optimal"]


def extent_bytes(schedule: RankSchedule, tier: Tier) -> int:
    return max(s.offset_bytes + s.size_bytes for s in schedule.slots if s.tier == tier)


def carried_tiers(schedule: RankSchedule) -> set[str]:
    tiers = {slot.slot_id: slot.tier.kind for slot in schedule.slots}
    return {tiers[item.slot] for item in schedule.carried}


# --- every plan


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("workload", "preset"), CASES)
def test_every_plan_is_safe_conforms_and_stays_within_its_caps(workload, preset, policy):
    for chain, schedule in tiny_plans(workload, preset, policy):
        assert verify_rank(schedule) == []
        assert conforms(schedule, chain) == []
        for cap, tier in (
            (schedule.caps.device_bytes, DEVICE),
            (schedule.caps.host_bytes, HOST),
        ):
            assert cap is None or extent_bytes(schedule, tier) <= cap
        assert schedule.policy == policy
        assert schedule.machine.content_hash == MACHINE.content_hash


@pytest.mark.parametrize("policy", POLICIES)
def test_the_reserve_is_taken_off_the_device_cap(policy):
    chain = tiny_chain("packed")
    smallest = enough_device_bytes(chain, policy)
    caps = Caps(device_bytes=smallest + 1000, device_reserve_bytes=1000)
    assert extent_bytes(planned(chain, MACHINE, caps, policy), DEVICE) <= smallest


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_of_the_same_inputs_are_the_same(policy):
    chain = tiny_chain("sliced")
    caps = Caps(device_bytes=enough_device_bytes(chain, policy))
    assert planned(chain, MACHINE, caps, policy) == planned(chain, MACHINE, caps, policy)


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(UnknownPolicyError, match=r"unknown policy 'fast'; known: .*streaming"):
        plan_chain(tiny_chain("one chunk"), MACHINE, Caps(), "fast")


@pytest.mark.parametrize("policy", ["resident", "streaming"])
def test_a_plan_is_the_answer_of_its_policy(policy):
    chain = tiny_chain("sliced", "tiny-qwen3")
    caps = Caps(device_bytes=enough_device_bytes(chain, policy))
    found = plan_chain(chain, MACHINE, caps, policy)
    assert found.model_copy(update={"bound": None}) == planned(chain, MACHINE, caps, policy)


# --- policies of other packages


def registered(policy: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an installed package named it in its pyproject.toml."""
    entry = SimpleNamespace(name="greedy", load=lambda: policy)

    def entry_points(*, group: str) -> list[SimpleNamespace]:
        return [entry] if group == "twinstream.policies" else []

    monkeypatch.setattr(policies, "entry_points", entry_points)


def test_a_policy_that_a_package_registers_is_planned_by_and_proven(monkeypatch):
    def greedy(chain: Chain, machine: Machine, caps: Caps) -> RankSchedule:
        return plan_resident(chain, machine, caps).model_copy(update={"policy": "greedy"})

    registered(Policy.by_chain("greedy", greedy), monkeypatch)
    assert "greedy" in policies.policy_names() and "greedy" not in policies.compared_names()
    step = TrainingStep(seq_len=64, tokens_per_step=256)
    schedule = plan_step(small("tiny"), step, MACHINE, Caps(), "greedy")
    assert schedule.policy == "greedy"
    assert schedule.bound is not None


def test_a_plan_of_a_registered_policy_that_is_not_safe_is_not_handed_out(monkeypatch):
    def unsafe(chain: Chain, machine: Machine, caps: Caps) -> RankSchedule:
        schedule = plan_resident(chain, machine, caps)
        ops = tuple(op.model_copy(update={"waits": ()}) for op in schedule.ops)
        return schedule.model_copy(update={"ops": ops})

    registered(Policy.by_chain("greedy", unsafe), monkeypatch)
    with pytest.raises(UnsafeSchedule):
        plan_step(small("tiny"), TrainingStep(64, 256), MACHINE, Caps(), "greedy")


def test_what_is_registered_but_no_policy_is_refused_with_its_entry_point(monkeypatch):
    registered(plan_resident, monkeypatch)
    with pytest.raises(TwinstreamError, match=r"'greedy' of twinstream\.policies is a function"):
        plan_step(small("tiny"), TrainingStep(64, 256), MACHINE, Caps(), "greedy")


def test_a_registered_policy_does_not_replace_one_of_ours(monkeypatch):
    registered(Policy.by_chain("resident", pytest.fail), monkeypatch)
    step = TrainingStep(64, 256)
    assert plan_step(small("tiny"), step, MACHINE, Caps(), "resident").policy == "resident"


# --- resident


@pytest.mark.parametrize(("workload", "preset"), CASES)
def test_resident_moves_nothing_but_inputs_and_the_loss(workload, preset):
    for chain, schedule in tiny_plans(workload, preset, "resident"):
        fed = sorted(f"{item.tensor} {item.version}" for item in chain.inputs)
        moved = sorted(
            f"{op.tensor} {op.version}" for op in schedule.ops if op.stream.queue.startswith("h2d")
        )
        assert moved == fed
        assert copied_tensors(schedule, "d2h") == ["loss"]
        assert carried_tiers(schedule) == {"device"}


def test_resident_recomputes_as_little_as_fits():
    chain = tiny_chain("packed")
    smallest = enough_device_bytes(chain, "resident")
    seen = []
    for device_bytes in (None, *range(smallest * 3 // 2, smallest - 1, -smallest // 80)):
        schedule = planned(chain, MACHINE, Caps(device_bytes=device_bytes), "resident")
        levels = recompute_levels(schedule)
        assert len(levels) <= 1, "all blocks share one level"
        if not seen or seen[-1] != levels:
            seen.append(levels)
    assert seen == [set(), {"ATTENTION"}, {"INPUT"}]


# --- streaming


@pytest.mark.parametrize(("workload", "preset"), CASES)
def test_streaming_has_all_state_at_home_on_the_host(workload, preset):
    for chain, schedule in tiny_plans(workload, preset, "streaming"):
        assert carried_tiers(schedule) == {"host"}
        parents = {t.tensor_id: t.parent or t.tensor_id for t in chain.tensors}
        carried = {parents[item.tensor] for item in schedule.carried}
        assert carried == set(chain.persistent)


def saved_of(chain: Chain, layer: int, chunk: int) -> set[str]:
    """What only this block saves (its K and V may belong to the whole sequence)."""
    roots = {f"{kind}.{layer}.{chunk}" for kind in ("input", "attention", "projections")}
    return {t.tensor_id for t in chain.tensors if (t.parent or t.tensor_id) in roots}


def kept_blocks(chain: Chain, schedule: RankSchedule) -> list[bool]:
    """For every block in forward order, whether it stays on the device as a whole."""
    recomputed = {
        (op.label.layer, op.label.chunk)
        for op in schedule.ops
        if isinstance(op, Compute) and is_recompute(op)
    }
    moved = {*copied_tensors(schedule, "h2d"), *copied_tensors(schedule, "d2h")}
    return [
        (layer, chunk) not in recomputed and not moved & saved_of(chain, layer, chunk)
        for layer in range(2)
        for chunk in range(chain.workload.chunks_per_round)
    ]


@pytest.mark.parametrize(("workload", "preset"), CASES)
def test_the_blocks_kept_on_the_device_are_the_last_in_forward_order(workload, preset):
    counts = set()
    for chain, schedule in tiny_plans(workload, preset, "streaming"):
        kept = kept_blocks(chain, schedule)
        assert kept == sorted(kept), "last in, first kept"
        counts.add(sum(kept))
    assert {0, len(kept)} <= counts or workload == "one chunk"
    assert len(counts) > 1


def test_saved_activations_are_offloaded_where_the_host_has_room_and_recomputed_where_not():
    chain, machine = tiny_chain("packed"), fast_link_machine()
    smallest = enough_device_bytes(chain, "streaming")
    roomy = planned(chain, machine, Caps(device_bytes=smallest), "streaming")
    assert recompute_levels(roomy) == set()
    assert {"projections.0.0", "attention.0.0"} <= set(copied_tensors(roomy, "d2h"))

    least = enough_host_bytes(chain, "streaming", smallest)
    tight = planned(
        chain, machine, Caps(device_bytes=smallest, host_bytes=least), "streaming"
    )  # fmt: skip
    assert recompute_levels(tight) == {"INPUT"}
    assert "projections.0.0" not in copied_tensors(tight, "d2h")

    between = (least + extent_bytes(roomy, HOST)) // 2
    some = planned(
        chain, machine, Caps(device_bytes=smallest, host_bytes=between), "streaming"
    )  # fmt: skip
    assert recompute_levels(some) >= {"ATTENTION"}


@pytest.mark.parametrize(("workload", "preset"), CASES[:2])
def test_the_more_room_on_the_host_the_less_is_recomputed(workload, preset):
    chain, machine = tiny_chain(workload, preset), fast_link_machine()
    device_bytes = enough_device_bytes(chain, "streaming")
    least = enough_host_bytes(chain, "streaming", device_bytes)
    roomy = planned(chain, machine, Caps(device_bytes=device_bytes), "streaming")
    most = extent_bytes(roomy, HOST) + 255
    counts = []
    for tenths in range(3, 11):
        caps = Caps(device_bytes=device_bytes, host_bytes=least + (most - least) * tenths // 10)
        schedule = planned(chain, machine, caps, "streaming")
        assert recompute_levels(schedule) <= {"ATTENTION"}, "no block goes down two levels"
        counts.append(sum(is_recompute(op) for op in schedule.ops))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0


def is_recompute(op: Op) -> bool:
    return isinstance(op, Compute) and op.label.kind == "block_recompute"


def test_with_a_slow_link_activations_are_recomputed_rather_than_offloaded():
    chain = tiny_chain("packed")
    smallest = enough_device_bytes(chain, "streaming")
    schedule = planned(chain, slow_link_machine(), Caps(device_bytes=smallest), "streaming")
    assert recompute_levels(schedule) == {"INPUT"}
