"""Times of collectives: closed forms by hand, two tiers, shared NICs, curves, what is refused."""

import pytest

from twinstream.hardware_profiles.clusters.curves import CollectiveCurve
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.hardware_profiles.clusters.schema import Cluster, Level
from twinstream.hardware_profiles.collectives.rank_group import (
    RankGroup,
    RankGroupError,
    on_one_node,
)
from twinstream.hardware_profiles.collectives.timing import collective_time_ns
from twinstream.hardware_profiles.errors import MissingNetworkNumberError
from twinstream.hardware_profiles.schema import Number
from twinstream.schedule.errors import ArgumentError

MB = 10**6
START, STEP, NET_STEP = 5000, 1000, 10_000
# 100 bytes a ns inside a node of 4, 10 bytes a ns on each of 4 NICs
NUMBERS = {
    "gpus_per_node": 4,
    "nics_per_node": 4,
    "node_bytes_per_s": 200e9,
    "node_efficiency": 0.5,
    "nic_bytes_per_s": 10e9,
    "network_efficiency": 1.0,
    "collective_latency_ns": START,
    "node_latency_ns": STEP,
    "network_latency_ns": NET_STEP,
}


def number(value):
    return Number(value=float(value), kind="assumed", source="a test")


def cluster(*, levels=(), curves=(), **changes):
    numbers = {field: number(value) for field, value in {**NUMBERS, **changes}.items()}
    return Cluster(
        name="toy", description="", machine="h100", levels=levels, curves=curves, **numbers
    )


def timed(collective, size, group, **changes):
    found = collective_time_ns(cluster(**changes), collective, size, group)
    return found.time_ns, found.algorithm


FOUR = on_one_node(4)


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        ("all_gather", (START + 3 * STEP + 3 * MB // 100, "ring")),
        ("reduce_scatter", (START + 3 * STEP + 3 * MB // 100, "ring")),
        ("all_reduce", (START + 2 * (3 * STEP + 3 * MB // 100), "ring")),
        ("all_to_all", (START + STEP + 3 * MB // 100, "pairwise")),
        ("send_recv", (START + STEP + 4 * MB // 100, "message")),
    ],
)
def test_within_a_node_each_collective_takes_its_closed_form(collective, expected):
    assert timed(collective, 4 * MB, FOUR) == expected


def test_small_sums_go_by_a_tree_and_large_ones_around_a_ring():
    # 2 (2 x 1000 + 1) beside 2 (3 x 1000 + 0.75)
    assert timed("all_reduce", 100, FOUR) == (START + 4002, "tree")
    assert timed("all_reduce", 100 * MB, FOUR)[1] == "ring"


def test_switches_that_reduce_are_used_where_they_are_faster():
    # 2 steps and S (1 + 1/4) at 0.75 of 200 bytes a ns
    expected = START + 2 * STEP + -(-int(4 * MB * 1.25) // 150)
    found = timed("all_reduce", 4 * MB, FOUR, node_in_switch_efficiency=0.75)
    assert found == (expected, "in_switch")
    assert timed("all_reduce", 4 * MB, FOUR, node_in_switch_efficiency=0.3)[1] == "ring"


def test_between_nodes_of_one_rank_a_rank_has_one_rail():
    group = RankGroup(ranks=4, ranks_per_node=1)
    assert timed("all_gather", 4 * MB, group) == (START + 3 * NET_STEP + 3 * MB // 10, "ring")


def test_what_k_groups_share_of_the_nics_is_divided_by_k():
    for sharing, slower in ((4, 1), (8, 2), (16, 4)):  # four of them have a rail each
        group = RankGroup(ranks=4, ranks_per_node=1, sharing=sharing)
        expected = START + 3 * NET_STEP + slower * 3 * MB // 10
        assert timed("all_gather", 4 * MB, group)[0] == expected
    one_nic = {"nics_per_node": 1, "gpus_per_node": 4}
    group = RankGroup(ranks=4, ranks_per_node=1, sharing=4)
    expected = START + 3 * NET_STEP + 4 * 3 * MB // 10
    assert timed("all_gather", 4 * MB, group, **one_nic)[0] == expected


@pytest.mark.parametrize(("inside", "least"), [(100, "two_level"), (40, "ring")])
def test_over_two_tiers_the_least_of_ring_and_two_levels_is_taken(inside, least):
    group, size = RankGroup(ranks=8, ranks_per_node=4), 800 * MB
    # The ring of 8: 2 x 7/8 S through a node's four rails of 10 bytes a ns together; of the 7
    # steps of a lap 6 are within a node.
    ring = START + 2 * 7 * size // 8 // 40 + 2 * NET_STEP + 12 * STEP
    # Two levels: inside 3/4 S, then S / 4 between two nodes at 10 a rank, then inside again.
    two_level = START + 2 * (3 * STEP + 3 * size // 4 // inside) + 2 * (NET_STEP + size // 8 // 10)
    found = timed("all_reduce", size, group, node_efficiency=inside / 200)
    assert found == min((ring, "ring"), (two_level, "two_level"))
    assert found[1] == least


def test_over_two_tiers_two_levels_win_where_the_node_is_much_faster():
    group, size = RankGroup(ranks=64, ranks_per_node=4), 6400
    # In a ring each of 63 steps costs; in two levels 3 inside and 15 between.
    found = timed("all_gather", size, group, nic_bytes_per_s=1e9)
    ring = START + 15 * NET_STEP + 48 * STEP + 63 * size // 64 // 4
    two_level = START + 3 * STEP + 3 * size // 4 // 100 + 15 * NET_STEP + 15 * size // 64
    assert two_level < ring
    assert found == (two_level, "two_level")


def test_all_to_all_over_two_tiers_uses_both_at_once():
    # 2 MB x 4 of 8 ranks leave by the rank's own rail, the 3 others stay inside.
    group = RankGroup(ranks=8, ranks_per_node=4)
    assert timed("all_to_all", 8 * MB, group) == (START + NET_STEP + 4 * MB // 10, "two_level")


def level(name, nodes, oversubscription, latency_ns):
    numbers = (number(nodes), number(oversubscription), number(latency_ns))
    return Level(name=name, nodes=numbers[0], oversubscription=numbers[1], latency_ns=numbers[2])


def test_the_lowest_level_that_joins_the_nodes_sets_latency_and_rate():
    levels = (level("leaf", 2, 1, 0), level("spine", 8, 4, 700))
    two, four = (RankGroup(ranks=n, ranks_per_node=1) for n in (2, 4))
    assert timed("all_gather", 4 * MB, two, levels=levels)[0] == START + NET_STEP + 2 * MB // 10
    expected = START + 3 * (NET_STEP + 700) + 4 * 3 * MB // 10
    assert timed("all_gather", 4 * MB, four, levels=levels)[0] == expected
    with pytest.raises(RankGroupError, match=r"16 nodes, and the levels .* join at most 8"):
        timed("all_gather", 4 * MB, RankGroup(ranks=16, ranks_per_node=1), levels=levels)


def curve(ranks, per_node, alpha, *, dtype=None, collective="all_gather"):
    return CollectiveCurve(
        collective=collective, ranks=ranks, ranks_per_node=per_node, dtype=dtype,
        lines=((float(alpha), 1.0),), least_bytes=100, most_bytes=1000, kind="assumed",
        source="a test",
    )  # fmt: skip


def test_a_curve_is_used_where_there_is_one_and_says_beyond_what_it_is():
    known = cluster(curves=(curve(4, 4, 77),))
    assert collective_time_ns(known, "all_gather", 500, FOUR) == (577, "curve", False)
    assert collective_time_ns(known, "all_gather", 5000, FOUR) == (5077, "curve", True)
    assert collective_time_ns(known, "all_gather", 500, on_one_node(3)).algorithm == "ring"


def test_a_dtype_has_its_own_curve_where_there_is_one():
    both = cluster(curves=(curve(4, 4, 1, dtype="int8"), curve(4, 4, 2, dtype="half")))
    times = {
        dtype: collective_time_ns(both, "all_gather", 500, FOUR, dtype).time_ns
        for dtype in ("int8", "half", "bfloat16", None)
    }
    assert times == {"int8": 501, "half": 502, "bfloat16": 502, None: 502}


def test_a_curve_between_nodes_is_slower_by_what_sharing_costs_in_closed_form():
    known = cluster(curves=(curve(4, 1, 10**6),))
    alone = collective_time_ns(known, "all_gather", 10**6, RankGroup(ranks=4, ranks_per_node=1))
    shared = collective_time_ns(
        known, "all_gather", 10**6, RankGroup(ranks=4, ranks_per_node=1, sharing=8)
    )
    ratio = (START + 3 * NET_STEP + 150_000) / (START + 3 * NET_STEP + 75_000)
    assert alone.time_ns == 2 * 10**6
    assert shared.time_ns == pytest.approx(2e6 * ratio, abs=1)


def test_inside_its_nodes_a_two_level_collective_has_the_nodes_curves():
    group = RankGroup(ranks=64, ranks_per_node=4)
    slow = {"nic_bytes_per_s": 1e9}
    without = timed("all_gather", 6400, group, **slow)[0]
    with_curve = timed("all_gather", 6400, group, curves=(curve(4, 4, 100),), **slow)[0]
    # 100 + 6,400 in place of start, 3 steps and 48 ns
    assert with_curve == without - (START + 3 * STEP + 48) + 6500


def test_one_rank_and_no_bytes_take_no_time():
    assert timed("all_reduce", 10**9, on_one_node(1)) == (0, "none")
    assert timed("all_reduce", 0, FOUR) == (0, "none")


@pytest.mark.parametrize("name", ["h100_dgx", "a100_dgx", "gb200_nvl72", "h100_roce"])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_more_bytes_never_take_less_time_in_closed_form(name, collective):
    bare = load_cluster(name).model_copy(update={"curves": ()})
    for group in (on_one_node(8), RankGroup(ranks=16, ranks_per_node=8, sharing=2)):
        times = [collective_time_ns(bare, collective, 4**k, group).time_ns for k in range(16)]
        assert times == sorted(times) and times[0] > 0


@pytest.mark.parametrize(("nodes", "least_gb", "most_gb"), [(1, 400, 480), (2, 300, 480)])
def test_h100_sums_have_the_bus_bandwidth_that_is_reported_for_them(nodes, least_gb, most_gb):
    """One node: 450 GB/s in nccl-tests; two: 330 to 480 of them are usual with 8 NDR rails."""
    ranks, size = 8 * nodes, 2**33
    group = RankGroup(ranks=ranks, ranks_per_node=8)
    found = collective_time_ns(load_cluster("h100_dgx"), "all_reduce", size, group)
    assert least_gb <= 2 * (ranks - 1) / ranks * size / found.time_ns <= most_gb


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(RankGroupError, match="5 ranks a node, and a node of cluster 'toy' has 4"):
        timed("all_reduce", 1, on_one_node(5))
    with pytest.raises(RankGroupError, match="3 nodes, and cluster 'toy' has 2"):
        timed("all_reduce", 1, RankGroup(ranks=3, ranks_per_node=1), most_nodes=2)
    with pytest.raises(ValueError, match="multiple of ranks_per_node"):
        RankGroup(ranks=9, ranks_per_node=8)
    with pytest.raises(ArgumentError, match="collective needs one of all_reduce"):
        timed("broadcast", 1, FOUR)
    with pytest.raises(ArgumentError, match="size_bytes needs a whole number"):
        timed("all_reduce", 1.5, FOUR)


def test_what_the_profile_lacks_is_named():
    with pytest.raises(MissingNetworkNumberError, match="'rtx4090_pc' has no n"):
        pc = load_cluster("rtx4090_pc").model_copy(update={"most_nodes": None})
        collective_time_ns(pc, "all_reduce", 1, RankGroup(ranks=4, ranks_per_node=2))
