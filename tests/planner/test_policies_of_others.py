"""What the policies that model others promise, read off the schedules and their timelines."""

from random import Random
from statistics import median

import pytest

from tests.hardware_profiles.machines import number
from tests.helpers.flat_machine import (
    COPY_NS,
    D2H_PER_NS,
    H2D_PER_NS,
    LAUNCH_NS,
    WAIT_NS,
    flat_machine,
)
from tests.helpers.host_chains import preset_chain_of, some_on_host, tiny_chain_of, two_task_chain
from tests.helpers.planning import plan_chain
from tests.helpers.plans import (
    MACHINE,
    copied_tensors,
    enough_device_bytes,
    enough_host_bytes,
    planned,
    recompute_levels,
)
from tests.helpers.small_chains import small_case
from twinstream.hardware_profiles.cost import call_alone_ns
from twinstream.hardware_profiles.errors import MissingNumberError
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.models.lowering.lower import lower_again
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.policies import WrongChainError, optimizer_place
from twinstream.planner.proof import step_bound
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.proof.violations import OperandInWrongMemory
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.simulator.replay import simulate_rank

ON_HOST = ("optimizer_offload", "layer_offload")
POLICIES = ("full_recompute", *ON_HOST)
CASES = [("packed", "tiny"), ("sliced", "tiny-qwen3"), ("one chunk", "tiny-qwen3")]
MIB = 2**20


def caps_of_interest(chain: Chain, policy: str) -> list[Caps]:
    device = enough_device_bytes(chain, policy)
    host = enough_host_bytes(chain, policy, device)
    return [Caps(), Caps(device_bytes=device * 3 // 2), Caps(device_bytes=device, host_bytes=host)]


def role_of(schedule: RankSchedule) -> dict[str, str]:
    return {t.tensor_id: t.role for t in schedule.tensors}


def copied_bytes(schedule: RankSchedule, queue: str, role: str) -> int:
    sizes = {t.tensor_id: t.size_bytes for t in schedule.tensors}
    roles = role_of(schedule)
    return sum(sizes[t] for t in copied_tensors(schedule, queue) if roles[t] == role)


def whole_bytes(chain: Chain, role: str) -> int:
    return sum(t.size_bytes for t in chain.tensors if t.role == role and t.parent is None)


# --- every plan


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("workload", "preset"), CASES)
def test_every_plan_is_safe_conforms_and_stays_within_its_caps(workload, preset, policy):
    chain = tiny_chain_of(policy, workload, preset)
    for caps in caps_of_interest(chain, policy):
        schedule = plan_chain(chain, MACHINE, caps, policy)
        assert verify_rank(schedule) == []
        assert conforms(schedule, chain) == []
        assert caps.device_bytes is None or arena_bytes(schedule, DEVICE) <= caps.device_bytes
        assert caps.host_bytes is None or arena_bytes(schedule, HOST) <= caps.host_bytes
        assert schedule.policy == policy
        assert schedule.bound is not None
        assert schedule.bound.step_s <= simulate_rank(schedule, MACHINE).step_ns / 1e9


@pytest.mark.parametrize("policy", POLICIES)
def test_a_schedule_of_a_file_conforms_to_the_chain_lowered_again(policy):
    schedule = plan_chain(tiny_chain_of(policy, "packed"), MACHINE, Caps(), policy)
    reloaded = RankSchedule.model_validate_json(schedule.model_dump_json())
    assert reloaded == schedule
    assert conforms(reloaded, lower_again(reloaded)) == []


@pytest.mark.parametrize("name", machine_names())
@pytest.mark.parametrize(("preset", "rounds"), [("1b", 2), ("8b", 1)])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_bound_is_below_the_simulated_step_on_every_shipped_machine(
    policy, preset, rounds, name
):
    machine = load_machine(name)
    schedule = plan_chain(preset_chain_of(policy, preset, rounds), machine, Caps(), policy)
    assert schedule.bound is not None
    step_s = simulate_rank(schedule, machine).step_ns / 1e9
    # layer_offload loads everything twice, whatever would fit: a poor plan, not a loose bound
    least = {"full_recompute": 0.7, "optimizer_offload": 0.85, "layer_offload": 0.4}[policy]
    assert least * step_s < schedule.bound.step_s <= step_s


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rounds", [1, 4])
def test_the_smallest_caps_would_do_and_one_mib_less_would_not(policy, rounds):
    chain, machine = preset_chain_of(policy, "1b", rounds), load_machine("rtx3090")
    device = -(-enough_device_bytes(chain, policy) // MIB) * MIB
    host = -(-enough_host_bytes(chain, policy, device) // MIB) * MIB
    found = planned(chain, machine, Caps(device_bytes=device, host_bytes=host), policy)
    assert recompute_levels(found) == {"INPUT"}
    assert verify_rank(found) == []
    with pytest.raises(InfeasiblePlan) as raised:
        planned(chain, machine, Caps(device_bytes=device - MIB, host_bytes=host), policy)
    shortage = raised.value.shortage
    assert (shortage.policy, shortage.cap) == (policy, "device")
    assert device - MIB < (shortage.enough_device_bytes or 0) <= device
    with pytest.raises(InfeasiblePlan) as raised:
        planned(chain, machine, Caps(device_bytes=device, host_bytes=host - MIB), policy)
    shortage = raised.value.shortage
    assert (shortage.policy, shortage.cap) == (policy, "host")
    assert host - MIB < (shortage.enough_host_bytes or 0) <= host


@pytest.mark.parametrize("block", range(4))
def test_any_tasks_of_any_chain_may_run_on_the_host(block):
    """Random chains: content goes back and forth between the two as often as it likes."""
    ratios = []
    for seed in range(block * 50, block * 50 + 50):
        case = small_case(seed)
        chain = some_on_host(case.chain, Random(seed))
        for policy in ON_HOST:
            chain = chain.model_copy(update={"recipe": {"optimizer": optimizer_place(policy)}})
            schedule = planned(chain, case.machine, Caps(), policy)
            assert verify_rank(schedule) == [], (seed, policy)
            assert conforms(schedule, chain) == [], (seed, policy)
            taken = [arena_bytes(schedule, tier) for tier in (DEVICE, HOST)]
            caps = Caps(device_bytes=taken[0], host_bytes=taken[1])
            bound = step_bound(chain, case.machine, caps)
            assert bound is not None
            step_s = simulate_rank(schedule, case.machine).step_ns / 1e9
            assert bound.step_s <= step_s * (1 + 1e-9), (seed, policy)
            ratios.append(step_s / bound.step_s)
    assert median(ratios) < 1.2


# --- full_recompute


def test_full_recompute_recomputes_whatever_memory_is_free():
    chain = tiny_chain_of("full_recompute", "packed")
    schedule = planned(chain, MACHINE, Caps(), "full_recompute")
    assert recompute_levels(schedule) == {"INPUT"}
    assert copied_tensors(schedule, "d2h") == ["loss"]
    groups = {r.group for r in chain.recomputes}
    remade = [op for op in schedule.ops if "recompute" in op.op_id]
    assert len(remade) == len(groups)


# --- optimizer_offload


@pytest.mark.parametrize("rounds", [1, 3])
def test_optimizer_offload_moves_gradients_once_down_and_parameters_once_up(rounds):
    chain = preset_chain_of("optimizer_offload", "1b", rounds)
    schedule = planned(chain, load_machine("h100"), Caps(), "optimizer_offload")
    assert copied_bytes(schedule, "d2h", "gradient") == whole_bytes(chain, "gradient")
    assert copied_bytes(schedule, "h2d", "parameter") == whole_bytes(chain, "parameter")
    for queue in ("d2h", "h2d"):
        for role in ("optimizer_state", "activation", "context"):
            assert copied_bytes(schedule, queue, role) == 0
    assert recompute_levels(schedule) == set()


def test_optimizer_offload_hides_the_update_under_backward_where_it_can():
    chain, machine = preset_chain_of("optimizer_offload", "8b", 1, 16384), load_machine("h100")
    schedule = planned(chain, machine, Caps(), "optimizer_offload")
    timeline = simulate_rank(schedule, machine)
    spans = timeline.passes[-1]
    on_device, on_host = [], []
    for i, op in enumerate(schedule.ops):
        if isinstance(op, Compute):
            host = schedule.calls[op.call].processor == "host"
            (on_host if host else on_device).append((spans.start_ns[i], spans.end_ns[i]))
    backward_ends = max(end for _, end in on_device)
    hidden = sum(min(end, backward_ends) - start for start, end in on_host if start < backward_ends)
    total = sum(end - start for start, end in on_host)
    assert hidden > 0.75 * total
    compute_ns = sum(end - start for start, end in on_device)
    assert timeline.step_ns < compute_ns + 0.25 * total


# --- layer_offload


@pytest.mark.parametrize("rounds", [1, 3])
def test_layer_offload_loads_every_use_and_stores_every_rounds_gradients(rounds):
    """A layer's forward and its backward, the embedding's lookup and the head."""
    chain = preset_chain_of("layer_offload", "1b", rounds)
    schedule = planned(chain, load_machine("h100"), Caps(), "layer_offload")
    sizes = {t.tensor_id: t.size_bytes for t in chain.tensors}
    layers = sum(sizes[f"param.{i}"] for i in range(16))
    ends = sizes["param.embedding"] + sizes["param.head"]
    assert copied_bytes(schedule, "h2d", "parameter") == rounds * (2 * layers + ends)
    gradients = layers + sizes["grad.embedding"] + sizes["grad.head"]
    assert copied_bytes(schedule, "d2h", "gradient") == rounds * gradients
    assert copied_bytes(schedule, "d2h", "parameter") == 0
    assert copied_bytes(schedule, "h2d", "gradient") == 0


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_next_step_of_layer_offload_starts_when_the_optimizer_has_ended(rounds):
    chain, machine = preset_chain_of("layer_offload", "1b", rounds), load_machine("rtx3090")
    schedule = planned(chain, machine, Caps(), "layer_offload")
    before, after = simulate_rank(schedule, machine).passes
    updates, computes, backwards = [], [], []
    for i, op in enumerate(schedule.ops):
        if isinstance(op, Compute):
            if op.label.kind == "optimizer_step":
                updates.append(i)
            elif schedule.calls[op.call].processor == "device":
                computes.append(i)
                backwards += [i] if "backward" in op.label.kind else []
    ended = max(before.end_ns[i] for i in updates)
    assert min(after.start_ns[i] for i in computes) > ended
    began = min(after.start_ns[i] for i in updates)
    assert began > max(after.end_ns[i] for i in backwards)


def test_layer_offload_holds_two_layers_at_a_time():
    """At the smallest cap the parameters on the device are those at work and the next ones."""
    chain = preset_chain_of("layer_offload", "1b", 1, 512)
    smallest = enough_device_bytes(chain, "layer_offload")
    assert smallest < 0.6 * whole_bytes(chain, "parameter")


# --- figures worked out by hand


@pytest.mark.parametrize("policy", ON_HOST)
def test_the_step_of_a_chain_of_two_tasks_is_a_circle_of_four_ops(policy):
    """Compute, gradient down, update, parameter up: none can overlap another."""
    size, compute_ns, update_ns = 40_000, 900, 1400
    chain, machine = two_task_chain(policy, compute_ns, update_ns, size), flat_machine()
    schedule = plan_chain(chain, machine, Caps(), policy)
    alone_ns = LAUNCH_NS + compute_ns + size // D2H_PER_NS + update_ns + size // H2D_PER_NS
    assert simulate_rank(schedule, machine).step_ns == alone_ns + 4 * WAIT_NS + 2 * COPY_NS
    assert schedule.bound is not None
    assert schedule.bound.step_s == pytest.approx(alone_ns * 1e-9, rel=1e-9)
    assert schedule.bound.limits == ("compute", "host_compute", "d2h", "h2d")


def test_the_bound_is_the_hosts_time_where_the_host_is_slow():
    machine = load_machine("rtx3090")
    chain = preset_chain_of("optimizer_offload", "1b", 1, 128)
    schedule = plan_chain(chain, machine, Caps(), "optimizer_offload")
    host_ns = sum(
        call_alone_ns(chain.calls[task.call], machine)
        for task in chain.tasks
        if chain.calls[task.call].processor == "host"
    )
    assert schedule.bound is not None
    assert schedule.bound.step_s > host_ns / 1e9
    assert "host_compute" in schedule.bound.limits


# --- errors


def test_an_operand_of_the_host_in_a_device_slot_is_a_violation():
    chain = tiny_chain_of("optimizer_offload", "one chunk")
    schedule = planned(chain, MACHINE, Caps(), "optimizer_offload")
    at = next(i for i, op in enumerate(schedule.ops) if op.op_id == "optimizer.0")
    update = schedule.ops[at]
    assert isinstance(update, Compute)
    carried = {item.tensor: item.slot for item in schedule.carried if "device" in item.slot}
    operands = (update.operands[0].model_copy(update={"slot": carried["param.0"]}),)
    moved = update.model_copy(update={"operands": operands + update.operands[1:]})
    ops = (*schedule.ops[:at], moved, *schedule.ops[at + 1 :])
    (found,) = verify_rank(schedule.model_copy(update={"ops": ops}))
    assert isinstance(found, OperandInWrongMemory)
    assert found.ops == ("optimizer.0",)
    assert "runs on the host" in found.message


@pytest.mark.parametrize("policy", ON_HOST)
@pytest.mark.parametrize("missing", ["host_peak_fp32_flop_per_s", "efficiency.host_vector"])
def test_only_chains_with_tasks_on_the_host_need_the_hosts_numbers(policy, missing):
    full = load_machine("h100")
    curves = {name: c for name, c in full.efficiency.items() if not name.startswith("host_")}
    field, _, key = missing.partition(".")
    lacking = full.model_copy(
        update={field: {**curves, "host_dram": full.efficiency["host_dram"]} if key else None}
    )
    schedule = plan_chain(tiny_chain_of("resident", "packed"), lacking, Caps(), "resident")
    assert simulate_rank(schedule, lacking).step_ns > 0
    with pytest.raises(MissingNumberError, match=missing):
        plan_chain(tiny_chain_of(policy, "packed"), lacking, Caps(), policy)


@pytest.mark.parametrize(("policy", "other"), [("streaming", "layer_offload"),
                                               ("optimizer_offload", "streaming"),
                                               ("layer_offload", "optimizer_offload")])  # fmt: skip
def test_a_chain_for_another_policy_is_refused(policy, other):
    with pytest.raises(WrongChainError, match=f"policy '{policy}' plans chains"):
        plan_chain(tiny_chain_of(other, "one chunk"), MACHINE, Caps(), policy)


def test_the_bound_has_launches_in_whole_ns_as_the_simulator_does():
    """A circle of 10 + 256 + 10 + 256 ns, and a launch of 0.4 ns, which is none."""
    free = {"copy_latency_ns": number(0), "event_wait_latency_ns": number(0)}
    rates = {f"pcie_{way}_bytes_per_s": number(10e9) for way in ("h2d", "d2h")}
    machine = flat_machine(launch_latency_ns=number(0.4), **free, **rates)
    chain = two_task_chain("optimizer_offload", 10, 10, 2560)
    schedule = plan_chain(chain, machine, Caps(), "optimizer_offload")
    assert simulate_rank(schedule, machine).step_ns == 532
    assert schedule.bound.step_s * 1e9 == pytest.approx(532, rel=1e-6)
    assert schedule.bound.step_s * 1e9 <= 532
