"""Sweeps: all combinations, each once, whatever happens meanwhile."""

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import twinstream as ts
from tests.front_door.command_line import call, error_of
from tests.helpers.sleeping_work import nap
from tests.helpers.waiting import ended, is_running
from twinstream.schedule.files import only_writer
from twinstream.schedule.worker_processes import in_processes
from twinstream.study.sweep.config import load_config
from twinstream.study.sweep.grids import curves, grids, metrics_of
from twinstream.study.sweep.rows import RowFile, columns_of

FIXED = """
[fixed]
model = "tiny"
machine = "cpu"
seq_len = 64
tokens_per_step = 256
policy = "streaming"
"""
AXES = """
[axes]
device_mem = ["1MiB", "6MiB", "8MiB", "16MiB"]
host_mem = ["40MiB", "80MiB"]
"machine.pcie_h2d_bytes_per_s" = [1e9, 4e9]
"""
NUM_CELLS = 16
PLANNER = ts.Planner(ts.steady_state)
MAIN = "from twinstream.cli import main; main()"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "small.toml"
    path.write_text(FIXED + AXES)
    return path


@pytest.fixture(scope="module")
def swept(config) -> Path:
    """The folder of a sweep that ran through."""
    folder = config.parent / "whole"
    outcome = call("sweep", config, "-o", folder, "--jobs", 2)
    assert outcome.code == 0, outcome.err
    assert f"{NUM_CELLS} cells" in outcome.out
    return folder


def write_rows(folder, rows):
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def rows_of(folder):
    with (folder / "rows.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def without_times(rows):
    return sorted((sorted(row.items() - {("seconds", row["seconds"])}) for row in rows), key=str)


def test_every_combination_has_one_row(swept):
    rows = rows_of(swept)
    asked = {(r["device_mem"], r["host_mem"], r["machine.pcie_h2d_bytes_per_s"]) for r in rows}
    assert len(rows) == len(asked) == len({row["key"] for row in rows}) == NUM_CELLS


def test_a_row_says_what_plan_says(swept):
    row = next(
        r for r in rows_of(swept)
        if (r["device_mem"], r["host_mem"], r["machine.pcie_h2d_bytes_per_s"])
        == ("8MiB", "80MiB", "4000000000.0")
    )  # fmt: skip
    machine = swept / "mine.toml"
    link = "pcie_h2d_bytes_per_s = 4e9\npcie_duplex_bytes_per_s = 9e9\n"  # 12 of 16 GB/s
    machine.write_text(f'base = "cpu"\n{link}')
    planned = call(
        "plan", "--model", "tiny", "--machine", machine, "--seq-len", 64, "--tokens-per-step", 256,
        "--device-mem", "8MiB", "--host-mem", "80MiB", "--policy", "streaming", "--json",
    ).json()  # fmt: skip
    assert row["status"] == "ok"
    for name in ("tokens_per_s", "mfu", "hfu", "gap", "recompute_fraction", "h2d_bytes"):
        assert float(row[name]) == pytest.approx(planned[name])
    tflops = float(row["mfu"]) * 1e-12 * machine_peak()
    assert float(row["model_tflop_per_s"]) == pytest.approx(tflops)


def machine_peak() -> float:
    listed = call("machines", "--json").json()["machines"]
    cpu = next(machine for machine in listed if machine["name"] == "cpu")
    return cpu["peak_fp32_flop_per_s"]["value"]


def test_a_cell_that_does_not_fit_says_what_would(swept):
    row = next(r for r in rows_of(swept) if r["device_mem"] == "1MiB")
    assert row["status"] == "infeasible"
    assert "--device-mem" in row["reason"]
    assert int(row["enough_device_bytes"]) > 2**20
    assert row["less_may_do"] == str("Less may do" in row["reason"])
    assert row["tokens_per_s"] == ""


def test_a_sweep_that_is_through_runs_nothing_again(swept, config):
    before = (swept / "rows.csv").read_bytes()
    told = call("sweep", config, "-o", swept, "--json").json()
    assert told["num_new"] == 0
    assert told["num_cells"]["ok"] + told["num_cells"]["infeasible"] == NUM_CELLS
    assert (swept / "rows.csv").read_bytes() == before


def test_a_killed_sweep_continues_and_nothing_is_lost_or_doubled(swept, config, tmp_path):
    command = [sys.executable, "-c", MAIN, "sweep", config, "-o", tmp_path, "--jobs", "2"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = tmp_path / "rows.csv"
    while not rows.exists() or rows.read_bytes().count(b"\n") < 3:
        assert running.poll() is None, "it was through before it could be killed"
        time.sleep(0.005)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    workers = [int(pid) for pid in children.read_text().split()]
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert ended(workers)
    there = rows_of(tmp_path)
    assert 0 < len(there) < NUM_CELLS
    with rows.open("a") as file:  # as if the kill had cut a line off
        file.write("0123abcd,tiny,cp")
    told = call("sweep", config, "-o", tmp_path, "--jobs", 2, "--json").json()
    assert told["num_new"] == NUM_CELLS - len(there)
    assert rows_of(tmp_path)[: len(there)] == there
    assert without_times(rows_of(tmp_path)) == without_times(rows_of(swept))


def test_busy_workers_end_with_the_process_that_started_them(tmp_path):
    """Each is inside a cell when the kill comes, so that no closed pipe can tell it."""
    script = (
        "from tests.helpers.sleeping_work import sleep_for_ever as work\n"
        "from twinstream.schedule.worker_processes import in_processes\n"
        f"list(in_processes(work, [{str(tmp_path)!r}] * 2, 2))"
    )
    root = Path(__file__).parents[2]
    running = subprocess.Popen([sys.executable, "-c", script], cwd=root)
    while len(list(tmp_path.iterdir())) < 2:
        assert running.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    workers = [int(path.name) for path in tmp_path.iterdir()]
    try:
        assert ended(workers)
    finally:
        for pid in workers:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_worker_without_more_work_ends_quietly_while_others_go_on(capfd):
    found = [seconds for seconds, _ in in_processes(nap, [1.5, 0.0, 0.0], 2)]
    assert sorted(found) == [0.0, 0.0, 1.5]
    assert capfd.readouterr().err == ""


def test_the_seed_systems_policy_is_swept_like_any_other(tmp_path):
    path = tmp_path / "seed.toml"
    path.write_text(
        "[fixed]\nmodel = '1b'\nmachine = 'h100'\nseq_len = 16384\nhost_mem = '60GiB'\n"
        "tokens_per_step = 32768\npolicy = 'ml_dataflow'\n[axes]\ndevice_mem = ['4GiB', '24GiB']\n"
    )
    told = call("sweep", path, "-o", tmp_path, "--jobs", 1, "--json").json()
    assert told["num_cells"] == {"ok": 1, "infeasible": 0, "refused": 1, "bug": 0}
    fits = next(row for row in rows_of(tmp_path) if row["status"] == "ok")
    assert fits["planned_chunk_tokens"] == "16384"


@pytest.mark.filterwarnings("ignore")  # of Ray's own
def test_a_ray_cluster_makes_the_same_rows(swept, config, tmp_path):
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    some = [*(swept / "rows.csv").read_text().splitlines(keepends=True)][:5]
    (tmp_path / "rows.csv").write_text("".join(some))
    try:
        told = call("sweep", config, "-o", tmp_path, "--ray", cluster.address, "--json").json()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert told["num_new"] == NUM_CELLS - 4
    assert without_times(rows_of(tmp_path)) == without_times(rows_of(swept))


def test_rows_of_other_axes_are_refused(swept, config):
    other = config.with_name("other.toml")
    other.write_text(FIXED + "[axes]\nhost_mem = ['40MiB']\n")
    assert "other axes" in error_of("sweep", other, "-o", swept)


def test_values_that_amount_to_the_same_share_a_row(config, tmp_path):
    twice = config.with_name("twice.toml")
    twice.write_text(FIXED + "[axes]\ndevice_mem = ['8MiB', '8192KiB']\n")
    told = call("sweep", twice, "-o", tmp_path, "--jobs", 1, "--json").json()
    assert (told["num_new"], told["num_cells"]["ok"]) == (1, 2)
    assert len(rows_of(tmp_path)) == 1
    page = (tmp_path / "sweep.html").read_text()
    assert "<td>8MiB</td>" in page
    assert "<td>8192KiB</td>" in page


@pytest.mark.parametrize("name", ["there", "there/inside"])
def test_a_file_where_the_folder_should_be_is_called_a_file(name, config, tmp_path):
    (tmp_path / "there").write_text("mine")
    assert "a file of that name" in error_of("sweep", config, "-o", tmp_path / name)


def test_two_sweeps_do_not_write_into_one_folder(config, tmp_path):
    with only_writer(tmp_path):
        assert f"process {os.getpid()} is writing into" in error_of("sweep", config, "-o", tmp_path)


def test_a_cell_that_fell_over_is_kept_and_ends_in_an_error(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text(FIXED)
    config = load_config(path)
    (cell,) = config.cells()
    folder = tmp_path / "rows"
    folder.mkdir()
    RowFile(folder / "rows.csv", columns_of(config.names)).append(
        {"key": cell.key, **cell.values, "status": "bug", "reason": "AssertionError: oh"}
    )
    outcome = call("sweep", path, "-o", folder)
    assert outcome.code == 1
    assert "bug in twinstream" in outcome.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[fixed]\nmodle = 'tiny'", "did you mean 'model'?"),
        ("[fixed]\nmodel = 'tiny'\nmachine = 'cpu'", "seq_len is missing"),
        ("[axes]\nseq_len = 64", "needs a list"),
        ("[axes]\nseq_len = [0]", "positive whole number"),
        ("[axes]\nseq_len = [64, 64]", "twice"),
        ("[fixed]\nseq_len = 64\n[axes]\nseq_len = [64]", "leave one out"),
        ("[fixed]\npolicy = 'greedy'", "known: optimal"),
        ("[fixed]\neffort = 'most'", "known: quick, normal"),
        ("[fixed]\ndevice_mem = 1.5", "needs a size"),
        (
            "[axes]\ndevice_mem = ['8MiB', '24XiB']",
            "axes.device_mem is no size: cannot read",
        ),
        ("[fixed]\nhost_mem = '-4GiB'", "wrong.toml: fixed.host_mem is no size: cannot read"),
        (FIXED + "[axes]\ndevice_mem = [6, 8]", "'6' is so many bytes; write 6GiB"),
        ("[axes]\nhost_mem = [0]", "wrong.toml: axes.host_mem needs a size of at least a byte"),
        ("[fixed]\nmachine.hbm_bytes_per_s = 'fast'", "needs a number"),
        ("[axis]\nseq_len = [64]", "unknown 'axis'"),
        ("[fixed", "not valid TOML"),
        (FIXED.replace("tiny", "9b"), "wrong.toml: unknown model '9b'"),
        (
            FIXED.replace("model", "#") + "[axes]\nmodel = ['tiny', '9b']",
            "at model = '9b': unknown",
        ),
        (FIXED + "machine.hbm_speed = 1e9", "hbm_bytes_per_s"),
    ],
)
def test_a_config_that_is_wrong_gets_one_message_that_helps(text, said, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(text.replace("machine.", '"machine.').replace("_per_s =", '_per_s" =')
                    .replace("hbm_speed =", 'hbm_speed" ='))  # fmt: skip
    assert said in error_of("sweep", path, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_grids_and_curves_hold_every_row_in_its_place(swept, config):
    wanted, rows = load_config(config), rows_of(swept)
    found = grids(wanted, rows)
    assert [grid.title for grid in found] == [
        "PCIe H2D 1 GB/s", "PCIe H2D 4 GB/s",
    ]  # fmt: skip
    for grid, rate in zip(found, ("1000000000.0", "4000000000.0"), strict=True):
        assert (grid.x_labels[-1], grid.y_labels) == ("16MiB", ("40MiB", "80MiB"))
        for row in (r for r in rows if r["machine.pcie_h2d_bytes_per_s"] == rate):
            y, x = grid.y_labels.index(row["host_mem"]), grid.x_labels.index(row["device_mem"])
            for metric in metrics_of(wanted):
                level = grid.levels[metric.column][y, x]
                if row["status"] == "ok":
                    assert level == pytest.approx(float(row[metric.column]) * metric.scale)
                else:
                    assert math.isnan(level)
                    assert row["reason"] in grid.reasons[y][x]
    (first, _) = curves(wanted, rows)
    assert first.positions == tuple(size / 1024 for size in (1, 6, 8, 16))
    line = first.lines["host memory 80MiB"]
    assert math.isnan(line[0])
    assert line[2] == found[0].levels["tokens_per_s"][1, 2]


def test_figures_are_written_as_one_page(swept):
    html = (swept / "sweep.html").read_text()
    assert re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=", html) == []
    assert "<td>4 GB/s</td>" in html
    figures = [json.loads(text) for text in re.findall(r"data-figure=.*?>(.*?)</script>", html)]
    # curves, a heatmap for each of four metrics, and fronts over device and host memory
    assert len(figures) == 2 + 2 * 4 + 2


def test_a_sweep_says_which_of_its_cells_are_slower_with_more(config, swept, tmp_path):
    folder = shutil.copytree(swept, tmp_path / "edited")
    rows = rows_of(folder)
    values = ("device_mem", "host_mem", "machine.pcie_h2d_bytes_per_s")
    most_of_all = ["16MiB", "80MiB", "4000000000.0"]
    (most,) = (row for row in rows if [row[name] for name in values] == most_of_all)
    fastest = max(float(row["tokens_per_s"]) for row in rows if row["status"] == "ok")
    most["tokens_per_s"] = str(fastest / 3)
    write_rows(folder, rows)
    told = json.loads(call("sweep", config, "-o", folder, "--json").out)["slower_with_more"]
    worst = max(told, key=lambda one: one["by"])
    assert {name: str(value) for name, value in worst["cell"].items()} == {
        name: most[name] for name in worst["cell"]
    }
    others = [float(row["tokens_per_s"]) for row in rows if row["status"] == "ok" and row != most]
    assert worst["by"] == pytest.approx(max(others) / float(most["tokens_per_s"]) - 1)
    out = " ".join(call("sweep", config, "-o", folder).out.split())
    assert f"{worst['by']:.1%} longer per token" in out


OWN = """
[fixed]
model = "tiny"
seq_len = 64
tokens_per_step = 256
price_per_gpu_hour = { cpu = 0.5, rtx4090 = 2.0 }
[axes]
machine = ["cpu", "rtx4090"]
policy = ["optimal", "mine.py:POLICY"]
"""


def test_a_policy_of_ones_own_and_prices_by_machine(tmp_path):
    """As `plan` has it, and the price of each; a policy that is edited is planned anew."""
    shutil.copy("examples/greedy_policy.py", tmp_path / "mine.py")
    config = tmp_path / "own.toml"
    config.write_text(OWN)
    cells = {(c.values["machine"], c.values["policy"]): c for c in load_config(config).cells()}
    assert len(cells) == 4
    for (machine, policy), cell in cells.items():
        assert cell.price_per_gpu_hour == {"cpu": 0.5, "rtx4090": 2.0}[machine]
        if policy == "optimal":
            continue
        plan = call("plan", "--model", "tiny", "--seq-len", 64, "--tokens-per-step", 256,
                    "--machine", machine, "--json",
                    "--policy", f"{tmp_path}/mine.py:POLICY")  # fmt: skip
        assert plan.code == 0, plan.err
        expected = json.loads(plan.out)["tokens_per_s"]
        assert cell.query.answer().tokens_per_s == pytest.approx(expected)
    keys = {cell.key for cell in cells.values()}
    with (tmp_path / "mine.py").open("a") as file:
        file.write("# edited\n")
    anew = {cell.key for cell in load_config(config).cells()}
    assert len(keys & anew) == 2 and len(anew) == 4


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("mine.py:POLICY", "mine", "or FILE.py:NAME of your own"),
        ("rtx4090 = 2.0", "h100 = 2.0", "price_per_gpu_hour is of 'h100', and the sweep is of cpu"),
        ("rtx4090 = 2.0", "rtx4090 = -1", "needs a price from 0, got -1"),
    ],
)
def test_policies_and_prices_that_are_none_are_refused(old, new, says, tmp_path):
    config = tmp_path / "own.toml"
    config.write_text(OWN.replace(old, new))
    assert says in " ".join(error_of("sweep", config).split())
