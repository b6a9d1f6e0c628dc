"""Closed forms, computed by hand on the toy machine."""

import pytest

from tests.hardware_profiles.machines import curve, number, toy_machine
from twinstream.hardware_profiles.cost import (
    copy_alone_ns,
    cost_alone_ns,
    work_time,
)
from twinstream.hardware_profiles.curve_choice import efficiency_keys
from twinstream.hardware_profiles.errors import MissingNumberError, UnknownDtypeError
from twinstream.schedule.cost import Work


def work(unit="matmul", flops=0, hbm_bytes=0, launches=1, dtype="bfloat16", shape=()):
    return Work(
        unit=unit, shape=shape, flops=flops, hbm_bytes=hbm_bytes, launches=launches, dtype=dtype
    )


@pytest.mark.parametrize(
    ("demand", "ns"),
    [
        # 4e9 flops: efficiency 0.5 * 4 / (4 + 1) = 0.4, so 4e9 / 40e12 = 100 us, plus a launch
        (work(flops=4 * 10**9), 103_000),
        # two launches of 1e9 flops: efficiency 0.25, so 2e9 / 25e12 = 80 us, plus two launches
        (work(flops=2 * 10**9, launches=2), 86_000),
        # without launches at full efficiency
        (work(flops=10**9, launches=0), 20_000),
        # float32 has its peak and its own curve: 8e9 / (10e12 * 0.8) = 1 ms
        (work(flops=8 * 10**9, dtype="float32"), 1_003_000),
        # bound by memory: 4e6 bytes / (1e12 * 0.4) = 10 us; 1e6 flops / 10e12 hide under it
        (work("rms_norm", 10**6, 4 * 10**6), 13_000),
        # 1e9 / 10e12 = 100 us at the float32 peak, whatever the dtype in memory
        (work("rms_norm", 10**9, 4 * 10**6), 103_000),
        # an unknown unit is `vector`, 3e6 bytes a launch: 0.8 * 3 / 4 = 0.6, so 10 us
        (work("gelu", hbm_bytes=6 * 10**6, launches=2), 16_000),
        # its own curve says 1.2 of nominal; the memory gives 0.9: 9e6 / 0.9e12 = 10 us
        (work("cached", hbm_bytes=9 * 10**6), 13_000),
    ],
)
def test_work_takes_the_slower_of_arithmetic_and_memory_and_its_launches(demand, ns):
    assert work_time(demand, toy_machine()).alone_ns == pytest.approx(ns)


def test_a_thin_matmul_is_bound_by_memory_at_the_hbm_efficiency():
    # 90e6 bytes / (1e12 * 0.9) = 100 us against 1e6 flops
    time = work_time(work(flops=10**6, hbm_bytes=90 * 10**6), toy_machine())
    assert time.memory_ns == pytest.approx(100_000)
    assert time.compute_ns == pytest.approx((1e6 + 1e9) / 50e12 * 1e9)
    assert time.launch_ns == 3000
    assert time.alone_ns == pytest.approx(103_000)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "flop_per_s"),
    [
        (128, "bfloat16", 40e12),
        (64, "bfloat16", 25e12),
        (64, "float32", 2e12),  # its dtype says more than its head dimension
    ],
)
def test_attention_is_priced_by_head_dim_and_dtype(head_dim, dtype, flop_per_s):
    shape = (4096, 8192, 32, head_dim, 1)
    demand = work("attention_forward", flops=10**9, dtype=dtype, shape=shape)
    assert work_time(demand, toy_machine()).alone_ns == pytest.approx(1e18 / flop_per_s + 3000)


def test_curves_are_looked_up_from_the_most_specific():
    assert efficiency_keys(work("matmul")) == ("matmul/bfloat16", "matmul")
    assert efficiency_keys(work("rope")) == ("rope/bfloat16", "rope", "vector/bfloat16", "vector")
    assert efficiency_keys(work("rope_backward")) == (
        "rope_backward/bfloat16",
        "rope_backward",
        "rope/bfloat16",
        "rope",
        "vector/bfloat16",
        "vector",
    )
    assert efficiency_keys(work("attention_forward", shape=(8, 8, 2, 64, 1))) == (
        "attention_forward/head_dim_64/bfloat16",
        "attention_forward/bfloat16",
        "attention_forward/head_dim_64",
        "attention_forward",
    )


def test_a_task_costs_the_sum_of_its_works():
    works = [work(flops=4 * 10**9), work("rms_norm", hbm_bytes=4 * 10**6)]
    assert cost_alone_ns(works, toy_machine()) == pytest.approx(103_000 + 13_000)
    assert cost_alone_ns([], toy_machine()) == 0


def test_a_copy_costs_its_latency_and_its_bytes_over_the_link():
    # h2d at 4e6 bytes: 0.8 * 4 / 5 = 0.64 of 10 GB/s: 625 us; d2h: 0.8 of 20 GB/s: 250 us
    assert copy_alone_ns(4 * 10**6, "h2d", toy_machine()) == pytest.approx(625_700)
    assert copy_alone_ns(4 * 10**6, "d2h", toy_machine()) == pytest.approx(250_700)
    assert copy_alone_ns(0, "h2d", toy_machine()) == 700


@pytest.mark.parametrize(
    "slow", ["pcie_duplex_bytes_per_s", "host_dram_bytes_per_s", "hbm_bytes_per_s"]
)
def test_a_copy_is_no_faster_than_any_resource_it_crosses(slow):
    half_speed = dict.fromkeys(("hbm", "duplex", "host_dram"), curve(0.5, 0, "bytes"))
    machine = toy_machine()
    machine = machine.model_copy(
        update={slow: number(1e9), "efficiency": {**machine.efficiency, **half_speed}}
    )
    assert copy_alone_ns(10**6, "d2h", machine) == pytest.approx(2_000_700)


def test_an_unconstrained_resource_takes_no_time_and_needs_no_curve():
    free = ("hbm_bytes_per_s", "pcie_d2h_bytes_per_s", "pcie_duplex_bytes_per_s")
    update = {field: number(None) for field in (*free, "host_dram_bytes_per_s")}
    only_matmul = {"matmul": toy_machine().efficiency["matmul"]}
    machine = toy_machine().model_copy(update={**update, "efficiency": only_matmul})
    assert copy_alone_ns(10**9, "d2h", machine) == 700
    assert work_time(work("rms_norm", hbm_bytes=10**9), machine).alone_ns == 3000
    assert work_time(work(flops=4 * 10**9, hbm_bytes=10**12), machine).alone_ns == pytest.approx(
        103_000
    )
    unlimited = machine.model_copy(update={"peak_bf16_flop_per_s": number(None)})
    assert work_time(work(flops=4 * 10**9), unlimited).alone_ns == 3000


@pytest.mark.parametrize("unit", ["matmul", "attention_backward"])
def test_compute_units_never_fall_back_to_vector(unit):
    vector_only = toy_machine().model_copy(update={"efficiency": {"vector": curve(1, 0, "bytes")}})
    with pytest.raises(MissingNumberError, match=rf"has no efficiency\.{unit}, .* of = \"flops\""):
        work_time(work(unit, flops=1), vector_only)


def test_work_needs_only_the_numbers_it_uses():
    machine = toy_machine().model_copy(update={"peak_fp32_flop_per_s": None})
    assert work_time(work(flops=4 * 10**9), machine).alone_ns == pytest.approx(103_000)
    with pytest.raises(MissingNumberError, match="peak_fp32_flop_per_s"):
        work_time(work("rms_norm", flops=1), machine)


def test_a_dtype_without_a_peak_is_named():
    with pytest.raises(UnknownDtypeError, match=r"unit 'matmul' has dtype 'float8'.*float32"):
        work_time(work(flops=1, dtype="float8"), toy_machine())


def test_a_shallow_matmul_pays_for_starting_and_ending_its_tiles():
    # K = 1000 with half_depth 250: 1.25 fold of 4e9 flops, then + 1e9 a launch over 50e12
    deep = toy_machine().efficiency["matmul"].model_copy(update={"half_depth": 250.0})
    machine = toy_machine().model_copy(
        update={"efficiency": {**toy_machine().efficiency, "matmul": deep}}
    )
    found = work_time(work(flops=4 * 10**9, shape=(1000, 2000, 1000)), machine).alone_ns
    assert found == pytest.approx(6e9 / 50e12 * 1e9 + 3000)
    shapeless = work_time(work(flops=4 * 10**9), machine).alone_ns
    assert shapeless == pytest.approx(5e9 / 50e12 * 1e9 + 3000)


@pytest.mark.parametrize(
    ("queries", "context", "mean_keys"), [(512, 512, 256), (8192, 8192, 4096), (512, 4096, 3840)]
)
def test_the_depth_of_causal_attention_is_the_mean_number_of_keys(queries, context, mean_keys):
    curves = toy_machine().efficiency
    deep = curves["attention_forward"].model_copy(update={"half_depth": 128.0})
    machine = toy_machine().model_copy(update={"efficiency": {**curves, "attention_forward": deep}})
    demand = work("attention_forward", flops=10**9, shape=(queries, context, 32, 128, 1))
    expected = 1e9 * (1 + 128 / mean_keys) / 40e12 * 1e9 + 3000
    assert work_time(demand, machine).alone_ns == pytest.approx(expected)


def test_the_triangle_of_a_causal_mask_may_cost_more_than_the_context_before_it():
    # 512 queries after 3,584 keys: of 3,840 mean keys 256 are the triangle's
    curves = dict(toy_machine().efficiency)
    uneven = curves["attention_forward"].model_copy(update={"diagonal": 2.0})
    curves |= {"attention_forward": uneven}
    machine = toy_machine().model_copy(update={"efficiency": curves})
    for queries, context, more in ((512, 512, 2.0), (512, 4096, 2.0 * 256 / 3840)):
        demand = work("attention_forward", flops=10**9, shape=(queries, context, 32, 128, 1))
        plain, found = (work_time(demand, one).compute_ns for one in (toy_machine(), machine))
        launches = work_time(demand.model_copy(update={"flops": 1}), toy_machine()).compute_ns
        assert found - launches == pytest.approx((plain - launches) * (1 + more), rel=1e-4)


def test_the_power_limit_holds_bf16_but_not_the_float32_peak():
    curves = {**toy_machine().efficiency, "sustained": curve(0.8, 0, "flops")}
    machine = toy_machine().model_copy(update={"efficiency": curves})
    assert machine.rate("peak_bf16_flop_per_s") == pytest.approx(80e12)
    assert machine.number("peak_bf16_flop_per_s") == 100e12
    found = work_time(work(flops=4 * 10**9), machine).alone_ns
    assert found == pytest.approx(100_000 / 0.8 + 3000)
    assert work_time(work(flops=8 * 10**9, dtype="float32"), machine).alone_ns == pytest.approx(
        1_003_000
    )


def test_fp8_runs_at_its_peak_with_the_launches_and_tiles_of_bf16():
    curves = {**toy_machine().efficiency, "sustained": curve(0.8, 0, "flops")}
    curves["matmul"] = curves["matmul"].model_copy(update={"half_depth": 64.0})
    peak = {"peak_fp8_flop_per_s": number(200e12), "efficiency": curves}
    machine = toy_machine().model_copy(update=peak)
    taken = {}
    for dtype in ("bfloat16", "fp8"):
        demand = work(flops=4 * 10**9, shape=(1000, 2000, 1024), dtype=dtype)
        taken[dtype] = work_time(demand, machine).compute_ns
    # at max 0.5 of 80 and 160 TFLOP/s; a launch costs 1e9 FLOPs of bf16, a tile 64 of 1,024 steps
    assert taken["bfloat16"] == pytest.approx((4e9 * (1 + 64 / 1024) + 1e9) / 40e12 * 1e9)
    assert taken["fp8"] == pytest.approx((4e9 * (1 + 128 / 1024) + 2e9) / 80e12 * 1e9)


def test_a_curve_of_fp8_is_taken_as_it_is():
    curves = {**toy_machine().efficiency, "matmul/fp8": curve(0.25, 1e9, "flops")}
    peak = {"peak_fp8_flop_per_s": number(200e12), "efficiency": curves}
    machine = toy_machine().model_copy(update=peak)
    found = work_time(work(flops=4 * 10**9, dtype="fp8"), machine).compute_ns
    assert found == pytest.approx(5e9 / 50e12 * 1e9)


def test_an_unconstrained_fp8_peak_takes_no_time():
    machine = toy_machine().model_copy(update={"peak_fp8_flop_per_s": number(None)})
    assert work_time(work(flops=4 * 10**9, dtype="fp8"), machine).compute_ns == 0


@pytest.mark.parametrize("dtype", ["fp8", "fp4"])
def test_a_machine_without_a_narrow_peak_says_so(dtype):
    with pytest.raises(MissingNumberError, match=f"peak_{dtype}_flop_per_s"):
        work_time(work(flops=1, dtype=dtype), toy_machine())
