"""Efficiencies taken from a relative keep their fractions and their times per launch."""

import pytest

from benchmarks.accuracy.borrowing import borrowed
from tests.hardware_profiles.machines import curve, number, toy_machine
from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.schedule.cost import Work

TWICE = toy_machine().model_copy(
    update={
        "name": "twice",
        "peak_bf16_flop_per_s": number(200e12),
        "efficiency": {"matmul": curve(0.1, 0, "flops")},
    }
)


def matmul(flops):
    return Work(unit="matmul", shape=(), flops=flops, hbm_bytes=0, launches=1)


def test_fractions_carry_over_and_a_launch_ramps_up_in_the_same_time():
    machine = borrowed(TWICE, toy_machine(), "untested")
    assert machine.number("peak_bf16_flop_per_s") == 200e12
    assert machine.efficiency["matmul"].max == 0.5
    # 8e9 flops at 100 TFLOP/s are 80 us; the ramp is the toy's 1e9 / 50e12 = 20 us; a launch 3 us
    assert work_time(matmul(8 * 10**9), machine).alone_ns == pytest.approx(103_000)


def test_every_borrowed_curve_is_labelled():
    machine = borrowed(TWICE, toy_machine(), "off by 7 % in a test")
    for found in machine.efficiency.values():
        assert found.kind == "assumed"
        assert found.source == "borrowed from toy (assumed), off by 7 % in a test"
    assert machine.launch_latency_ns is not None
    assert machine.launch_latency_ns.source.startswith("borrowed from toy")


def test_curves_that_are_not_wanted_stay_the_machines_own():
    machine = borrowed(TWICE, toy_machine(), "", lambda key: not key.startswith("matmul"))
    assert machine.efficiency["matmul"] == TWICE.efficiency["matmul"]
    assert "matmul/float32" not in machine.efficiency
    assert machine.efficiency["h2d"].max == 0.8


def test_a_machine_without_a_nominal_rate_cannot_borrow():
    bare = TWICE.model_copy(update={"pcie_h2d_bytes_per_s": None})
    with pytest.raises(CalibrationError, match="'twice' states no pcie_h2d_bytes_per_s"):
        borrowed(bare, toy_machine(), "")
