"""Sweeps of clusters: each row is what `plan --cluster` says of those values."""

import csv
import re
from pathlib import Path

import pytest

from tests.front_door.command_line import call, error_of
from twinstream.study.sweep.cells import Cell
from twinstream.study.sweep.config import config_of, load_config
from twinstream.study.sweep.grids import axis_name, grids

FIXED = """
[fixed]
model = "1b"
cluster = "h100_dgx"
global_batch = 16
seq_len = 512
"""
AXES = """price_per_gpu_hour = 2.5
tp = "open"
zero = 3
[axes]
gpus = [8, 16]
"machine.device_memory_bytes" = ["2GB", "24GiB"]
"""
ASK = {"model": "1b", "cluster": "h100_dgx", "global_batch": 16, "seq_len": 512, "gpus": 8}


def cells_of(**values: object) -> list[Cell]:
    return config_of({"fixed": ASK | values}, source="here", folder=Path()).cells()


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "rows.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("clusters") / "small.toml"
    path.write_text(FIXED + AXES)
    return path


@pytest.fixture(scope="module")
def swept(config) -> Path:
    outcome = call("sweep", config, "-o", config.parent / "whole", "--jobs", 1)
    assert outcome.code == 0, outcome.err
    assert "4 cells: 2 ok, 2 infeasible; 4 now" in outcome.out
    return config.parent / "whole"


def row_of(folder: Path, gpus: int, memory: str) -> dict[str, str]:
    names = ("gpus", "machine.device_memory_bytes")
    (row,) = (r for r in rows_of(folder) if tuple(r[n] for n in names) == (str(gpus), memory))
    return row


def test_a_row_says_what_plan_says(swept):
    row = row_of(swept, 16, "24GiB")
    profile = swept.parent / "small_gpus.toml"
    profile.write_text(f'base = "h100_dgx"\nmachine_changes.device_memory_bytes = {24 * 2**30}\n')
    planned = call(
        "plan", "--cluster", profile, "--gpus", 16, "--model", "1b", "--seq-len", 512,
        "--global-batch", 16, "--zero", 3, "--json",
    ).json()  # fmt: skip
    best = planned["layouts"][0]
    assert row["layout"] == best["layout_text"]
    for name in ("step_s", "tokens_per_s", "mfu", "memory_bytes"):
        assert float(row[name]) == best[name]
    assert float(row["bound_s"]) == planned["least_bound_s"]
    assert float(row["gap"]) == planned["gap"]
    assert {n: row[f"layout.{n}"] for n in ("tp", "dp", "pp", "zero", "recompute")} == {
        n: str(best["layout"][n]) for n in ("tp", "dp", "pp", "zero", "recompute")
    }
    assert float(row["communication_share"]) == best["shares"]["communication"]


def test_money_is_the_price_of_the_gpus_for_as_long(swept):
    row = row_of(swept, 8, "24GiB")
    seconds = 1e9 / float(row["tokens_per_s"])
    assert float(row["money_per_billion_tokens"]) == pytest.approx(seconds / 3600 * 8 * 2.5)
    assert float(row["money_per_million_tokens"]) == pytest.approx(seconds / 3600e3 * 8 * 2.5)
    assert float(row["tokens_per_s_per_gpu"]) == pytest.approx(float(row["tokens_per_s"]) / 8)


def test_what_does_not_fit_has_a_reason(swept):
    row = row_of(swept, 8, "2GB")
    assert (row["status"], row["tokens_per_s"]) == ("infeasible", "")
    assert "fits: the leanest" in row["reason"]


def test_a_sweep_that_was_cut_off_makes_only_what_is_missing(swept, config, tmp_path):
    lines = (swept / "rows.csv").read_text().splitlines(keepends=True)
    (tmp_path / "rows.csv").write_text("".join(lines[:-1]) + lines[-1][:30])
    told = call("sweep", config, "-o", tmp_path, "--jobs", 1, "--json").json()
    assert (told["num_new"], told["num_superseded"], told["slower_with_more"]) == (1, 0, [])
    without = [{**row, "seconds": ""} for row in rows_of(tmp_path)]
    assert without == [{**row, "seconds": ""} for row in rows_of(swept)]


def test_the_page_and_the_grids_show_layouts(swept, config):
    found = grids(load_config(config), rows_of(swept))
    assert [grid.title for grid in found] == [""]
    assert found[0].y_labels == ("2GB", "24GiB")
    assert [metric.name for metric in found[0].metrics][-1] == "money a billion tokens"
    assert found[0].levels["tokens_per_s"][1, 0] == float(row_of(swept, 8, "24GiB")["tokens_per_s"])
    html = (swept / "sweep.html").read_text()
    assert re.search(r"<td>(tp\d )?(pp\d )?dp\d+ (\w+ )*zero\d</td>", html)
    assert axis_name("cluster.levels.spine.oversubscription") == "levels spine oversubscription"


def test_a_key_changes_with_whatever_the_result_depends_on():
    changes = [
        {"model": "tiny"}, {"cluster": "h100_roce"}, {"gpus": 16}, {"global_batch": 32},
        {"seq_len": 1024}, {"precision": "fp8"}, {"tp": 2}, {"pipeline": "gpipe"}, {"zero": 3},
        {"recompute": "full"}, {"offload": True}, {"price_per_gpu_hour": 2},
        {"cluster.nic_bytes_per_s": 1e11}, {"cluster.compute_lost": 0.2},
        {"cluster.levels.spine.oversubscription": 2}, {"machine.hbm_bytes_per_s": 4e12},
        {"machine.peak_fp8_flop_per_s": 4e15},
    ]  # fmt: skip
    keys = {one.key for values in ({}, *changes) for one in cells_of(**values)}
    assert len(keys) == 1 + len(changes)
    same = {one.key for v in ({"tp": "open"}, {"precision": "bf16"}) for one in cells_of(**v)}
    assert same == {cells_of()[0].key}


def test_numbers_of_the_cluster_and_of_its_nodes_are_those_searched_with():
    (cell,) = cells_of(**{
        "cluster.node_bytes_per_s": 9e11, "cluster.levels.leaf.oversubscription": 2,
        "machine.pcie_h2d_bytes_per_s": 1.28e11,
    })  # fmt: skip
    (base,) = cells_of()
    cluster, before = cell.query.cluster, base.query.cluster
    assert cluster.number("node_bytes_per_s") == 9e11
    assert [level.oversubscription.value for level in cluster.levels] == [2, 1]
    changed = cluster.machine_changes["pcie_h2d_bytes_per_s"]
    assert (changed.value, changed.kind) == (1.28e11, "hypothetical")
    new, old = (one.curves[0].points for one in (cluster, before))
    least = min(time_ns for _, time_ns in old)
    assert new[-1][1] == pytest.approx(least + (old[-1][1] - least) / 2)


def fixed(line: str = "", *, without: str = "") -> str:
    kept = [one for one in FIXED.splitlines() if not without or not one.startswith(without)]
    return "\n".join([*kept, "gpus = 8" if without != "gpus" else "", line, ""])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (fixed(without="gpus"), "gpus is missing"),
        (fixed(without="global_batch"), "global_batch is missing"),
        (fixed("machine = 'h100'"), "of machines or of clusters: leave out 'machine' or 'cluster'"),
        (fixed("policy = 'resident'"), "fixed.policy is of machines, and this is of a cluster"),
        ("[fixed]\nmachine = 'h100'\nmodel = 'tiny'\nseq_len = 64\ngpus = 8",
         "fixed.gpus is of clusters, and this is of a machine"),
        (fixed("tpp = 2"), "nothing that can be changed: did you mean 'tp'"),
        (fixed("tp = 0"), "fixed.tp needs to be greater than 0, or 'open', got 0"),
        (fixed("pipeline = '2f2b'"), "fixed.pipeline needs to be 'gpipe', '1f1b'"),
        (fixed("zero = 4"), "fixed.zero needs to be 0, 1, 2 or 3"),
        (fixed("offload = 'yes'"), "fixed.offload needs to be a valid boolean"),
        (fixed("precision = 'int8'"), "needs one of bf16, fp16, fp8, fp4"),
        (fixed("price_per_gpu_hour = -1"), "needs a price from 0"),
        (fixed("gpus = 2.5", without="gpus"), "fixed.gpus needs a positive whole number"),
        (fixed("'cluster.nic_speed' = 1e11"), "unknown number 'nic_speed'"),
        (fixed("'cluster.nic_bytes_per_s' = 50"), "50 GB/s are 5e+10"),
        (fixed("'cluster.nic_bytes_per_s' = 'fast'"), "needs a number, got 'fast'"),
        (fixed("'cluster.levels.top.nodes' = 4"), "did you mean 'levels.spine.nodes'"),
        (fixed("'machine.hbm_speed' = 1e12"), "no number 'hbm_speed'"),
        (fixed("'machine.device_memory_bytes' = '24XiB'"), "is no size: cannot read"),
        (fixed("'machine.efficiency.matmul' = 0.5"), "no number 'efficiency.matmul'"),
        (fixed("cluster = 'h100_dgy'", without="cluster"), "unknown cluster 'h100_dgy'"),
        (fixed("[axes]\nmodel = ['1b', '9b']", without="model"), "at model = '9b': unknown model"),
    ],
)  # fmt: skip
def test_a_config_that_is_wrong_gets_one_message_that_helps(text, said, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    message = error_of("sweep", path, "-o", tmp_path / "out")
    assert said in message
    assert message.startswith("error: ") and message.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tp = 3", "8 GPUs are not a multiple of tp 3"),
        ("tp = 2\npp = 2\ncp = 1\ndp = 4", "tp 2 x cp 1 x pp 2 x dp 4 are 16 GPUs"),
    ],
)
def test_degrees_that_are_not_the_gpus_are_a_refused_row(line, said, tmp_path):
    path = tmp_path / "odd.toml"
    path.write_text(fixed(line))
    outcome = call("sweep", path, "-o", tmp_path / "rows", "--jobs", 1)
    assert (outcome.code, "1 refused" in outcome.out) == (2, True)
    assert "no cell could be planned; the first: " in outcome.err and said in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.filterwarnings("ignore")  # of Ray's own
def test_a_ray_cluster_makes_the_same_rows(swept, config, tmp_path):
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        told = call("sweep", config, "-o", tmp_path, "--ray", cluster.address, "--json").json()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert told["num_new"] == 4
    made, wanted = (
        sorted(({**row, "seconds": ""} for row in rows_of(folder)), key=lambda row: row["key"])
        for folder in (tmp_path, swept)
    )
    assert made == wanted
