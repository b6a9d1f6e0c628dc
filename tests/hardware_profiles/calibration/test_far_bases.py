"""A base whose attention is several times off: the rows of a single sweep put it right."""

import math
from dataclasses import replace

import pytest

from twinstream.fidelity.fit_report import ending
from twinstream.hardware_profiles.calibration.fitting import (
    Fit,
    Observation,
    fit,
)
from twinstream.hardware_profiles.calibration.parameters import (
    applied,
    declared_parameters,
    prepared,
)
from twinstream.hardware_profiles.calibration.trials import TimeQuery
from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.cost import Work

BASE = prepared(load_machine("rtx3090_datasheet"))
H100 = prepared(load_machine("h100"))
# A sweep's pace is its own, as no parameter can say. Only the last has much attention.
PACES = {512: 1.01, 8192: 0.985, 131072: 1.0}
FLOPS = 2 * 10**15


def step(length: int, recomputed: float) -> list[Work]:
    """Matmuls and attention of a step that computes a share of its forward attention again."""

    def work(unit: str, shape: tuple[int, ...], flops: float) -> Work:
        return Work(unit=unit, shape=shape, flops=round(flops), hbm_bytes=0, launches=0)

    shape, attention = (length, length, 32, 128, 1), FLOPS * length / 131072
    return [
        work("matmul", (8192, 4096, 4096), FLOPS),
        work("attention_forward", shape, attention * (1 + recomputed)),
        work("attention_backward", shape, 2.5 * attention),
    ]


PARAMETERS = declared_parameters(BASE, step(512, 0.0))


def fitted(
    truth: dict[str, float], recomputed: dict[int, tuple[float, ...]], base: Machine = BASE
) -> Fit:
    """A fit to steps of a machine that is off from BASE by these factors."""
    machine = applied(BASE, PARAMETERS, [truth.get(p.name, 1.0) for p in PARAMETERS], "the truth")
    steps = [(length, share) for length, shares in recomputed.items() for share in shares]
    works = [step(length, share) for length, share in steps]

    def predict(trials: list[TimeQuery]) -> list[float]:
        return [cost_alone_ns(works[trial.index], trial.profile) / 1e9 for trial in trials]

    observations = [
        Observation(str(i), str(i), seconds * PACES[length], sweep=str(length))
        for i, ((length, _), seconds) in enumerate(
            zip(steps, predict([TimeQuery(machine, i) for i in range(len(steps))]), strict=True)
        )
    ]
    return fit(base, declared_parameters(base, step(512, 0.0)), observations, predict)


SHORT: dict[int, tuple[float, ...]] = {512: (0.0, 0.0), 8192: (0.0, 0.0)}


@pytest.mark.parametrize(("forward", "backward"), [(0.25, 1.0), (1.0, 0.25), (0.25, 0.25)])
def test_attention_four_times_off_is_told_by_one_sweep(forward, backward):
    truth = {"attention_forward": forward, "attention_backward": backward}
    found = fitted(truth, SHORT | {131072: (0.7, 0.65)})
    assert found.summary().mean_error < 0.006
    assert not found.unexplained()
    by_name = {p.parameter.name: p for p in found.parameters}
    for name, factor in truth.items():
        one = by_name[name]
        assert abs(math.log(one.factor / factor)) < 2 * one.posterior_width, name
    assert any(by_name[name].identified for name in truth)


def test_without_rows_that_recompute_differently_the_width_says_so():
    truth = {"attention_forward": 0.8, "attention_backward": 1.2}
    alike = fitted(truth, SHORT | {131072: (0.0, 0.0)})
    apart = fitted(truth, SHORT | {131072: (0.0, 0.9)})
    widths = [
        {p.parameter.name: p.posterior_width / p.parameter.width for p in found.parameters}
        for found in (alike, apart)
    ]
    assert widths[0]["attention_forward"] > 0.9
    for name in truth:
        assert widths[1][name] < 0.5 * widths[0][name]


def test_a_fit_that_is_worse_than_its_base_is_refused():
    found = fitted({"sustained": 0.9}, SHORT)
    found.require_no_worse()
    worse = [replace(one, predicted_s=one.before_s * 0.98) for one in found.observations]
    with pytest.raises(
        CalibrationError, match=r"so nothing is written: keep the base, or .*anyway"
    ):
        replace(found, observations=tuple(worse)).require_no_worse()


def test_rows_that_noise_does_not_explain_are_named_the_furthest_first():
    found = fitted({}, SHORT)
    assert "ends at the noise" in ending(found)
    off = [
        replace(one, predicted_s=one.observation.measured_s * factor)
        for one, factor in zip(found.observations, (1.04, 1.0, 0.9, 1.02), strict=True)
    ]
    told = ending(replace(found, observations=tuple(off)))
    assert "does not end at the noise: it is off by 4.00% on average" in told
    assert "2 of 4 measured times stay off by over 3%: 2 -10.0%; 0 +4.0%." in told


@pytest.mark.parametrize("forward", [1.0, 0.25])
def test_a_base_of_a_machine_fourteen_times_faster_is_refused(forward):
    found = fitted({"attention_forward": forward}, SHORT | {131072: (0.7, 0.65)}, H100)
    with pytest.raises(CalibrationError, match=r"sustained, .* at their bounds: 'h100' is no prof"):
        found.require_same_machine("the table's machine")
