"""Known constants come back from noisy times; what the times do not tell is said so."""

import math

import numpy as np
import pytest

from tests.hardware_profiles.machines import toy_machine
from twinstream.hardware_profiles.calibration.fitting import Observation, fit
from twinstream.hardware_profiles.calibration.parameters import (
    Parameter,
    applied,
    declared_parameters,
    prepared,
)
from twinstream.hardware_profiles.calibration.trials import TimeQuery
from twinstream.hardware_profiles.cost import copy_alone_ns, work_time
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.cost import Work

BASE = prepared(toy_machine())
TRUTH = {"sustained": 0.8, "matmul_half_depth": 1.6, "attention_forward": 1.25, "h2d": 0.9}


def matmul(m: int, n: int, k: int) -> Work:
    return Work(unit="matmul", shape=(m, n, k), flops=2 * m * n * k, hbm_bytes=0, launches=0)


def attention(queries: int, context: int) -> Work:
    flops = 4 * 4096 * queries * (2 * context - queries) // 2
    shape = (queries, context, 32, 128, 1)
    return Work(unit="attention_forward", shape=shape, flops=flops, hbm_bytes=0, launches=0)


WORKS = [
    *(matmul(16384, 4096, k) for k in (512, 1024, 4096, 16384)),
    *(attention(q, c) for q, c in ((512, 512), (8192, 8192), (8192, 65536))),
]
COPIES = [10**8, 10**9, 4 * 10**9]


def seconds(machine: Machine, index: int) -> float:
    if index < len(WORKS):
        return work_time(WORKS[index], machine).alone_ns / 1e9
    return copy_alone_ns(COPIES[index - len(WORKS)], "h2d", machine) / 1e9


def predict(trials: list[TimeQuery]) -> list[float]:
    return [seconds(trial.profile, trial.index) for trial in trials]


def parameters() -> tuple[Parameter, ...]:
    return declared_parameters(BASE, WORKS)


def measured(noise: float = 0.0, outlier: int | None = None) -> list[Observation]:
    factors = [TRUTH.get(p.name, 1.0) for p in parameters()]
    truth = applied(BASE, parameters(), factors, "the truth")
    drawn = np.random.default_rng(0).normal(0.0, noise, 100)
    return [
        Observation(
            f"number {i}",
            str(i),
            seconds(truth, i) * math.exp(drawn[i]) * (1.3 if i == outlier else 1.0),
        )
        for i in range(len(WORKS) + len(COPIES))
    ]


def factors_of(observations):
    found = fit(BASE, parameters(), observations, predict)
    return {p.parameter.name: p.factor for p in found.parameters}, found


def test_known_constants_come_back_from_noisy_times():
    factors, found = factors_of(measured(noise=0.005))
    for name, value in TRUTH.items():
        width = {p.parameter.name: p.posterior_width for p in found.parameters}[name]
        assert math.log(factors[name] / value) == pytest.approx(0.0, abs=3 * width)
        assert width < 0.3
    assert found.summary().mean_error < 0.01
    assert found.summary().left_out_max_error < 0.05


def test_what_no_time_depends_on_stays_at_its_prior_and_is_reported():
    _, found = factors_of(measured())
    by_name = {p.parameter.name: p for p in found.parameters}
    for name in ("d2h", "host_dram", "launch_latency"):
        assert not by_name[name].identified
        assert by_name[name].factor == 1.0
        assert by_name[name].value == by_name[name].prior_value
        assert by_name[name].posterior_width == pytest.approx(by_name[name].parameter.width)
    for name in TRUTH:
        assert by_name[name].identified


def test_one_wild_time_hardly_moves_the_fit():
    clean, _ = factors_of(measured())
    spoiled, found = factors_of(measured(outlier=2))
    assert spoiled["sustained"] == pytest.approx(clean["sustained"], rel=0.04)
    assert found.observations[2].error == pytest.approx(1 / 1.3 - 1, abs=0.04)


def test_a_value_stops_at_its_bound_and_says_so():
    far = [
        Observation(o.name, o.group, o.measured_s * (0.2 if i >= len(WORKS) else 1.0))
        for i, o in enumerate(measured())
    ]
    _, found = factors_of(far)
    h2d = next(p for p in found.parameters if p.parameter.name == "h2d")
    assert h2d.value == pytest.approx(1.0)
    assert h2d.at_bound


def test_the_left_out_error_is_what_a_fit_without_the_group_predicts():
    observations = measured(noise=0.02)
    _, found = factors_of(observations)
    for index in (0, 5):
        kept = [i for i in range(len(observations)) if i != index]
        again = fit(
            BASE,
            parameters(),
            [observations[i] for i in kept],
            lambda trials, kept=kept: [seconds(t.profile, kept[t.index]) for t in trials],
        )
        by_itself = seconds(again.machine("again", "test"), index)
        one = found.observations[index]
        assert abs(one.predicted_s / by_itself - 1) > 0.004
        assert one.left_out_s == pytest.approx(by_itself, rel=0.001)


def test_repeats_of_a_schedule_are_left_out_together():
    observations = measured()
    spoiled = [
        Observation(o.name, "one" if i < 2 else o.group, o.measured_s * (1.1 if i < 2 else 1.0))
        for i, o in enumerate(observations)
    ]
    apart = [Observation(o.name, str(i), o.measured_s) for i, o in enumerate(spoiled)]
    _, together = factors_of(spoiled)
    _, separate = factors_of(apart)
    errors = [abs(f.observations[0].left_out_error) for f in (together, separate)]
    assert errors[0] > errors[1]


def test_the_profile_says_what_was_fitted_and_what_it_was():
    _, found = factors_of(measured())
    machine = found.machine("toy_fitted", "fitted to 10 times")
    assert machine.name == "toy_fitted"
    assert machine.efficiency["sustained"].kind == "fitted"
    source = machine.efficiency["sustained"].source
    assert "of the datasheet peak: fitted to 10 times; was 0.5263 in toy" in source
    assert machine.efficiency["d2h"] == BASE.efficiency["d2h"]
    matmul_curve = machine.efficiency["matmul"]
    assert matmul_curve.kind == "fitted"
    assert matmul_curve.max == BASE.efficiency["matmul"].max  # only its half_depth was free


def test_too_little_to_fit_is_refused():
    with pytest.raises(CalibrationError, match="1 measured times calibrate nothing"):
        fit(BASE, parameters(), measured()[:1], predict)
    nothing = [Observation("a", "a", 1.0), Observation("b", "b", 0.0)]
    with pytest.raises(CalibrationError, match="b was measured to take 0 s"):
        fit(BASE, parameters(), nothing, predict)


def test_making_a_base_explicit_keeps_its_rates():
    base, explicit = toy_machine(), BASE
    assert explicit.rate("peak_bf16_flop_per_s") < base.rate("peak_bf16_flop_per_s")
    for key in ("matmul", "attention_forward", "attention_forward/head_dim_64"):
        before = base.efficiency[key].max * base.rate("peak_bf16_flop_per_s")
        after = explicit.efficiency[key].max * explicit.rate("peak_bf16_flop_per_s")
        assert after == pytest.approx(before)
        assert explicit.efficiency[key].half_depth > 0
    assert explicit.efficiency["matmul/float32"] == base.efficiency["matmul/float32"]
    assert "attention_forward/head_dim_64/float32" not in explicit.efficiency
    assert prepared(explicit) == explicit


def test_only_what_the_work_needs_is_declared():
    names = [p.name for p in declared_parameters(BASE, [matmul(8, 8, 8)])]
    assert "sustained" in names
    assert not any(name.startswith("attention") or name == "memory_bound" for name in names)
    both = [attention(512, 512), Work(**{**attention(512, 512).model_dump(),
                                         "shape": (512, 512, 32, 64, 1)})]  # fmt: skip
    assert "attention_forward_head_dim_64" not in [
        p.name for p in declared_parameters(BASE, both[:1])
    ]
    assert "attention_forward_head_dim_64" in [p.name for p in declared_parameters(BASE, both)]


def test_making_a_base_explicit_leaves_the_price_of_float32_alone():
    only = {key: toy_machine().efficiency[key] for key in ("matmul", "vector", "hbm")}
    base = toy_machine().model_copy(update={"efficiency": only})
    demand = Work(
        unit="matmul", shape=(64, 64, 64), flops=10**9, hbm_bytes=0, launches=1, dtype="float32"
    )
    before = work_time(demand, base).alone_ns
    assert work_time(demand, prepared(base)).alone_ns == pytest.approx(before)
    names = [p.name for p in declared_parameters(prepared(base), [demand])]
    assert "matmul_float32" in names
    assert "sustained" not in names
