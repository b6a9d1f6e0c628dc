"""Constants are found again in times made with them, within bounds, and become profiles."""

import pytest

from tests.fidelity.clusters.published import predicted_from_flops, rows_of
from twinstream.fidelity.constants import CONSTANTS, with_constants
from twinstream.fidelity.constants_fit import fit_constants
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.errors import CalibrationError

TWO = [one for one in CONSTANTS if one.name in ("sustained", "network")]
TRUE = {"sustained": 0.62, "network": 0.85}


def predicted(rows, trials):
    return [predicted_from_flops(row, trial) for row, trial in zip(rows, trials, strict=True)]


def made_rows(true):
    """Runs of several sizes and layouts, whose times follow from constants."""
    made = []
    for row in rows_of("vtrain").values():
        for dp in (1, 2, 4, 8, 16, 32, 64, 128):
            layout = row.job.layout.model_copy(update={"dp": dp})
            job = row.job.model_copy(update={"layout": layout, "global_batch": 8 * dp * dp})
            update = {"job": job, "num_gpus": layout.num_gpus, "family": f"{row.family} {dp}"}
            one = row.model_copy(update=update)
            step_s = predicted_from_flops(one, true).step_s
            made.append(one.model_copy(update={"measured_s": step_s}))
    return made


def test_constants_are_found_in_times_made_with_them():
    rows = made_rows(TRUE)
    fit = fit_constants("A100", rows, predicted, TWO)
    assert fit.values == pytest.approx(TRUE, rel=0.1)  # the starts draw a little
    assert fit.mean_error < 0.01 < fit.start_mean_error
    assert 2 < fit.rows <= sum(row.calibrates for row in rows)
    assert not any(one.at_bound for one in fit.constants)


def test_rows_that_are_not_for_calibrating_change_nothing():
    rows = made_rows(TRUE)
    odd = [row if row.calibrates else row.model_copy(update={"measured_s": 1e4}) for row in rows]
    found = [fit_constants("A100", each, predicted, TWO).values for each in (rows, odd)]
    assert found[0] == found[1]


def test_a_constant_stays_within_its_bounds_and_says_so():
    rows = made_rows({"sustained": 0.3, "network": 0.85})  # slower than bounds allow
    fit = fit_constants("A100", rows, predicted, TWO)
    sustained = next(one for one in fit.constants if one.name == "sustained")
    assert sustained.at_bound and sustained.value == sustained.low


def test_a_gpu_type_without_rows_is_refused_with_those_there_are():
    with pytest.raises(CalibrationError, match="no row of these tables is for calibrating H100"):
        fit_constants("H100", made_rows(TRUE), predicted, TWO)


def test_constants_are_numbers_of_the_profiles():
    cluster = load_cluster("a100_vtrain")
    values = {one.name: one.start for one in CONSTANTS} | {"sustained": 0.66, "elementwise": 0.6}
    machine, fitted = with_constants(machine_of(cluster), cluster, values, "fitted in a test")
    assert machine.rate("peak_bf16_flop_per_s") == pytest.approx(312e12 * 0.66)
    assert machine.curve("vector").max == pytest.approx(0.6)
    # a norm is as much slower than plain elementwise work as it was
    assert machine.curve("rms_norm").max == pytest.approx(0.6 * 0.8 / 0.85, rel=1e-3)
    assert machine.curve("hbm") == machine_of(cluster).curve("hbm")
    assert fitted.number("network_efficiency") == values["network"]
    assert fitted.compute_lost.kind == "fitted"
    assert fitted.curves == cluster.curves
