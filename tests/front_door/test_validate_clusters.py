"""`validate --cluster` and `calibrate --steps`, on a few rows of each published table."""

import csv
import json
from pathlib import Path

import pytest

from benchmarks.accuracy.published.reading import read_cluster_table
from benchmarks.accuracy.published.writing import measured_steps_csv
from tests.front_door.command_line import call, error_of
from twinstream.fidelity.cluster_report import Bars, score_steps
from twinstream.fidelity.cluster_rows import read_measured_steps
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.measures.published_steps import StepKind, nearest

FEW = Path(__file__).parents[1] / "data" / "clusters"
ONE_STAGE = ("3B_1_64_1_8", "3B_2_32_1_8")


def steps_of(name, path):
    """Rows of a published table, in the form that is read."""
    path.write_text(measured_steps_csv(read_cluster_table(FEW / f"{name}_few.csv")))
    return path


@pytest.fixture
def small(tmp_path):
    """Rows of vTrain's table without pipelines: what is simulated in no time."""
    path = steps_of("vtrain", tmp_path / "small.csv")
    head, *lines = path.read_text().splitlines()
    kept = [line for line in lines if line.startswith(ONE_STAGE)]
    path.write_text("\n".join([head, *kept]) + "\n")
    return path


def test_rows_are_predicted_and_told_by_series(small, tmp_path):
    out = tmp_path / "rows.csv"
    mosaic = steps_of("mosaicml", tmp_path / "mosaic.csv")
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


def test_published_beside_predicted_is_a_page_with_bars(small, tmp_path):
    page = tmp_path / "page.html"
    printed = call("validate", "--cluster", small, "--jobs", 1, "--html", page, "--json")
    assert printed.code == 0, printed.err
    text = page.read_text()
    data = text.split('data-figure="figure0">')[1].split("</script>")[0]
    equal, dots = json.loads(data.replace("<\\/", "</"))["data"]
    assert equal["name"] == "equal" and dots["name"] == "A100"
    rows = printed.json()["rows"]
    assert len(dots["text"]) == len(rows) == 2
    for row, said, bar in zip(rows, dots["text"], dots["error_y"]["array"], strict=True):
        assert row["row"] in said and f"({1 / (1 + row['error']) - 1:+.1%})" in said
        assert 0 < bar < 0.5 * 1e5  # of tokens/s a GPU, by the steps near it
    assert "within two bars" in text and "vTrain multi" in text


def test_a_bar_leaves_out_the_row_itself(small):
    (each, *_) = rows = score_steps(read_measured_steps([small]), jobs=1)
    with_it = nearest(StepKind.of(each.row.job), each.row.nodes(None)[0])
    assert any(step.kind == StepKind.of(each.row.job) for step in with_it.steps)
    bar = Bars(rows).bar(each)
    assert bar is not None and bar > 0 and bar != with_it.bar


def test_a_column_that_is_missing_is_named(small):
    small.write_text(small.read_text().replace("seq_len", "other", 1))
    told = error_of("validate", "--cluster", small)
    assert "seq_len" in told and "lacks" in told


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
