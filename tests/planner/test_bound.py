"""The lower bound is below every plan's simulated step, and moves the right way."""

import pytest

from tests.helpers.machines_for_plans import fast_link_machine, slow_link_machine
from tests.helpers.planning import plan_chain
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.planner.bound.lower_bound import BoundProgram, lower_bound
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS, with_rounds
from twinstream.planner.lifetimes.view import ChainView
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate_rank

MIB = 2**20
MACHINES = {"h100": load_machine("h100"), "fast link": fast_link_machine()}
WORKLOADS = {
    "one round, packed": Workload(
        seq_len=64, chunk_tokens=128, chunks_per_round=2, rounds_per_step=1
    ),
    "sliced": Workload(seq_len=128, chunk_tokens=64, chunks_per_round=2, rounds_per_step=3),
    "five rounds, folded": Workload(
        seq_len=128, chunk_tokens=128, chunks_per_round=1, rounds_per_step=5
    ),
}


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_no_policy_at_any_cap_is_faster_than_the_bound(machine, workload):
    chain = lower(load_preset("tiny"), workload)
    planned = 0
    for device_mib in (3, 4, 6, 10, 40):
        caps = Caps(device_bytes=device_mib * MIB)
        for policy in ("resident", "streaming", "optimal"):
            try:
                schedule = plan_chain(chain, machine, caps, policy)
            except InfeasiblePlan:
                continue
            planned += 1
            assert schedule.bound is not None, f"{policy} fits {device_mib} MiB, the bound does not"
            assert schedule.bound.step_s <= simulate_rank(schedule, machine).step_ns / 1e9
    assert planned >= 8


def test_the_bound_is_the_compute_time_where_nothing_has_to_move():
    machine = load_machine("h100")
    chain = lower(load_preset("tiny"), WORKLOADS["sliced"])
    schedule = plan_chain(chain, machine, Caps(), "resident")
    assert schedule.bound is not None
    # Everything stays on the device; only latencies and the tokens' copies are above the bound.
    step_s = simulate_rank(schedule, machine).step_ns / 1e9
    assert 0.9 * step_s < schedule.bound.step_s <= step_s


@pytest.mark.parametrize("host_mib", [None, 20])
def test_the_bound_within_one_of_many_caps_is_that_within_it_alone(host_mib):
    """To the solver's rounding; and to the bit whatever was asked before."""
    machine = slow_link_machine()
    chain = lower(load_preset("tiny"), WORKLOADS["sliced"])
    host_bytes = None if host_mib is None else host_mib * MIB
    caps = [Caps(device_bytes=kib * 1024, host_bytes=host_bytes) for kib in range(2000, 9000, 500)]
    falling, rising = (BoundProgram(ChainView(chain), machine) for _ in range(2))
    at_once = [falling.bound(one) for one in reversed(caps)][::-1]
    assert [rising.bound(one) for one in caps] == at_once
    alone = [lower_bound(chain, machine, one) for one in caps]
    assert None in alone
    assert len({found and found.step_s for found in alone}) > 4
    for one, other in zip(at_once, alone, strict=True):
        assert (one is None) == (other is None)
        assert one is other is None or one.step_s == pytest.approx(other.step_s, rel=1e-9)


def test_more_memory_or_a_faster_link_never_raises_the_bound():
    machine = load_machine("h100")
    chain = lower(load_preset("8b"), Workload(
        seq_len=8192, chunk_tokens=8192, chunks_per_round=1, rounds_per_step=2
    ))  # fmt: skip
    bounds = [
        lower_bound(chain, machine, Caps(device_bytes=gib * 2**30)) for gib in (12, 16, 24, 80)
    ]
    seconds = [bound.step_s for bound in bounds if bound is not None]
    assert len(seconds) == len(bounds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.1 * seconds[-1]


def test_the_folded_program_bounds_what_the_rounds_spelled_out_need():
    machine = load_machine("h100")
    chain = lower(load_preset("tiny"), WORKLOADS["five rounds, folded"])
    folded = lower_bound(
        with_rounds(chain, PROGRAM_ROUNDS), machine, Caps(device_bytes=4 * MIB), num_rounds=5
    )
    whole = lower_bound(chain, machine, Caps(device_bytes=4 * MIB))
    assert folded is not None
    assert whole is not None
    assert 0.97 * whole.step_s <= folded.step_s <= whole.step_s * (1 + 1e-6)


def test_no_bound_exists_where_the_largest_task_does_not_fit():
    chain = lower(load_preset("tiny"), WORKLOADS["sliced"])
    assert lower_bound(chain, load_machine("h100"), Caps(device_bytes=MIB // 2)) is None


def test_padding_between_the_parts_of_what_persists_need_not_be_anywhere():
    workload = Workload(seq_len=256, chunk_tokens=256, chunks_per_round=1, rounds_per_step=1)
    chain = lower(load_preset("1b"), workload)
    machine, cap = load_machine("h100"), Caps(device_bytes=16 * 2**30, host_bytes=0)
    held = lower_bound(chain, machine, cap)
    with_parts = {t.parent for t in chain.tensors if t.parent is not None}
    padded = tuple(
        t.model_copy(update={"size_bytes": t.size_bytes + 16 * 2**30})
        if t.tensor_id in with_parts and t.tensor_id in chain.persistent
        else t
        for t in chain.tensors
    )
    assert padded != chain.tensors
    bound = lower_bound(chain.model_copy(update={"tensors": padded}), machine, cap)
    assert held is not None and bound is not None
    assert bound.step_s == pytest.approx(held.step_s)
