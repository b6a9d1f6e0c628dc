"""`validate --cluster` and `calibrate --steps`, on a few rows of each published table."""

import csv
from pathlib import Path

import pytest

from tests.front_door.command_line import call, error_of
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of

FEW = Path(__file__).parents[1] / "data" / "clusters"
TABLES = sorted(FEW.glob("*_few.csv"))
ONE_STAGE = ("3B_1_64_1_8", "3B_2_32_1_8")


@pytest.fixture
def small(tmp_path):
    """Rows of vTrain's table without pipelines: what is simulated in no time."""
    head, *lines = (FEW / "vtrain_few.csv").read_text().splitlines()
    kept = [line for line in lines if any(name in line for name in ONE_STAGE)]
    path = tmp_path / "small.csv"
    path.write_text("\n".join([head, *kept]) + "\n")
    return path


def test_rows_are_predicted_and_told_by_series(small, tmp_path):
    out = tmp_path / "rows.csv"
    mosaic = FEW / "mosaicml_few.csv"
    printed = call("validate", "--cluster", small, mosaic, "--jobs", 1, "-o", out)
    assert printed.code == 0, printed.err
    assert "3B_2_32_1_8" in printed.out and "vTrain multi" in printed.out
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == 2 + 5
    for row in rows:
        if row["split"] != "not scored":
            assert abs(float(row["error"])) < 0.5, row
            assert row["fits"] == "True"
    told = call("validate", "--cluster", small, "--jobs", 1, "--json").json()
    assert told["series"][0]["all_rows"] == 2


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_a_column_that_is_missing_is_named(table, tmp_path):
    head, *lines = table.read_text().splitlines()
    name = "measured_ms" if "vtrain" in table.stem else "seq_len"
    broken = tmp_path / "broken.csv"
    broken.write_text("\n".join([head.replace(name, "other"), *lines]))
    told = error_of("validate", "--cluster", broken)
    assert name in told and "lacks" in told


def test_what_goes_with_a_cluster_and_what_does_not(small):
    assert "--cluster goes with" in error_of("validate", "--cluster", small, "--machine", "h100")
    assert "--measured" in error_of("validate", "--machine", "h100")
    assert "--measured" in error_of("validate")
    assert "cannot read" in error_of("validate", "--cluster", "nowhere.csv")


def test_fitted_constants_become_a_cluster_and_its_node(small, tmp_path):
    out = tmp_path / "mine.toml"
    table = tmp_path / "many.csv"
    head, *lines = small.read_text().splitlines()
    table.write_text("\n".join([head, *lines * 8]) + "\n")
    command = ("calibrate", "--steps", table, "--cluster", "a100_vtrain", "--only", "gpu=A100")
    printed = call(*command, "-o", out)
    assert printed.code == 0, printed.err
    assert "sustained" in printed.out
    cluster = load_cluster(out)
    assert cluster.compute_lost.kind == "fitted"
    assert machine_of(cluster).efficiency["sustained"].kind == "fitted"
    assert "many.csv" in cluster.compute_lost.source


def test_steps_need_a_cluster_and_a_gpu(small):
    assert "--only gpu=NAME" in error_of("calibrate", "--steps", small, "--cluster", "a100_dgx")
    told = error_of("calibrate", "--steps", small, "--cluster", "h100_dgx", "--only", "gpu=H100")
    assert "no row of these tables is for calibrating H100" in told
