"""`twinstream clusters`, `twinstream calibrate --collectives`, and options of a layout on them."""

from pathlib import Path

import pytest

from tests.front_door.command_line import call, error_of
from twinstream.hardware_profiles.clusters.loader import cluster_names, load_cluster
from twinstream.hardware_profiles.collectives.rank_group import on_one_node
from twinstream.hardware_profiles.collectives.timing import collective_time_ns

SIZES = [2**k for k in range(9, 30, 2)]
CALIBRATE = ("calibrate", "--cluster", "rtx4090_pc", "--collectives")


def write_table(path: Path, collective: str = "all_reduce") -> Path:
    """A PC whose all-reduce takes the least of two lines."""
    rows = [
        f"2,{collective},{size},{min(8 + size * 2e-4, 30 + size * 8e-5):.6g}\n" for size in SIZES
    ]
    path.write_text("n,collective,bytes,time_us\n" + "".join(rows))
    return path


def test_clusters_are_listed():
    printed = call("clusters").out
    assert all(name in printed for name in cluster_names())
    listed = call("clusters", "--json").json()["clusters"]
    assert [one["name"] for one in listed] == list(cluster_names())
    assert listed[0]["node_bytes_per_s"]["source"]


def test_measured_collectives_become_curves_of_a_profile(tmp_path):
    table, out = write_table(tmp_path / "mine.csv"), tmp_path / "pc.toml"
    printed = call(*CALIBRATE, table, "-o", out)
    assert printed.code == 0, printed.err
    assert "all-reduce" in printed.out and "2 lines" in printed.out
    cluster = load_cluster(out)
    assert cluster.name == "pc"
    (curve,) = cluster.curves
    assert "mine.csv, calibrated 20" in curve.source
    found = collective_time_ns(cluster, "all_reduce", 2**20, on_one_node(2))
    assert found.algorithm == "curve" and not found.extrapolated
    assert found.time_ns == pytest.approx((30 + 2**20 * 8e-5) * 1e3, rel=1e-3)
    (told,) = call(*CALIBRATE, table, "--json").json()["curves"]
    assert told["form"] == "2 lines" and told["error"] < 1e-3


def test_of_several_gpus_one_must_be_named(tmp_path):
    table = tmp_path / "two.csv"
    rows = [f"{gpu},2,all_gather,{size},9\n" for gpu in ("A", "B 9") for size in (8, 16)]
    table.write_text("gpu_type,n,collective,bytes,time_us\n" + "".join(rows))
    assert '--only "gpu_type=...", one of A, B 9' in error_of(*CALIBRATE, table)
    found = call(*CALIBRATE, table, "--only", "gpu_type=B 9", "--json").json()
    assert found["curves"][0]["num_points"] == 2
    assert "no rows are of 'C'" in error_of(*CALIBRATE, table, "--only", "gpu_type=C")
    assert "gpu_type=NAME" in error_of(*CALIBRATE, table, "--only", "n=2")


WRONG = {
    "n,bytes,time_us\n2,8,1\n": "has no column collective",
    "n,collective,bytes,time_us\n2,gossip,8,1\n": "unknown collective 'gossip'",
    "": "is empty",
    "n,collective,bytes,time_us\n4,all_reduce,8,1\n4,all_reduce,16,1\n": "a node of cluster",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_table_is_one_message(text, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text(text)
    message = error_of(*CALIBRATE, table)
    assert WRONG[text] in message and "table.csv" in message
    assert message.count("\n") == 1


def test_what_is_calibrated_must_be_clear(tmp_path):
    table = write_table(tmp_path / "mine.csv")
    assert "--collectives needs --cluster" in error_of("calibrate", "--collectives", table)
    for given in ((), ("--cluster", "h100_dgx"), ("--base", "h100", "--collectives", table)):
        assert "give either --base" in error_of("calibrate", *given)
    assert "unknown cluster 'x'" in error_of("calibrate", "--collectives", table, "--cluster", "x")


PLANNED = (
    *("plan", "--cluster", "h100_dgx", "--gpus", 16, "--model", "8b", "--seq-len", 2048),
    *("--global-batch", 64, "--tp", 1, "--pp", 1, "--cp", 1, "--ep", 1, "--zero", 3),
    *("--micro-batch", 1, "--recompute", "none", "--kernels", "megatron", "--no-offload", "--json"),
)


def test_zero_shards_over_as_many_ranks_as_are_asked_for():
    """8.03 G parameters, two moments and gradients, 2 bytes each: a sixteenth more in eighths; and
    shards of a few layers on their way."""
    memory = {}
    for shard in (16, 8):
        (found,) = call(*PLANNED, "--shard", shard).json()["layouts"]
        assert found["layout"]["shard"] == shard
        memory[shard] = found["memory_bytes"]
    kept_bytes = 8.03e9 * 4 * 2 / 16
    assert kept_bytes < memory[8] - memory[16] < 1.1 * kept_bytes


def test_a_shard_that_cannot_be_is_one_message():
    assert "shard 5 must divide dp x cp = 16" in error_of(*PLANNED, "--shard", 5)
    alone = ("plan", "--machine", "h100", "--model", "8b", "--seq-len", 2048, "--shard", 8)
    assert "--shard is of several GPUs: add --gpus N" in error_of(*alone)


def test_a_plan_says_how_far_its_bytes_may_be_off_and_what_experts_drop():
    asked = ("plan", "--cluster", "h100_dgx", "--gpus", "8", "--model", "tiny-experts",
             "--seq-len", "256", "--global-batch", "16", "--ep", "4", "--tp", "1", "--zero", "3",
             "--expert-imbalance", "1.6", "--capacity-factor", "1.2")  # fmt: skip
    said = " ".join(call(*asked).out.split())
    assert "so 10.0% to 25.0% of the rows that go to experts are dropped" in said
    assert (
        "Memory is that of tensors: " in said
        and "published runs of PyTorch's FSDP ran where" in said
    )
    told = call(*asked, "--json").json()
    assert told["memory_errors"]["megatron"]["over"] > 0
    assert told["layouts"][0]["layout"]["capacity_factor"] == 1.2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--precision", "fp8", "--precision-units", "heads"), "'heads' is unknown; known: prod"),
        (("--precision", "fp8", "--precision-units", "gradients"), "needs products, which cast"),
        (("--precision-units", "head"), "--precision fp8 or fp4: add it"),
        (("--model", "tiny-experts", "--ep", "8", "--expert-nodes", "3"), "not divide ep 8"),
    ],
)
def test_units_and_nodes_are_refused_by_name(flags, said):
    asked = ("plan", "--cluster", "h100_dgx", "--gpus", "8", "--model", "tiny", "--seq-len", "256")
    assert said in error_of(*asked, "--global-batch", "16", *flags)
