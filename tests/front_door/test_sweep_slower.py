"""Cells of a sweep that are slower with more, and what is done about them."""

import json
from dataclasses import replace

import pytest

from tests.front_door.command_line import call
from tests.front_door.test_sweep import FIXED, PLANNER, rows_of, write_rows
from twinstream.study.answer import StudyError
from twinstream.study.sweep import sweep
from twinstream.study.sweep.cells import run_cell
from twinstream.study.sweep.config import config_of
from twinstream.study.sweep.sweep import slower_with_more

MOST = ["16MiB", "80MiB", "4000000000.0"]


def cells_of(axes, folder):
    fixed = {"model": "tiny", "machine": "cpu", "seq_len": 64}
    return config_of({"fixed": fixed, "axes": axes}, source="a test", folder=folder).cells()


def planned_row(tokens_per_s, rounds=2, plan_of=""):
    cut = {"rounds_per_step": str(rounds), "chunks_per_round": "1", "planned_chunk_tokens": "64"}
    return {"status": "ok", "plan_of": plan_of, "tokens_per_s": str(tokens_per_s), **cut}


def test_cells_slower_than_one_with_less_are_told(tmp_path):
    """More memory or a faster link should not be slower; another policy may be."""
    axes = {
        "policy": ["streaming", "resident"],
        "device_mem": ["8MiB", "16MiB"],
        "machine.pcie_h2d_bytes_per_s": [1e9, 4e9],
    }
    cells = cells_of(axes, tmp_path)
    refused = {"status": "infeasible", "tokens_per_s": ""}
    rows = [planned_row(speed) for speed in (100, 120, 99.95, 119, 90, 0, 50, 95)]
    rows[5] = refused
    found = slower_with_more(cells, rows)
    assert [(cells.index(one.cell), cells.index(one.than)) for one in found] == [(3, 1), (6, 4)]
    assert [one.by for one in found] == pytest.approx([120 / 119 - 1, 90 / 50 - 1])


def simulated_sweep(monkeypatch, folder, speed, **settings):
    """A sweep of `optimal` over memory and link; of each cell the speed of a plan for another."""
    axes = {"device_mem": ["8MiB", "16MiB"], "machine.pcie_h2d_bytes_per_s": [1e9, 4e9]}
    fixed = {"model": "tiny", "machine": "cpu", "seq_len": 64}
    config = config_of({"fixed": fixed, "axes": axes}, source="a test", folder=folder)
    number = {cell.key: index for index, cell in enumerate(config.cells())}

    def made(cell):
        mine, other = (number[c.key] for c in (cell, cell.beside or cell))
        if (status := speed(mine, mine)) is None or (found := speed(mine, other)) is None:
            return {"key": cell.key, **cell.values, "status": "bug", "reason": "fell over"}
        better = found > status
        figures = dict.fromkeys(("model_tflop_per_s", "mfu", "hfu", "step_time_s"), 1.0)
        plan_of = {"plan_of": cell.beside.key} if better else {}
        row = planned_row(max(found, status)) | {"tokens_per_s": max(found, status)} | plan_of
        return {"key": cell.key, **cell.values, **figures, **row}

    monkeypatch.setattr(sweep, "on_cores", lambda cells, jobs: map(made, cells))
    return sweep.run_sweep(config, sweep.SweepSettings(folder / "rows", **settings))


def test_a_plan_is_handed_on_until_no_cell_is_slower(monkeypatch, tmp_path):
    """The plan of the first is faster with the faster link, and then the best for the last, too."""
    speeds = {
        (0, 0): 100.0,
        (1, 1): 90.0,
        (2, 2): 101.0,
        (3, 3): 102.0,
        (1, 0): 115.0,
        (3, 0): 116.0,
    }
    swept = simulated_sweep(monkeypatch, tmp_path, lambda *pair: speeds.get(pair, 80.0))
    assert [float(row["tokens_per_s"]) for row in swept.rows] == [100.0, 115.0, 101.0, 116.0]
    assert (swept.num_new, swept.num_mended, swept.slower) == (4, 2, ())
    again = simulated_sweep(monkeypatch, tmp_path, lambda *pair: pytest.fail("all is there"))
    assert (again.rows, again.num_new, again.num_mended) == (swept.rows, 0, 0)


def test_a_plan_that_does_not_help_is_tried_once_and_the_cell_is_told(monkeypatch, tmp_path):
    swept = simulated_sweep(monkeypatch, tmp_path, lambda mine, other: 100.0 - 10.0 * mine)
    assert (swept.num_mended, len(swept.slower)) == (0, 3)
    again = simulated_sweep(monkeypatch, tmp_path, lambda *pair: pytest.fail("it was tried"))
    assert (again.rows, again.slower) == (swept.rows, swept.slower)


def test_the_page_comes_before_cells_are_planned_again_which_are_counted_and_kept(
    monkeypatch, tmp_path
):
    """Ctrl-C after the second of three: the first two are not planned again, and one is faster."""
    told = []

    def speed(mine, other):
        planned.append((mine, other))
        return 100.0 - 10.0 * mine if mine == other or mine > 1 else 101.0

    def stop():
        told.append("row")
        if len(told) == 7:
            raise KeyboardInterrupt

    def page():
        return "70" in (tmp_path / "rows" / "sweep.html").read_text()

    planned = []
    with pytest.raises(KeyboardInterrupt):
        simulated_sweep(
            monkeypatch, tmp_path, speed, on_again=lambda number: told.append((number, page())),
            on_row=stop,
        )  # fmt: skip
    assert told == ["row"] * 4 + [(3, True)] + ["row"] * 2
    planned.clear()
    swept = simulated_sweep(monkeypatch, tmp_path, speed)
    assert [float(row["tokens_per_s"]) for row in swept.rows] == [100.0, 101.0, 80.0, 70.0]
    assert planned == [(3, 3), (3, 0)]  # alone and beside the first, as `made` asks


def test_a_bug_beside_another_cell_is_not_hidden_and_no_row_is_lost(monkeypatch, tmp_path):
    def speed(mine, other):
        return 100.0 - 10.0 * mine if mine == other else None

    with pytest.raises(StudyError, match="fell over"):
        simulated_sweep(monkeypatch, tmp_path, speed)
    assert [row["status"] for row in rows_of(tmp_path / "rows")] == ["ok"] * 4


def test_a_row_says_whose_plan_it_has(tmp_path):
    """With a little more memory `streaming` alone is slower by 2 %."""
    links = {f"machine.pcie_{way}_bytes_per_s": [5e7] for way in ("h2d", "d2h", "duplex")}
    memory = {"device_mem": [round(mib * 2**20) for mib in (6.2, 6.8)], "host_mem": ["20MiB"]}
    more = {"policy": ["streaming"], "tokens_per_step": [256]}
    tight, roomy = cells_of(links | memory | more, tmp_path)
    alone, of_less = run_cell(roomy, PLANNER), run_cell(tight, PLANNER)
    found = run_cell(replace(roomy, beside=tight), PLANNER)
    assert alone["tokens_per_s"] < 0.99 * found["tokens_per_s"]
    assert found["tokens_per_s"] == of_less["tokens_per_s"]
    whose = f"device_mem {tight.values['device_mem']}"
    assert found["reason"] == f"the plan of {whose} is faster than its own"
    assert found["plan_of"] == tight.key
    assert run_cell(replace(tight, beside=roomy), PLANNER).get("plan_of") is None


def test_cells_of_optimal_slower_than_one_with_less_are_planned_again(tmp_path):
    """As if the search with more memory had found less: its rows have figures of poor plans."""
    file, folder = tmp_path / "four.toml", tmp_path / "four"
    axes = '[axes]\ndevice_mem = ["6MiB", "6.001MiB"]\nhost_mem = ["60MiB", "80MiB"]\n'
    file.write_text(FIXED.replace("streaming", "optimal") + axes)
    assert call("sweep", file, "-o", folder, "--jobs", 2).code == 0
    good = rows_of(folder)
    assert sorted(row["device_mem"] for row in good) == ["6.001MiB", "6.001MiB", "6MiB", "6MiB"]
    poor = [row | {"tokens_per_s": str(float(row["tokens_per_s"]) / 2)} for row in good]
    more = [row["device_mem"] == "6.001MiB" for row in good]
    write_rows(
        folder, [b if is_more else a for a, b, is_more in zip(good, poor, more, strict=True)]
    )
    said = call("sweep", file, "-o", folder, "--jobs", 2)
    page = folder / "sweep.html"
    assert f"{page} has all cells; 2 cells are slower than one with less" in said.err
    speeds = {row["key"]: row["tokens_per_s"] for row in rows_of(folder)}
    assert speeds == {row["key"]: row["tokens_per_s"] for row in good}
    told = json.loads(call("sweep", file, "-o", folder, "--json").out)
    assert (told["num_new"], told["num_mended"], told["slower_with_more"]) == (0, 0, [])
