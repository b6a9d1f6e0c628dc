"""What a row of a sweep is known by: all that its result depends on, the sources among it."""

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

import twinstream as ts
from tests.front_door.command_line import call, error_of
from twinstream.hardware_profiles.schema import ExpectedError
from twinstream.study.one_device import DeviceQuery
from twinstream.study.sweep import cells as sources
from twinstream.study.sweep import sweep
from twinstream.study.sweep.cells import run_cell
from twinstream.study.sweep.config import config_of
from twinstream.study.sweep.rows import SUPERSEDED

SWEEP = """
[fixed]
model = "tiny"
machine = "cpu"
seq_len = 64
tokens_per_step = 256
policy = "streaming"
[axes]
device_mem = ["8MiB", "16MiB"]
"""
# What reads a sweep's file (what that amounts to is in the key), and purposes of rooms.
NO_RESULT = {
    "twinstream", "twinstream.fidelity", "twinstream.study", "twinstream.study.values",
    "twinstream.study.sweep", "twinstream.study.sweep.config",
}  # fmt: skip


def test_a_key_changes_with_whatever_the_result_depends_on():
    def key(**changed: object) -> str:
        fixed = {"model": "tiny", "machine": "cpu", "seq_len": 64, **changed}
        (cell,) = config_of({"fixed": fixed}, source="here", folder=Path()).cells()
        return cell.key

    changes = [
        {"model": "tiny-qwen3"}, {"seq_len": 128}, {"tokens_per_step": 256}, {"chunk_tokens": 32},
        {"device_mem": "8MiB"}, {"host_mem": "80MiB"}, {"policy": "streaming"},
        {"effort": "quick"},
        {"machine.hbm_bytes_per_s": 2e10}, {"machine.efficiency.matmul": 0.5},
    ]  # fmt: skip
    keys = {key(), *(key(**change) for change in changes)}
    assert len(keys) == 1 + len(changes)


def test_a_key_changes_with_the_error_that_the_profile_states():
    (cell,) = config_of(
        {"fixed": {"model": "tiny", "machine": "cpu", "seq_len": 64}}, source="", folder=Path()
    ).cells()
    error = ExpectedError(mean=0.1, kind="assumed", source="a test")
    asked = cell.query.request
    machine = asked.machine.model_copy(update={"expected_error": error})
    assert machine.content_hash == asked.machine.content_hash
    assert replace(cell, query=DeviceQuery(replace(asked, machine=machine))).key != cell.key


def test_every_module_that_makes_a_row_is_part_of_its_key():
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from twinstream.study.sweep.cells import run_cell\n"
        "from twinstream.study.sweep.config import config_of\n"
        "fixed = {'model': 'tiny', 'machine': 'cpu', 'seq_len': 64, 'device_mem': '8MiB'}\n"
        "(cell,) = config_of({'fixed': fixed}, source='', folder=Path()).cells()\n"
        "from twinstream.planner.planner import Planner\n"
        "from twinstream.simulator.replay import steady_state\n"
        "assert run_cell(cell, Planner(steady_state))['status'] == 'ok'\n"
        "print(*(name for name in sys.modules if name.split('.')[0] == 'twinstream'))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    hashed = {name.removesuffix(".py").removesuffix(".__init__") for name, _ in sources.sources()}
    assert set(run.stdout.split()) - hashed == NO_RESULT
    assert len(hashed) > 100


def test_a_changed_line_of_the_planner_changes_every_key(tmp_path, monkeypatch):
    packages = ("twinstream.study", "twinstream.fidelity.seed_system")
    for package in (*packages, *sources.PACKAGES):
        shutil.copytree(str(files(package)), tmp_path / package)
    before = sources.sources_hash()
    monkeypatch.setattr(sources, "files", lambda package: tmp_path / package)
    assert sources.sources_hash.__wrapped__() == before
    with (tmp_path / "twinstream.planner" / "bound" / "gaps.py").open("a") as file:
        file.write("_MOST = 3\n")
    assert sources.sources_hash.__wrapped__() != before


@pytest.fixture
def swept(tmp_path) -> Path:
    """A folder with a sweep's file and its rows."""
    path = tmp_path / "two.toml"
    path.write_text(SWEEP)
    told = call("sweep", path, "-o", tmp_path / "rows", "--jobs", 1, "--json").json()
    assert (told["num_new"], told["num_superseded"]) == (2, 0)
    return tmp_path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_of_other_sources_are_made_again_and_kept_aside(swept, monkeypatch):
    old = rows_of(swept / "rows" / "rows.csv")
    monkeypatch.setattr("twinstream.study.sweep.cells.sources_hash", lambda: "other sources")
    monkeypatch.setattr(sweep, "on_cores", lambda cells, jobs: map(sweep_row, cells))
    told = json.loads(call("sweep", swept / "two.toml", "-o", swept / "rows", "--json").out)
    assert (told["num_new"], told["num_superseded"]) == (2, 2)
    new = rows_of(swept / "rows" / "rows.csv")
    assert [row["device_mem"] for row in new] == ["8MiB", "16MiB"]
    assert {row["key"] for row in new}.isdisjoint(row["key"] for row in old)
    assert rows_of(swept / "rows" / SUPERSEDED) == old


@pytest.mark.parametrize(
    ("before", "after"), [(",ok,", ",fine,"), (",ok,", ",ok"), (",ok,,,", ",ok,x,")]
)
def test_a_row_that_was_damaged_is_named(swept, before, after):
    path = swept / "rows" / "rows.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1] + lines[2].replace(before, after, 1))
    assert "line 3 of" in error_of("sweep", swept / "two.toml", "-o", swept / "rows")


def sweep_row(cell):
    """A row made in this process, where sources can be pretended to be others."""
    return {"key": cell.key, **cell.values, "status": "refused", "reason": "pretended"}


def test_rows_of_values_no_longer_asked_for_stay(swept):
    fewer = swept / "fewer.toml"
    fewer.write_text(SWEEP.replace('"8MiB", ', ""))
    told = call("sweep", fewer, "-o", swept / "rows", "--json").json()
    assert (told["num_new"], told["num_superseded"]) == (0, 0)
    assert len(rows_of(swept / "rows" / "rows.csv")) == 2


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999", "a:b"])
def test_an_address_without_a_ray_cluster_is_refused_at_once(address, swept):
    pytest.importorskip("ray", reason="Ray is not installed")
    said = error_of("sweep", swept / "two.toml", "-o", swept / "new", "--ray", address)
    assert f"no Ray cluster at '{address}'" in said


def test_where_no_cell_can_be_planned_the_reason_is_told(tmp_path):
    path = tmp_path / "odd.toml"
    path.write_text(SWEEP.replace("[axes]", "chunk_tokens = 48\n[axes]"))
    outcome = call("sweep", path, "-o", tmp_path / "rows", "--jobs", 1)
    assert outcome.code == 2
    assert "2 refused" in outcome.out
    assert "no cell could be planned; the first: " in outcome.err
    assert "48" in outcome.err.partition("the first: ")[2]


def test_a_row_of_a_gpu_has_the_kernels_of_plan(tmp_path):
    asked = {"model": "tiny", "machine": "h100", "seq_len": 64, "tokens_per_step": 256}
    (cell,) = config_of({"fixed": asked}, source="here", folder=tmp_path).cells()
    options = ("plan", "--model", "tiny", "--machine", "h100", "--seq-len", 64)
    planned = call(*options, "--tokens-per-step", 256, "--json").json()
    assert cell.query.request.recipe.implementations.model_dump() == planned["kernels"]
    assert planned["kernels"]["vector"] == "triton"
    assert run_cell(cell, ts.Planner(ts.steady_state))["tokens_per_s"] == planned["tokens_per_s"]


def test_a_worker_with_other_sources_is_refused(swept, monkeypatch):
    def others(cells, jobs):
        yield from ({**sweep_row(cell), "key": "of another version"} for cell in cells)

    monkeypatch.setattr(sweep, "on_cores", others)
    assert "other sources" in error_of("sweep", swept / "two.toml", "-o", swept / "new")
    assert rows_of(swept / "new" / "rows.csv") == []
