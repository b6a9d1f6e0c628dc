"""Hypothetical clusters: what changes, what follows from it, and what is refused."""

import pytest

from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.clusters.what_if import with_numbers
from twinstream.hardware_profiles.collectives.rank_group import RankGroup, on_one_node
from twinstream.hardware_profiles.collectives.timing import collective_time_ns
from twinstream.hardware_profiles.errors import ProfileError

BASE = load_cluster("h100_dgx")


def time_ns(cluster, group, size_bytes=2**28):
    return collective_time_ns(cluster, "all_gather", size_bytes, group, "half").time_ns


def test_a_number_is_hypothetical_and_says_what_it_was():
    changed = with_numbers(BASE, {"nic_bytes_per_s": 1e11})
    number = changed.nic_bytes_per_s
    assert (number.value, number.kind) == (1e11, "hypothetical")
    assert number.source == "what-if; was 5e+10 (datasheet)"
    assert changed.name == with_numbers(changed, {"compute_lost": 0.0}).name == "h100_dgx+what-if"


def test_the_same_rate_changes_no_time_and_twice_the_rate_halves_what_is_beyond_latency():
    node = on_one_node(8)
    same = with_numbers(BASE, {"node_bytes_per_s": 4.5e11})
    assert time_ns(same, node) == time_ns(BASE, node)
    fast = with_numbers(BASE, {"node_bytes_per_s": 9e11})
    whole, half = (
        collective_time_ns(cluster, "all_gather", 2**28, node, "half") for cluster in (BASE, fast)
    )
    assert (whole.algorithm, half.algorithm) == ("curve", "curve")
    (points,) = (
        one.points
        for one in BASE.curves
        if (one.collective, one.ranks, one.dtype) == ("all_gather", 8, "half")
    )
    least = min(time for _, time in points)
    assert half.time_ns - least == pytest.approx((whole.time_ns - least) / 2, abs=1)


@pytest.mark.parametrize("times", [1 / 64, 0.5, 100])
def test_a_link_of_any_rate_has_curves_that_take_time(times):
    changed = with_numbers(BASE, {"node_bytes_per_s": 4.5e11 * times})
    assert len(changed.curves) == len(BASE.curves)
    for curve in changed.curves:
        assert min(curve.time_ns(size) for size in (2**9, 2**13, 2**21, 2**29)) > 0


def test_the_network_does_not_touch_curves_of_a_node():
    fast = with_numbers(BASE, {"nic_bytes_per_s": 1e11})
    assert fast.curves == BASE.curves
    nodes = RankGroup(ranks=2, ranks_per_node=1)
    assert time_ns(fast, nodes) < 0.6 * time_ns(BASE, nodes)


def test_another_number_of_a_link_ends_its_curves():
    assert not [c for c in with_numbers(BASE, {"node_efficiency": 0.9}).curves if c.within_a_node]
    assert with_numbers(BASE, {"compute_lost": 0.3}).curves == BASE.curves


def test_a_level_is_changed_by_its_name():
    changed = with_numbers(BASE, {"levels.spine.oversubscription": 4})
    assert [level.oversubscription.value for level in changed.levels] == [1, 4]
    far = RankGroup(ranks=64, ranks_per_node=1)  # of more nodes than hang below a leaf
    assert time_ns(changed, far) > 3 * time_ns(BASE, far)


def test_a_node_keeps_what_was_changed_before_and_its_link_follows():
    once = with_numbers(BASE, {"machine.hbm_bytes_per_s": 4e12})
    twice = with_numbers(once, {"machine.pcie_h2d_bytes_per_s": 1.28e11})
    before, after = machine_of(BASE), machine_of(twice)
    assert after.number("hbm_bytes_per_s") == 4e12
    assert after.number("pcie_duplex_bytes_per_s") > before.number("pcie_duplex_bytes_per_s")
    assert after.number("pcie_d2h_bytes_per_s") == before.number("pcie_d2h_bytes_per_s")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nic": 1.0}, "unknown number 'nic'"),
        ({"nic_bytes_per_s": 0.0}, "0 is so many bytes a second"),
        ({"nic_bytes_per_s": float("nan")}, "nic_bytes_per_s"),
        ({"nic_bytes_per_s": float("inf")}, "cannot be unconstrained"),
        ({"compute_lost": 2.0}, "2 is no share from 0 to 1"),
        ({"gpus_per_node": 2.5}, "2.5 is no count"),
        ({"levels.spine.oversubscription": 0.5}, "oversubscription is 0.5"),
        ({"levels.leaf.nodes": 4096}, "levels must rise"),
        ({"levels.spine": 2}, "unknown number 'levels.spine'"),
        ({"machine.hbm_bytes_per_s": -1.0}, "hbm_bytes_per_s"),
        ({"machine.nic_bytes_per_s": 1.0}, "has no number 'nic_bytes_per_s'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(changes, said):
    with pytest.raises(ProfileError) as raised:
        with_numbers(BASE, changes)
    assert said in str(raised.value) and "h100" in str(raised.value)
