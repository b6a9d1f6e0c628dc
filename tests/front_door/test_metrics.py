"""Headline figures, against numbers worked out by hand."""

import pytest

from tests.front_door.small_schedule import small_schedule, timeline
from twinstream.hardware_profiles.loader import load_machine_text
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import copied_bytes, executed_flops, summarize


def machine(**numbers: float) -> Machine:
    """A machine that states nothing but these numbers."""
    lines = ['name = "made up"', 'device = "cpu"', *(f"{k} = {v}" for k, v in numbers.items())]
    return load_machine_text("\n".join(lines))


FAST = machine(peak_fp32_flop_per_s=1e9)
MEASURED = timeline(100, 200, 300, 400, 500, 600, step_ns=2000.0)


def test_step_time_and_tokens_per_second_are_of_the_steady_state():
    summary = summarize(small_schedule(), MEASURED, FAST)
    assert summary.step_time_s == 2e-6
    assert summary.cold_step_time_s == pytest.approx(2.1e-6)
    # 2 rounds of 1 chunk of 16 tokens in 2 microseconds
    assert summary.tokens_per_s == pytest.approx(16e6)


def test_mfu_counts_the_models_flops_and_hfu_all_that_matmuls_executed():
    summary = summarize(small_schedule(), MEASURED, FAST)
    # 1000 FLOPs in 2 us are 0.5 GFLOP/s, of a peak of 1 GFLOP/s
    assert summary.mfu == pytest.approx(0.5)
    # three forwards of 600 FLOPs; what norms do is no matmul
    assert summary.hfu == pytest.approx(1800 / 2e-6 / 1e9)


def test_mfu_is_of_the_peak_of_the_models_dtype():
    both = machine(peak_fp32_flop_per_s=2e9, peak_bf16_flop_per_s=1e12)
    assert summarize(small_schedule(), MEASURED, both).mfu == pytest.approx(0.25)


def test_the_recompute_fraction_is_what_recompute_tasks_execute_of_all():
    assert executed_flops(small_schedule()) == (1800, 600)
    assert summarize(small_schedule(), MEASURED, FAST).recompute_fraction == pytest.approx(1 / 3)


def test_copied_bytes_are_counted_by_direction():
    assert copied_bytes(small_schedule()) == {"h2d": 1024 + 512, "d2h": 512}
    summary = summarize(small_schedule(), MEASURED, FAST)
    assert (summary.h2d_bytes, summary.d2h_bytes) == (1536, 512)


def test_peaks_are_the_arenas_extents_and_on_the_device_the_reserve():
    summary = summarize(small_schedule(), MEASURED, FAST)
    assert summary.device_peak_bytes == 1024 + 512 + 100
    assert summary.host_peak_bytes == 2048 + 512


def test_the_planning_time_is_passed_through():
    assert summarize(small_schedule(), MEASURED, FAST, 1.5).plan_seconds == 1.5
    assert summarize(small_schedule(), MEASURED, FAST).plan_seconds is None
