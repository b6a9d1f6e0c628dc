"""What ops cost on a machine: latencies, flows, and numbers that the profile lacks."""

import pytest

from tests.hardware_profiles.machines import number
from tests.helpers.flat_machine import (
    COPY_NS,
    D2H_PER_NS,
    DRAM_PER_NS,
    FLOP_PER_NS,
    H2D_PER_NS,
    HBM_PER_NS,
    HOST_FLOP_PER_NS,
    LAUNCH_NS,
    WAIT_NS,
    flat_machine,
)
from tests.helpers.sketches import KIB, feed, fetch, op, sketch, tensor
from twinstream.hardware_profiles.errors import MissingNumberError
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import Copy, KernelCall, Stream
from twinstream.simulator.costs import MachineCosts
from twinstream.simulator.replay import replay_passes, simulate_rank


def call(*works: Work) -> dict[str, KernelCall]:
    return {"call": KernelCall(kernel="nothing/eager", attributes={}, cost=works)}


def matmul(flops: int, hbm_bytes: int, launches: int = 1) -> Work:
    return Work(unit="matmul", shape=(), flops=flops, hbm_bytes=hbm_bytes, launches=launches)


def one_pass(ops, machine, **fields):
    schedule = sketch(ops, **fields)
    (spans,) = replay_passes(schedule, MachineCosts(schedule, machine), 1)
    return list(zip(spans.start_ns, spans.end_ns, strict=True))


def test_a_task_takes_its_launches_and_then_the_slower_of_arithmetic_and_memory_of_each_kernel():
    works = (matmul(100 * FLOP_PER_NS, HBM_PER_NS), matmul(FLOP_PER_NS, 50 * HBM_PER_NS, 2))
    spans = one_pass([op("a", "compute")], flat_machine(), calls=call(*works))
    assert spans == [(0, 3 * LAUNCH_NS + 100 + 50)]


def test_a_task_without_work_takes_no_time():
    assert one_pass([op("a", "compute")], flat_machine()) == [(0, 0)]


@pytest.mark.parametrize(("queue", "per_ns"), [("h2d", H2D_PER_NS), ("d2h", D2H_PER_NS)])
def test_a_copy_takes_its_latency_and_its_bytes_at_the_rate_of_its_direction(queue, per_ns):
    assert one_pass([op("a", queue)], flat_machine()) == [(0, COPY_NS + -(-KIB // per_ns))]


def test_a_copy_inside_the_device_reads_and_writes_hbm_on_whatever_queue():
    copy = Copy(
        op_id="a", stream=Stream(queue="compute"), tensor="x", version=0, source="device.x",
        destination="device.x",
    )  # fmt: skip
    took_ns = LAUNCH_NS + -(-2 * KIB // HBM_PER_NS)
    assert one_pass([copy], flat_machine()) == [(0, took_ns)]
    beside = copy.model_copy(update={"op_id": "b", "stream": Stream(queue="h2d")})
    assert one_pass([copy, beside], flat_machine())[0] == (0, LAUNCH_NS + -(-4 * KIB // HBM_PER_NS))


def test_a_copy_of_some_parts_moves_their_bytes_and_the_padding_between_them():
    parts = (tensor(f"x.{i}", 400, parent="x", offset=600 * i) for i in range(3))
    tensors = (tensor("x", 2000), *parts)
    copy = Copy(
        op_id="a", stream=Stream(queue="h2d"), tensor="x", version=0, source="host.x",
        destination="device.x", num_parts=2,
    )  # fmt: skip
    spans = one_pass([copy], flat_machine(), x_bytes=2000, tensors=tensors)
    assert spans == [(0, COPY_NS + 1000 // H2D_PER_NS)]


def test_what_the_host_fills_and_takes_passes_through_its_memory_once():
    took_ns = LAUNCH_NS + -(-KIB // DRAM_PER_NS)
    assert one_pass([feed("a"), fetch("b")], flat_machine()) == [
        (0, took_ns),
        (took_ns, 2 * took_ns),
    ]


def test_an_op_that_waits_pays_the_event_latency_once_after_the_last_of_its_waits():
    ops = [op("a", "h2d"), op("b", "d2h"), op("c", "compute", ("a", "b")), op("d", "compute")]
    machine = flat_machine(pcie_duplex_bytes_per_s=number(1e12))
    ends = [COPY_NS + -(-KIB // per_ns) for per_ns in (H2D_PER_NS, D2H_PER_NS)]
    assert one_pass(ops, machine)[2:] == [(max(ends) + WAIT_NS,) * 2] * 2


def test_two_directions_at_once_share_the_duplex_limit():
    # 60 bytes per ns together, d2h alone would get 40: 30 each until both are through
    size = 30 * 1000
    spans = one_pass([op("a", "h2d"), op("b", "d2h")], flat_machine(), x_bytes=size)
    assert spans == [(0, COPY_NS + 1000)] * 2


def test_two_directions_at_once_have_each_the_rate_that_the_profile_states():
    # of 60 bytes per ns H2D has 27 and D2H 33, which is through first; then H2D alone has its 50
    machine = flat_machine(duplex_h2d_share=number(0.45))
    spans = one_pass([op("a", "h2d"), op("b", "d2h")], machine, x_bytes=33_000)
    assert spans == [(0, COPY_NS + 1000 + 6000 // 50), (0, COPY_NS + 1000)]
    alone = [one_pass([op("a", way)], machine, x_bytes=33_000) for way in ("h2d", "d2h")]
    assert alone == [[(0, COPY_NS + 660)], [(0, COPY_NS + 825)]]


def host_call(flops: int, dram_bytes: int) -> dict[str, KernelCall]:
    work = Work(
        unit="adamw", shape=(), flops=flops, hbm_bytes=0, launches=1, host_dram_bytes=dram_bytes
    )
    return {
        "call": KernelCall(kernel="nothing/host", attributes={}, cost=(work,), processor="host")
    }


@pytest.mark.parametrize(("flops", "dram", "ns"), [(90, 20, 90), (10, 20, 20)])
def test_a_task_of_the_host_takes_the_slower_of_its_arithmetic_and_host_dram(flops, dram, ns):
    calls = host_call(flops * HOST_FLOP_PER_NS, dram * DRAM_PER_NS)
    assert one_pass([op("a", "compute")], flat_machine(), calls=calls) == [(0, ns)]


def test_a_task_of_the_host_and_a_copy_share_host_dram():
    """Both together need 200 B/ns + 50 B/ns of 200: the copy has its 50, the task 150, then 200."""
    size = H2D_PER_NS * 1000
    spans = one_pass(
        [op("a", "compute"), op("b", "h2d")], flat_machine(copy_latency_ns=number(0)),
        x_bytes=size, calls=host_call(0, 2000 * DRAM_PER_NS),
    )  # fmt: skip
    assert spans == [(0, 1000 + (2000 * 200 - 1000 * 150) // 200), (0, 1000)]


def test_only_schedules_with_tasks_on_the_host_need_the_hosts_numbers():
    lacking = flat_machine(host_peak_fp32_flop_per_s=None)
    assert "host_compute" not in MachineCosts(sketch([op("a", "compute")]), lacking).capacity
    with pytest.raises(MissingNumberError, match="host_peak_fp32_flop_per_s"):
        simulate_rank(sketch([op("a", "compute")], calls=host_call(1, 1)), lacking)


def test_unconstrained_links_leave_only_latencies():
    rates = ("h2d", "d2h", "duplex")
    free = {f"pcie_{name}_bytes_per_s": number(None) for name in rates}
    free |= {"hbm_bytes_per_s": number(None), "host_dram_bytes_per_s": number(None)}
    schedule = sketch([op("a", "h2d"), op("b", "d2h"), feed("c")])
    timeline = simulate_rank(schedule, flat_machine(**free))
    assert timeline.cold.end_ns == (COPY_NS, COPY_NS, LAUNCH_NS)
    assert set(timeline.utilization.values()) == {0.0}


def test_utilization_is_the_share_of_each_resource_that_a_step_uses():
    works = (matmul(500 * FLOP_PER_NS, 500 * HBM_PER_NS // 2),)
    timeline = simulate_rank(
        sketch([op("a", "compute"), op("b", "compute", (), ("a",))], calls=call(*works)),
        flat_machine(),
    )
    step_ns = 2 * (LAUNCH_NS + 500) + WAIT_NS
    assert timeline.step_ns == step_ns
    assert timeline.utilization["compute"] == pytest.approx(2 * 500 / step_ns)
    assert timeline.utilization["hbm"] == pytest.approx(2 * 250 / step_ns)
    assert timeline.utilization["pcie"] == 0


@pytest.mark.parametrize(
    "field",
    [
        "peak_bf16_flop_per_s",
        "hbm_bytes_per_s",
        "pcie_h2d_bytes_per_s",
        "pcie_d2h_bytes_per_s",
        "pcie_duplex_bytes_per_s",
        "host_dram_bytes_per_s",
        "launch_latency_ns",
        "copy_latency_ns",
        "event_wait_latency_ns",
        "efficiency.matmul",
        "efficiency.duplex",
    ],
)
def test_a_number_that_the_profile_lacks_is_named(field):
    machine = flat_machine()
    if field.startswith("efficiency."):
        curves = dict(machine.efficiency)
        del curves[field.removeprefix("efficiency.")]
        machine = machine.model_copy(update={"efficiency": curves})
    else:
        machine = machine.model_copy(update={field: None})
    ops = [op("a", "compute"), op("b", "h2d"), op("c", "d2h"), feed("d")]
    with pytest.raises(MissingNumberError, match=field) as raised:
        simulate_rank(sketch(ops, calls=call(matmul(10, 10))), machine)
    assert raised.value.field == field
    assert raised.value.machine == "flat"
