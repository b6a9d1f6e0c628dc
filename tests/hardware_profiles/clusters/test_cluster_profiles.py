"""Cluster profiles: what is shipped, inheritance, and what is refused in one sentence."""

import pytest

from twinstream.hardware_profiles.clusters.loader import (
    cluster_names,
    load_cluster,
    machine_of,
    save_cluster,
)
from twinstream.hardware_profiles.clusters.schema import CLUSTER_NUMBERS
from twinstream.hardware_profiles.errors import (
    ClusterSizeError,
    MissingNetworkNumberError,
    ProfileError,
)
from twinstream.schedule.errors import ArgumentError
from twinstream.simulator.network_costs import share_of

# GPUs and NICs a node, GB/s of a GPU and of a NIC in one direction
FIGURES = {
    "h100_dgx": (8, 8, 450, 50),
    "a100_dgx": (8, 8, 300, 25),
    "a100_40gb": (8, 8, 300, 25),
    "a100_roce": (8, 8, 300, 25),
    "a100_vtrain": (8, 4, 300, 25),
    "a100_deepspeed": (8, 8, 300, 25),
    "b200_dgx": (8, 8, 900, 50),
    "b300_dgx": (8, 8, 900, 100),
    "gb200_nvl72": (72, 72, 900, 50),
    "gb300_nvl72": (72, 72, 900, 100),
    "mi300x_node": (8, 8, 448, 50),
    "mi325x_node": (8, 8, 448, 50),
    "h200_dgx": (8, 8, 450, 50),
    "h100_titan": (8, 8, 450, 50),
    "h100_roce": (8, 8, 450, 50),
    "h100_xdr": (8, 8, 450, 100),
    "rtx4090_ethernet": (2, 1, 32, 12.5),
}


def test_the_shipped_clusters_are_the_documented_ones():
    assert cluster_names() == tuple(sorted((*FIGURES, "rtx4090_pc")))


@pytest.mark.parametrize("name", FIGURES)
def test_a_cluster_carries_the_published_figures(name):
    cluster = load_cluster(name)
    gpus, nics, gpu_gb, nic_gb = FIGURES[name]
    assert cluster.count("gpus_per_node") == gpus
    assert cluster.count("nics_per_node") == nics
    assert cluster.number("node_bytes_per_s") == gpu_gb * 1e9
    assert cluster.number("nic_bytes_per_s") == nic_gb * 1e9


@pytest.mark.parametrize("name", cluster_names())
def test_every_number_of_a_shipped_cluster_has_a_kind_and_a_source(name):
    cluster = load_cluster(name)
    assert cluster.name == name and cluster.description
    numbers = [getattr(cluster, field) for field in CLUSTER_NUMBERS]
    stated = [number for number in numbers if number is not None]
    levels = [n for level in cluster.levels for n in (level.nodes, level.oversubscription)]
    for number in (*stated, *levels, *cluster.machine_changes.values()):
        assert number.kind in ("datasheet", "measured", "fitted", "assumed", "hypothetical")
        assert len(number.source) > 10
    assert cluster.compute_lost is not None and cluster.compute_lost.kind in ("assumed", "fitted")
    assert all("nccl_curves.csv" in curve.source for curve in cluster.curves)
    assert machine_of(cluster).device == "cuda"


@pytest.mark.parametrize("name", cluster_names())
def test_a_cluster_is_written_and_read_back_equal(name, tmp_path):
    cluster = load_cluster(name)
    save_cluster(cluster, tmp_path / "again.toml")
    assert load_cluster(tmp_path / "again.toml") == cluster


def test_a_node_has_what_its_cluster_changes_of_its_machine():
    node = machine_of(load_cluster("gb200_nvl72"))
    assert node.number("pcie_h2d_bytes_per_s") == 225e9
    assert machine_of(load_cluster("rtx4090_pc")).name == "rtx4090"


@pytest.mark.parametrize(
    ("name", "gib", "dram_bytes_per_s"),
    [("h100_dgx", 256, 2 * 8 * 4800e6 * 8 / 8), ("gb200_nvl72", 240e9 / 2**30, 256e9)],
)
def test_a_gpu_has_its_share_of_the_nodes_host(name, gib, dram_bytes_per_s):
    """An eighth of 2 TB and of 16 channels; half of a Grace."""
    cluster = load_cluster(name)
    share = share_of(machine_of(cluster), cluster.count("gpus_per_node"))
    assert share.number("host_memory_bytes") / 2**30 == pytest.approx(gib)
    assert share.number("host_dram_bytes_per_s") == pytest.approx(dram_bytes_per_s)


def written(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_profile_inherits_and_says_what_it_changed(tmp_path):
    mine = load_cluster(written(tmp_path, 'base = "h100_dgx"\nnic_bytes_per_s = 25e9\n'))
    assert mine.number("nic_bytes_per_s") == 25e9
    assert mine.nic_bytes_per_s.kind == "hypothetical"
    assert "mine.toml" in mine.nic_bytes_per_s.source
    assert mine.number("node_bytes_per_s") == 450e9
    assert mine.curves == load_cluster("h100_dgx").curves  # all of them within a node


def test_curves_of_other_links_are_not_inherited(tmp_path):
    assert (
        load_cluster(written(tmp_path, 'base = "h100_dgx"\nnode_bytes_per_s = 9e11\n')).curves == ()
    )


def test_a_curve_of_ones_own_replaces_the_bases(tmp_path):
    text = """
base = "h100_dgx"
[[curves]]
collective = "all_reduce"
ranks = 8
ranks_per_node = 8
dtype = "half"
lines = [[1000, 1]]
least_bytes = 8
most_bytes = 1024
kind = "assumed"
source = "a test"
"""
    mine, base = load_cluster(written(tmp_path, text)), load_cluster("h100_dgx")
    assert len(mine.curves) == len(base.curves)
    assert mine.curves[-1].time_ns(500) == 1500


WRONG = {
    'base = "h100_dgx"\nnic_bytes_per_s = 50\n': "50 GB/s are 5e+10, and 50 Gb/s are 6.25e+09",
    'base = "h100_dgx"\nnic_per_node = 4\n': "did you mean 'nics_per_node'?",
    'base = "h100"\n': "unknown base 'h100'",
    'machine = "h100"\ngpus_per_node = 2.5\n': "2.5 is no count",
    'machine = "h1000"\n': "unknown machine 'h1000'",
    'gpus_per_node = 8\n': "machine is missing",
    'base = "h100_dgx"\nnode_efficiency = 92\n': "92 is no share",
    'base = "h100_dgx"\n[machine_changes]\nhbm_bytes = 3e12\n': "did you mean 'hbm_bytes_per_s'?",
    "base = ": "is not valid TOML",
    'base = "h100_dgx"\nlevels = 3\n': "levels needs tables [[levels]], got 3",
    'base = "h100_dgx"\nlevels = [3]\n': "levels.0 needs a table, got 3",
    'base = "h100_dgx"\nmachine_changes = 3\n': "needs tables [machine_changes.<name>], got 3",
    'base = "h100_dgx"\n[[curves]]\nlines = 3\n': "curves.0.lines needs an array, got 3",
    'base = "h100_dgx"\nnic_bytes_per_s = { valu = 5 }\n': "did you mean 'value'?",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_profile_is_refused_with_what_to_do(text, tmp_path):
    with pytest.raises(ProfileError) as refused:
        load_cluster(written(tmp_path, text))
    assert WRONG[text] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_profiles_that_inherit_in_a_circle_are_refused(tmp_path):
    (tmp_path / "one.toml").write_text('base = "two.toml"\n')
    (tmp_path / "two.toml").write_text('base = "one.toml"\n')
    with pytest.raises(ProfileError, match=r"in a circle: one\.toml -> two\.toml -> one\.toml"):
        load_cluster(tmp_path / "one.toml")


def test_an_unknown_name_and_what_is_no_name_are_refused():
    with pytest.raises(ProfileError, match=r"unknown cluster '8'\. Shipped clusters: a100_40gb"):
        load_cluster("8")
    with pytest.raises(ArgumentError, match="cluster needs"):
        load_cluster(8)


@pytest.mark.parametrize(
    ("name", "meant"), [("h100", "h100_dgx"), ("GB200", "gb200_nvl72"), ("h100_dgy", "h100_dgx")]
)
def test_a_name_that_begins_a_shipped_one_gets_it_as_a_hint(name, meant):
    with pytest.raises(ProfileError, match=f"unknown cluster '{name}': did you mean '{meant}'"):
        load_cluster(name)


def test_a_plain_number_or_a_size_in_text_stands_wherever_a_table_could(tmp_path):
    text = """
base = "h100_dgx"
machine_changes.device_memory_bytes = "48GiB"
[[levels]]
name = "leaf"
nodes = 8
oversubscription = 2
latency_ns = 500
[[curves]]
collective = "all_reduce"
ranks = 8
ranks_per_node = 8
dtype = "half"
lines = [[1000, 1]]
least_bytes = "1KiB"
most_bytes = "1MiB"
kind = "assumed"
source = "a test"
"""
    mine = load_cluster(written(tmp_path, text))
    assert machine_of(mine).number("device_memory_bytes") == 48 * 2**30
    (leaf,), curve = mine.levels, mine.curves[-1]
    assert (leaf.nodes.value, leaf.nodes.source) == (8, "override in mine.toml")
    assert (curve.least_bytes, curve.most_bytes) == (2**10, 2**20)


def test_changes_of_another_machine_replace_those_of_the_base(tmp_path):
    other = load_cluster(written(tmp_path, 'base = "h100_dgx"\nmachine = "a100"\n'))
    assert other.machine_changes == load_cluster("h100_dgx").machine_changes
    text = 'base = "h100_dgx"\nmachine = "a100"\nmachine_changes.host_memory_bytes = "1TiB"\n'
    assert set(load_cluster(written(tmp_path, text)).machine_changes) == {"host_memory_bytes"}


def test_a_missing_number_is_missing():
    with pytest.raises(MissingNetworkNumberError, match="'rtx4090_pc' has no nic_bytes_per_s"):
        load_cluster("rtx4090_pc").number("nic_bytes_per_s")


def test_a_cluster_s_size_is_asked_of_the_whole():
    cluster = load_cluster("h100_dgx")
    cluster.require_gpus(2048 * 8)
    with pytest.raises(ClusterSizeError, match=r"16,385 GPUs are more than the 16,384 of .*2,048"):
        cluster.require_gpus(2048 * 8 + 1)
    cluster.model_copy(update={"most_nodes": None}).require_gpus(10**6)


def test_an_nvl72_of_another_generation_has_a_machine_and_curves_of_its_own():
    older, newer = load_cluster("gb200_nvl72"), load_cluster("gb300_nvl72")
    assert (older.machine, newer.machine) == ("gb200", "gb300")
    assert {one.key for one in older.curves} == {one.key for one in newer.curves}
    assert all("on GB300" in one.source for one in newer.curves)
    assert all("on B200" in one.source for one in load_cluster("b200_dgx").curves)
    assert machine_of(newer).number("device_memory_bytes") == 288e9
