"""`twinstream calibrate`: tables and timelines in, a fitted profile out, and what it refuses."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.front_door.command_line import TINY_STEP, call, error_of
from twinstream.commands.runs import calibrate as calibrating
from twinstream.fidelity.seed_system.cells import cell_of
from twinstream.fidelity.timeline_fit import fit_timelines
from twinstream.hardware_profiles.calibration.parameters import (
    applied,
    declared_parameters,
    prepared,
)
from twinstream.hardware_profiles.calibration.timelines import works_of
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.measured_table import read_measured

HEADER = "machine,model,seq_len,host_mem_gib,dev_mem_gib,tokens_per_s,status,rounds_per_step\n"
ROWS = ((512, 16, 16), (512, 40, 78), (32768, 16, 16))
TRUTH = {"sustained": 0.9, "attention_forward": 1.3}


def write_table(path: Path, speeds: tuple[float, ...]) -> Path:
    lines = [
        f"H100,1B,{seq},{host},{device},{speed},ok,2\n"
        for (seq, host, device), speed in zip(ROWS, speeds, strict=True)
    ]
    path.write_text(HEADER + "".join(lines) + "H100,1B,512,1,1,,failed,\n")
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Three runs of 1B as a machine with other constants would have them."""
    path = tmp_path_factory.mktemp("table") / "runs.csv"
    base = prepared(load_machine("h100_datasheet"))
    speeds = []
    for row in read_measured(write_table(path, (1.0, 1.0, 1.0)))[:3]:
        cell = cell_of(row)
        known = declared_parameters(base, works_of(cell.timed))
        truth = applied(base, known, [TRUTH.get(p.name, 1.0) for p in known], "the truth")
        speeds.append(cell.tokens_per_step / cell.step_s(truth))
    return write_table(path, tuple(speeds))


def test_a_table_becomes_a_profile_that_says_where_it_is_from(table, tmp_path):
    output = tmp_path / "mine.toml"
    found = call(
        "calibrate", "--base", "h100_datasheet", "--measured", table, "-o", output, "--json"
    ).json()
    by_name = {p["name"]: p for p in found["parameters"]}
    ratio = by_name["sustained"]["value"] / by_name["sustained"]["prior"]
    assert math.log(ratio / TRUTH["sustained"]) == pytest.approx(0.0, abs=0.05)
    assert found["mean_error"] < 0.01
    assert len(found["observations"]) == 3
    assert not by_name["launch_latency"]["identified"]
    machine = load_machine(output)
    assert machine.name == "mine"
    assert machine.efficiency["sustained"].max == pytest.approx(by_name["sustained"]["value"])
    assert "fitted to 3 measured times of runs.csv on 20" in machine.efficiency["sustained"].source
    stated = machine.expected_error
    left_out = [abs(o["left_out_s"] / o["measured_s"] - 1.0) for o in found["observations"]]
    assert stated is not None and stated.kind == "left_out"
    assert stated.mean == pytest.approx(max(1e-4, sum(left_out) / 3))
    assert stated.worst == pytest.approx(max(1e-4, *left_out))


def test_without_anything_measured_it_says_what_to_give():
    assert "either --measured TABLE.csv, or --schedule" in error_of("calibrate", "--base", "h100")


def test_a_table_and_a_timeline_together_are_refused(table):
    message = error_of("calibrate", "--base", "h100", "--measured", table, "--schedule", table)
    assert "either --measured TABLE.csv, or --schedule" in message


def test_files_that_are_not_what_they_should_be_are_named(table, tmp_path):
    assert "cannot read" in error_of("calibrate", "--base", "h100", "--measured", tmp_path / "no")
    cells = tmp_path / "cells.csv"
    cells.write_text("seq_len,host_mem_gib,dev_mem_gib\n512,1,1\n")
    message = error_of("calibrate", "--base", "h100", "--measured", table, "--cells", cells)
    assert "no successful row" in message
    assert "unknown machine 'h1'" in error_of("calibrate", "--base", "h1", "--measured", table)


def test_a_single_row_is_too_little(table):
    message = error_of(
        "calibrate", "--base", "h100", "--measured", table, "--only", "seq_len=32768"
    )
    assert "calibrate nothing; give at least 2" in message


def test_a_base_of_another_kind_of_machine_is_refused(table):
    told = error_of("calibrate", "--base", "cpu", "--measured", table)
    assert "'cpu' is no profile of the table's machine" in told


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    """What `calibrate` is given of a run of ours, whose matmuls were slower than the base has."""
    folder = tmp_path_factory.mktemp("run")
    plan, timeline, slow = (folder / name for name in ("plan.json", "run.json", "slow.toml"))
    slow.write_text('base = "cpu"\nefficiency.matmul = 0.2\n')
    assert not call("plan", *TINY_STEP, "--machine", "cpu", "-o", plan).code
    assert not call("simulate", plan, "--machine", slow, "-o", timeline).code
    as_if = json.loads(timeline.read_text())
    as_if["provenance"]["kind"] = "measured"
    timeline.write_text(json.dumps(as_if))
    return "calibrate", "--base", "cpu", "--schedule", plan, "--timeline", timeline


def test_a_run_of_ones_own_calibrates_too(own_run, tmp_path):
    found = call(*own_run, "-o", tmp_path / "me.toml", "--json").json()
    by_name = {p["name"]: p for p in found["parameters"]}
    assert by_name["matmul"]["identified"]
    assert by_name["matmul"]["value"] == pytest.approx(0.2, rel=0.05)
    assert found["mean_error"] < 0.01
    assert load_machine(tmp_path / "me.toml").efficiency["matmul"].kind == "fitted"


def test_a_fit_worse_than_its_base_is_only_written_anyway(own_run, tmp_path, monkeypatch):
    def worse(*given):
        found = fit_timelines(*given)
        off = [replace(one, predicted_s=one.before_s / 1.8) for one in found.observations]
        return replace(found, observations=tuple(off))

    monkeypatch.setattr(calibrating, "fit_timelines", worse)
    output = tmp_path / "me.toml"
    refused = call(*own_run, "-o", output)
    assert refused.code == 2 and not output.exists()
    assert "nothing is written: keep the base, or write the fit with --anyway" in refused.err
    assert not call(*own_run, "-o", output, "--anyway").code
    assert output.exists()


WRONG_TABLES = {
    "missing.csv": ("machine,model,seq_len\nH100,1B,512\n", "no column host_mem_gib"),
    "empty.csv": ("", "is empty"),
    "nan.csv": (HEADER + "H100,1B,512,16,16,nan,ok,2\n", "line 2, tokens_per_s"),
    "folder": (None, "Is a directory"),
}


@pytest.mark.parametrize("name", WRONG_TABLES)
@pytest.mark.parametrize("command", [("calibrate", "--base"), ("validate", "--machine")])
def test_what_is_no_table_is_one_message(command, name, tmp_path):
    text, told = WRONG_TABLES[name]
    path = tmp_path / name
    path.mkdir() if text is None else path.write_text(text)
    message = error_of(*command, "h100", "--measured", path)
    assert told in message and name in message
    assert message.count("\n") == 1
