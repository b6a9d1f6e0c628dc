"""The bound against the fastest schedule that brute force finds, on small chains."""

from statistics import median
from unittest.mock import patch

import pytest

from tests.hardware_profiles.machines import number
from tests.helpers.best_schedule import Found, best_schedule
from tests.helpers.small_chains import (
    UNIT_BYTES,
    Again,
    Sort,
    build_chain,
    largest_operands_bytes,
    link_machine,
    small_case,
)
from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound import segments
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.choices import Choices
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.tensors import Tensor
from twinstream.simulator.replay import simulate_rank

CHAINS_PER_BLOCK = 200
NUM_BLOCKS = 5
FIXED_PER_BLOCK = 60

# 50 bytes a ns both ways: 8 units of 64 MiB take 10.7 ms.
MACHINE = link_machine(h2d=50.0, d2h=50.0)
COPY_8_MS = 8 * UNIT_BYTES / 50 / 1e6


def checked_best(chain: Chain, machine: Machine, caps: Caps, most: int) -> Found | None:
    """The best schedule found, safe, conforming, and as fast as it says."""
    found = best_schedule(chain, machine, caps, most=most)
    if found is not None:
        assert verify_rank(found.schedule) == []
        assert conforms(found.schedule, chain) == []
        assert found.schedule.caps == caps
        assert simulate_rank(found.schedule, machine).step_ns == found.step_ns
    return found


def bound_of_tasks_together(
    chain: Chain, machine: Machine, caps: Caps, together: int, single: frozenset[int]
) -> float:
    """As if so many consecutive tasks were the chunks of a layer, of one kernel.

    `single` are those that stay single all the same, wherever the most is held.
    """
    workload = chain.workload.model_copy(update={"chunks_per_round": together})
    calls = {
        name: call.model_copy(update={"kernel": "alike"}) for name, call in chain.calls.items()
    }
    alike = chain.model_copy(update={"workload": workload, "calls": calls})
    with patch.object(segments, "_fullest", return_value=single):
        bound = lower_bound(alike, machine, caps, most_segments=1)
    assert bound is not None, "there is a schedule, but no bound"
    if not single:
        assert max(bound.segment_of_task) + 1 < len(chain.tasks) or len(chain.tasks) == 1
    return bound.step_s


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_no_schedule_of_a_small_chain_is_faster_than_the_bound(block):
    over_bound, over_compute = [], []
    for seed in range(block * CHAINS_PER_BLOCK, (block + 1) * CHAINS_PER_BLOCK):
        case = small_case(seed)
        chain, machine = case.chain, case.machine
        bound = lower_bound(chain, machine, case.caps)
        best = checked_best(chain, machine, case.caps, most=30)
        if bound is None:
            assert best is None, f"seed {seed}: there is a schedule, but no bound"
        elif best is not None:
            assert bound.step_s * 1e9 <= best.step_ns, f"seed {seed}"
            single = frozenset({seed // 2 % len(chain.tasks)} if seed % 2 else ())
            for together in (2, 3):
                rough_s = bound_of_tasks_together(chain, machine, case.caps, together, single)
                assert rough_s * 1e9 <= best.step_ns, f"seed {seed}, {together} together"
            compute_ns = sum(cost_alone_ns(chain.calls[t.call].cost, machine) for t in chain.tasks)
            over_bound.append(best.step_ns / (bound.step_s * 1e9))
            over_compute.append(best.step_ns / compute_ns)
    assert len(over_bound) > 0.75 * CHAINS_PER_BLOCK
    assert median(over_bound) <= 1.1
    # A trivial bound would not do: copies and memory take time in more than half of the chains.
    assert median(over_compute) > 1.1


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_no_schedule_with_fixed_homes_is_faster_than_its_bound(block):
    over_open, compared = 0, 0
    for seed in range(block * FIXED_PER_BLOCK, (block + 1) * FIXED_PER_BLOCK):
        case = small_case(seed)
        kinds = ("parameter", "optimizer_state", "activation")
        fixed = {kind: ("host", "device")[(seed >> i) % 2] for i, kind in enumerate(kinds)}
        del fixed[kinds[seed % 3]]
        homes = {t.tensor_id: fixed[t.role] for t in case.chain.tensors if t.role in fixed}
        choices = Choices(homes=fixed)
        bound = lower_bound(case.chain, case.machine, case.caps, choices=choices)
        best = best_schedule(case.chain, case.machine, case.caps, homes=homes)
        if bound is None:
            assert best is None, f"seed {seed}: there is a schedule, but no bound"
            continue
        open_bound = lower_bound(case.chain, case.machine, case.caps)
        assert open_bound is not None and open_bound.step_s <= bound.step_s * (1 + 1e-9)
        over_open += bound.step_s > 1.01 * open_bound.step_s
        if best is not None:
            compared += 1
            assert bound.step_s * 1e9 <= best.step_ns, f"seed {seed}"
    assert compared > 0.5 * FIXED_PER_BLOCK
    assert over_open > 0.05 * FIXED_PER_BLOCK  # what is fixed costs something, and the bound knows


def test_the_bound_is_exact_where_one_resource_decides():
    """A parameter of 8 units is read in a task of 1 ms beside which a task fills the device."""
    sorts = [
        Sort("w", 8, "parameter", {1: ("read", 0)}),
        Sort("full", 16, "scratch", {0: ("scratch", 0)}),
    ]
    caps = Caps(device_bytes=16 * UNIT_BYTES)
    chain = build_chain(sorts, (1.0, 1.0))
    bound = lower_bound(chain, MACHINE, caps)
    best = checked_best(chain, MACHINE, caps, most=100)
    assert bound is not None and best is not None
    assert best.step_ns / 1e6 == pytest.approx(1 + COPY_8_MS + 1)
    # The copy goes on in the slot of the first task, beside that task: the relaxation.
    assert bound.step_s * 1e3 == pytest.approx(COPY_8_MS + 1)


def test_the_bound_knows_what_each_direction_has_while_both_are_busy():
    """No schedule is faster than it; and unequal shares of the link change it."""
    changed = compared = 0
    for seed in range(0, 80, 2):
        case = small_case(seed)
        before = lower_bound(case.chain, case.machine, case.caps)
        for share in (0.35, 0.65):
            machine = case.machine.model_copy(update={"duplex_h2d_share": number(share)})
            if before is None or machine.duplex_weights() == (1.0, 1.0):
                continue
            bound = lower_bound(case.chain, machine, case.caps)
            best = best_schedule(case.chain, machine, case.caps, most=10)
            assert bound is not None
            changed += abs(bound.step_s / before.step_s - 1) > 1e-3
            if best is not None:
                compared += 1
                assert bound.step_s * 1e9 <= best.step_ns, f"seed {seed}, share {share}"
    assert compared > 15 and changed, (compared, changed)


def check(chain: Chain, caps: Caps, best_ms: float, machine: Machine = MACHINE) -> None:
    """The best schedule takes so long, as worked out by hand, and the bound is not above it."""
    best = checked_best(chain, machine, caps, most=300)
    assert best is not None
    assert best.step_ns / 1e6 == pytest.approx(best_ms, rel=1e-6)
    bound = lower_bound(chain, machine, caps)
    assert bound is not None
    assert bound.step_s * 1e9 <= best.step_ns


def test_a_load_may_arrive_beside_the_recompute_before_its_task():
    """While t1 fills the device neither x nor w stays; w is loaded while x is made again."""
    sorts = [
        Sort("x", 8, "activation", {0: ("write", 1), 2: ("read", 1)}),
        Sort("w", 8, "parameter", {2: ("read", 0)}),
        Sort("full", 24, "scratch", {1: ("scratch", 0)}),
    ]
    agains = [Again("again", 2, ("x",), (), 20.0)]
    chain = build_chain(sorts, (0.5, 0.5, 0.5), agains=agains)
    check(chain, Caps(device_bytes=24 * UNIT_BYTES), 0.5 + 0.5 + 20 + 0.5)


def test_a_recompute_may_make_what_a_later_task_reads():
    """x is made again before t2, which does not use it, for t3."""
    sorts = [
        Sort("x", 8, "activation", {0: ("write", 1), 3: ("read", 1)}),
        Sort("full", 16, "scratch", {1: ("scratch", 0)}),
    ]
    agains = [Again("again", 2, ("x",), (), 2.0)]
    chain = build_chain(sorts, (0.5, 0.5, 0.5, 0.5), agains=agains)
    check(chain, Caps(device_bytes=16 * UNIT_BYTES), 4 * 0.5 + 2)


def test_a_recompute_may_make_all_parts_of_a_tensor_again():
    sorts = [
        Sort("x", 8, "activation", {0: ("write", 1), 2: ("read", 1)}),
        Sort("full", 8, "scratch", {1: ("scratch", 0)}),
    ]
    agains = [Again("again", 2, ("x",), (), 2.0)]
    whole = build_chain(sorts, (0.5, 0.5, 0.5), agains=agains)
    size = 4 * UNIT_BYTES
    parts = [
        Tensor(
            tensor_id=f"x.{i}", size_bytes=size, role="activation", dtype="uint8", shape=(size,),
            parent="x", offset_bytes=i * size,
        )
        for i in range(2)
    ]  # fmt: skip
    chain = whole.model_copy(update={"tensors": (*whole.tensors, *parts)})
    caps = Caps(device_bytes=8 * UNIT_BYTES)
    expected = lower_bound(whole, MACHINE, caps)
    bound = lower_bound(chain, MACHINE, caps)
    assert bound is not None and expected is not None
    assert bound.step_s == pytest.approx(expected.step_s)
    assert bound.step_s * 1e3 <= 3 * 0.5 + 2


def test_two_tensors_may_use_the_same_host_memory_one_after_the_other():
    """x is on the host at t1 only, z at t3 only; at t2, within the gaps of both, neither is."""
    sorts = [
        Sort("x", 8, "activation", {0: ("write", 1), 3: ("read", 1)}),
        Sort("z", 8, "optimizer_state", {0: ("read", 0), 1: ("update", 0)}),
        Sort("half.1", 8, "scratch", {1: ("scratch", 0)}),
        Sort("half.3", 8, "scratch", {3: ("scratch", 0)}),
    ]
    chain = build_chain(sorts, (0.5, 0.5, 30.0, 0.5))
    caps = Caps(device_bytes=16 * UNIT_BYTES, host_bytes=8 * UNIT_BYTES)
    # x out before t1, in and z out beside t2, z in before t0
    check(chain, caps, 0.5 + COPY_8_MS + 0.5 + 30 + 0.5 + COPY_8_MS)


def test_content_may_be_stored_before_a_use_that_comes_before_its_gap():
    """x is stored while t1, which reads it, waits for w."""
    sorts = [
        Sort("x", 8, "activation", {0: ("write", 1), 1: ("read", 1), 3: ("read", 1)}),
        Sort("w", 8, "parameter", {1: ("read", 0)}),
        Sort("half", 8, "scratch", {0: ("scratch", 0)}),
        Sort("full", 16, "scratch", {2: ("scratch", 0)}),
    ]
    chain = build_chain(sorts, (0.5, 0.5, 0.5, 0.5))
    check(chain, Caps(device_bytes=16 * UNIT_BYTES), 4 * 0.5 + 2 * COPY_8_MS)


def test_content_with_a_gap_before_is_stored_before_it_must_leave():
    """x is not used in t1, read in t2, and has no room in t3: no copy of it waits any longer."""
    chain = build_chain(_two_gaps(), (0.5, 0.5, 0.5, 0.5, 0.5))
    caps = Caps(device_bytes=16 * UNIT_BYTES)
    check(chain, caps, 3 * 0.5 + 2 * COPY_8_MS)
    bound = lower_bound(chain, MACHINE, caps)
    assert bound is not None
    assert bound.step_s * 1e3 == pytest.approx(2 * COPY_8_MS + 0.5)


def test_content_that_waits_for_its_copy_over_a_gap_takes_memory_once():
    """x is kept while t1 takes the other half, and copied to the host beside t2."""
    chain = build_chain(_two_gaps(), (0.5, 0.5, 20.0, 0.5, 0.5))
    check(chain, Caps(device_bytes=16 * UNIT_BYTES), 0.5 + 0.5 + 20 + COPY_8_MS + 2 * 0.5)


def _two_gaps() -> list[Sort]:
    return [
        Sort("x", 8, "activation", {0: ("write", 1), 2: ("read", 1), 4: ("read", 1)}),
        Sort("half", 8, "scratch", {1: ("scratch", 0)}),
        Sort("full", 16, "scratch", {3: ("scratch", 0)}),
    ]


@pytest.mark.parametrize("launch_ns", [0.4, 0.5, 30.4])
def test_latencies_count_in_whole_ns_as_the_simulator_has_them(launch_ns):
    """The simulator rounds a latency down where that is nearer, so the bound must, too."""
    from tests.hardware_profiles.machines import number

    machine = MACHINE.model_copy(update={"launch_latency_ns": number(launch_ns)})
    chain = build_chain([Sort("w", 1, "parameter", {0: ("read", 0)})], (1e-5, 1e-5))
    check(chain, Caps(), 2 * (10 + round(launch_ns)) / 1e6, machine)


def test_without_a_host_cap_only_operands_that_do_not_fit_have_no_bound():
    for seed in range(200):
        case = small_case(seed)
        least = largest_operands_bytes(case.chain)
        fits = lower_bound(case.chain, case.machine, Caps(device_bytes=least))
        short = Caps(device_bytes=least - UNIT_BYTES // 1024)
        assert fits is not None, f"seed {seed}"
        assert lower_bound(case.chain, case.machine, short) is None, f"seed {seed}"


def test_the_reserve_is_not_the_arenas():
    case = small_case(0)
    least = largest_operands_bytes(case.chain)
    reserve = 3 * UNIT_BYTES
    caps = Caps(device_bytes=least + reserve, device_reserve_bytes=reserve)
    bare = lower_bound(case.chain, case.machine, Caps(device_bytes=least))
    assert lower_bound(case.chain, case.machine, caps) == bare
    short = caps.model_copy(update={"device_bytes": least + reserve - UNIT_BYTES // 1024})
    assert lower_bound(case.chain, case.machine, short) is None


def test_content_that_neither_memory_has_room_for_has_no_bound():
    """At every task what is alive fits both memories, or there is no bound, and the reverse."""
    short = 0
    for seed in range(300):
        chain, machine = small_case(seed).chain, small_case(seed).machine
        if chain.recomputes:
            continue
        device = largest_operands_bytes(chain)
        needed = max(alive_bytes(chain)) - device
        fits = Caps(device_bytes=device, host_bytes=max(0, needed))
        assert lower_bound(chain, machine, fits) is not None, f"seed {seed}"
        if needed > 0:
            short += 1
            lacks = fits.model_copy(update={"host_bytes": needed - UNIT_BYTES // 1024})
            assert lower_bound(chain, machine, lacks) is None, f"seed {seed}"
    assert short > 50


def alive_bytes(chain: Chain) -> list[int]:
    """At each task of a chain without recomputes: its operands, and all content needed later."""
    num_tasks = len(chain.tasks)
    alive = []
    for position, task in enumerate(chain.tasks):
        names = {o.tensor for o in task.operands}
        for tensor in chain.tensors:
            rounds = 2 if tensor.tensor_id in chain.persistent else 1
            later = [chain.tasks[i % num_tasks] for i in range(position, rounds * num_tasks)]
            earlier = chain.tasks[: position + 1]
            touched = any(o.tensor == tensor.tensor_id for t in earlier for o in t.operands)
            modes = [o.mode for t in later for o in t.operands if o.tensor == tensor.tensor_id]
            if modes and modes[0] in ("read", "update") and (touched or rounds == 2):
                names.add(tensor.tensor_id)
        alive.append(sum(t.size_bytes for t in chain.tensors if t.tensor_id in names))
    return alive
