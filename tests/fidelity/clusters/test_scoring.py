"""Errors, drift and comparisons of predictions, by arithmetic on made-up predictions."""

import pytest

from benchmarks.accuracy.published.activation_bytes import published_activation_bytes
from benchmarks.accuracy.published.blind_test import (
    FITTED_SERIES,
    is_calibration,
)
from benchmarks.accuracy.published.reading import read_cluster_tables
from tests.fidelity.clusters.published import TABLES, rows_of
from twinstream.fidelity.cluster_report import (
    ClusterReport,
    NothingScoredError,
    comparisons,
    required,
    series_errors,
)
from twinstream.fidelity.constants_fit import fitted_rows
from twinstream.fidelity.measured import Predicted
from twinstream.fidelity.scoring import ScoredRow


def off_by(rows, factors):
    """Predictions that are measured times such factors; None is refused."""
    return [
        Predicted(refused="no room" if factor is None else row.why_not)
        if factor is None or row.job is None or row.measured_s is None
        else Predicted(step_s=row.measured_s * factor, fits=factor < 2, activation_bytes=1)
        for row, factor in zip(rows, factors, strict=True)
    ]


def scored(rows, factors, is_seen=lambda row: False):
    told = [row.model_copy(update={"calibrates": is_seen(row)}) for row in rows]
    found = off_by(rows, factors)
    return required(tuple(map(ScoredRow, told, found, map(id, told))))


def test_errors_are_of_rows_that_no_constant_was_fitted_to():
    rows = list(rows_of("vtrain").values())
    found = scored(rows, [1.1, 0.8, 1.5, None], lambda row: row is rows[2])
    (series,) = series_errors(found)
    assert (series["rows"], series["all_rows"], series["not_modelled"]) == (2, 3, 1)
    assert series["mean_error"] == pytest.approx(0.15)
    assert series["bias"] == pytest.approx(-0.05)
    assert series["worst"] == pytest.approx(-0.2)
    assert series["all_mean_error"] == pytest.approx(0.8 / 3)
    assert [each.row.split for each in found] == ["scored", "scored", "calibration", "scored"]


def test_drift_is_the_largest_runs_error_less_the_smallest():
    rows = [row for row in rows_of("dgxc").values() if "llama3.1-8b" in row.row_id]
    (series,) = series_errors(scored(rows, [1.02, 0.97]))
    assert rows[0].num_gpus < rows[1].num_gpus
    assert series["families"] == 1
    assert series["worst_drift"] == pytest.approx(-0.05)
    assert series["mean_drift"] == pytest.approx(0.05)


def test_what_is_suspect_or_not_modelled_is_in_no_error():
    rows = list(rows_of("dgxc").values())
    found = scored(rows, [1.0] * len(rows))
    assert sum(one["all_rows"] for one in series_errors(found)) == sum(row.scored for row in rows)
    assert {each.row.split for each in found if each.row.suspect} == {"not scored"}


def test_scaling_is_speed_per_gpu_against_the_fewest():
    rows = list(rows_of("mlperf_gpt3").values())
    exact = [one for one in comparisons(scored(rows, [1.0] * 3)) if one.num_gpus == 10752]
    # tokens/s per GPU as the table prints them: 541.863 of 741.097
    assert exact[0].measured == pytest.approx(541.863 / 741.097, rel=1e-4)
    assert exact[0].points == pytest.approx(0)
    slower = [1.0, 2.0, 1.0] if rows[1].num_gpus == 10752 else [1.0, 1.0, 2.0]
    half = [one for one in comparisons(scored(rows, slower)) if one.num_gpus == 10752]
    assert half[0].ratio_error == pytest.approx(-0.5)


def test_zero_3_is_held_against_ptd_and_fsdp_against_fewer_gpus():
    rows = list(rows_of("papers").values())
    found = {one.kind: one for one in comparisons(scored(rows, [1.0] * len(rows)))}
    assert found["zero3"].measured == pytest.approx(144 / 153, rel=1e-3)  # TFLOP/s as printed
    assert found["ratio"].measured == pytest.approx(5605 / 5762, rel=1e-3)  # tokens/s as printed


def test_nothing_predicted_is_one_sentence():
    rows = list(rows_of("vtrain").values())
    with pytest.raises(NothingScoredError, match="none of 4 rows can be predicted"):
        scored(rows, [None] * 4)


def test_the_csv_has_every_row_and_the_json_every_series():
    rows = read_cluster_tables(TABLES)
    found = scored(rows, [1.25] * len(rows))
    lines = ClusterReport(found).csv().splitlines()
    assert len(lines) == len(rows) + 1
    assert lines[0].startswith("series,row,split")
    told = ClusterReport(found).json()
    assert {one["series"] for one in told["series"]} == {row.series for row in rows}


def test_activations_are_those_of_the_paper():
    rows = {row.num_gpus: row for row in rows_of("papers").values() if "Korthikanti" in row.series}
    # 22B, selective with sequence parallelism, t = 8, b = 4: 34 s b h L / t
    assert published_activation_bytes(rows[8].job) == 34 * 2048 * 4 * 6144 * 48 // 8
    # 530B, whole layers again, p = 35, v = 3: 2 s b h L (1 + (p - 1) / (p v))
    whole = 2 * 2048 * 20480 * 105 * (1 + 34 / 105)
    assert published_activation_bytes(rows[280].job) == pytest.approx(whole)


def test_the_rule_of_calibration_rows_is_the_same_for_any_part_of_a_table():
    rows = read_cluster_tables(TABLES)
    seen = [row for row in rows if is_calibration(row)]
    assert seen and len(seen) < len(rows) / 2
    for row in seen:
        assert row.scored and row.series in FITTED_SERIES[row.gpu]
        assert all(is_calibration(one) for one in rows if one.family == row.family)
    slow = [row.model_copy(update={"measured_s": 1e3}) for row in seen]
    assert all(is_calibration(row) for row in slow)


def test_no_paper_and_no_mlperf_row_is_fitted_to():
    rows = [*rows_of("papers").values(), *rows_of("mlperf_gpt3").values()]
    assert not any(is_calibration(row) for row in rows)


def test_a_fit_simulates_one_run_of_a_pipeline_and_none_that_takes_minutes():
    rows = list(rows_of("vtrain").values())
    small = next(row for row in rows if row.job.layout.pp == 1)
    pipeline = small.job.layout.model_copy(update={"pp": 8, "dp": small.job.layout.dp // 8})
    job = small.job.model_copy(update={"layout": pipeline})
    changes = {"job": job, "family": "one", "calibrates": True}
    two = [small.model_copy(update={**changes, "num_gpus": n}) for n in (64, 8)]
    assert fitted_rows(two, "A100") == (two[1],)
    long = job.model_copy(update={"global_batch": 10**6})
    deep = long.shape.model_copy(update={"num_layers": 96})
    slow = two[0].model_copy(update={"job": long.model_copy(update={"shape": deep})})
    assert slow.calibrates and fitted_rows([slow], "A100") == ()
