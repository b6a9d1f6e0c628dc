"""The time of a collective on a cluster: by its measured curve, else by the fastest algorithm."""

from math import ceil
from typing import NamedTuple

from twinstream.hardware_profiles.clusters.curves import (
    COLLECTIVES,
    Collective,
    CollectiveCurve,
    Sums,
)
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.collectives.algorithms import (
    Link,
    algorithms_of,
    network_link,
    node_link,
    require_room,
)
from twinstream.hardware_profiles.collectives.rank_group import RankGroup, on_one_node
from twinstream.schedule.errors import ArgumentError, require_whole

_SIXTEEN_BITS = ("half", "bfloat16")
_MOST_BYTES = 2**60


class CollectiveTime(NamedTuple):
    """Whole nanoseconds, what took them, and whether that was beyond what was measured.

    `algorithm`: `ring`, `tree`, `in_switch`, `pairwise`, `message`, `two_level`, `curve`, or `none`
    of a single rank.
    """

    time_ns: int
    algorithm: str
    extrapolated: bool = False


def collective_time_ns(
    cluster: Cluster,
    collective: Collective,
    size_bytes: int,
    group: RankGroup,
    dtype: str | None = None,
    sums: Sums | None = None,
) -> CollectiveTime:
    """The time of one collective, alone but for what `group.sharing` says.

    A curve of the profile for (collective, ranks, ranks per node) is used as it is; where NICs are
    shared, times the ratio of the closed forms with and without. Otherwise the least of the
    algorithms that the profile's numbers allow, plus `collective_latency_ns`; two-level ones use
    the node's curves inside.

    Args:
        size_bytes: nccl-tests' size: the larger of what a rank gives and what it receives.
        dtype: as nccl-tests calls it (`half`, `int8`); without a curve of its own one of any dtype
            is used, or of 16 bits, or the first. Without one, 16 bits.
        sums: who makes them; without a curve of these one of any is used, or the first.

    Raises:
        ArgumentError: there is no such collective, or size_bytes is no whole number of bytes.
        RankGroupError: the cluster cannot hold the group.
        MissingNetworkNumberError: the profile lacks a number that the closed form needs.
    """
    require_whole("size_bytes", size_bytes, 0, _MOST_BYTES)
    if collective not in COLLECTIVES:
        raise ArgumentError(f"collective needs one of {', '.join(COLLECTIVES)}, got {collective!r}")
    require_room(cluster, group)
    if group.ranks == 1 or size_bytes == 0:
        return CollectiveTime(0, "none")
    curve = curve_of(cluster, collective, group, dtype, sums)
    if curve is None:
        time_ns, algorithm = least_of_algorithms(cluster, collective, size_bytes, group, dtype)
        return CollectiveTime(ceil(time_ns), algorithm)
    time_ns = curve.time_ns(size_bytes)
    if group.sharing > 1 and not group.within_a_node:
        alone = group.model_copy(update={"sharing": 1})
        shared, _ = least_of_algorithms(cluster, collective, size_bytes, group, dtype)
        by_itself, _ = least_of_algorithms(cluster, collective, size_bytes, alone, dtype)
        time_ns *= shared / by_itself
    return CollectiveTime(ceil(time_ns), "curve", not curve.covers(size_bytes))


def curve_of(
    cluster: Cluster, collective: Collective, group: RankGroup, dtype: str | None,
    sums: Sums | None = None,
) -> CollectiveCurve | None:  # fmt: skip
    """The curve that the profile has for a collective of a group, of the nearest sums and dtype."""
    found = [
        curve
        for curve in cluster.curves
        if (curve.collective, curve.ranks, curve.ranks_per_node)
        == (collective, group.ranks, group.ranks_per_node)
    ]
    for maker in dict.fromkeys((sums, None)):
        if made := [curve for curve in found if curve.sums == maker]:
            found = made
            break
    wanted = (dtype, None, *_SIXTEEN_BITS) if dtype else (None, *_SIXTEEN_BITS)
    for name in wanted:
        for curve in found:
            if curve.dtype == name:
                return curve
    return min(found, key=lambda curve: curve.key, default=None)


def least_of_algorithms(
    cluster: Cluster, collective: Collective, size_bytes: float, group: RankGroup, dtype: str | None
) -> tuple[float, str]:
    """The fastest closed form and its name; ties go to the first of the alphabet.

    Raises:
        MissingNetworkNumberError: the profile lacks a number that it needs.
    """
    start_ns = cluster.number("collective_latency_ns")
    inside = node_link(cluster) if group.ranks_per_node > 1 else None
    if group.within_a_node:
        assert inside is not None
        return _least(collective, group.ranks, size_bytes, inside, start_ns)
    outside = network_link(cluster, group)
    if collective == "send_recv":
        return _least(collective, group.ranks, size_bytes, outside, start_ns)
    if inside is None:
        return _least(collective, group.nodes, size_bytes, outside, start_ns)
    if collective == "all_to_all":
        return start_ns + _all_to_all(size_bytes, group, inside, outside), "two_level"
    found = _flat(collective, size_bytes, group, inside, outside)
    found.append((_two_level(cluster, collective, size_bytes, group, dtype), "two_level"))
    return min((start_ns + time_ns, name) for time_ns, name in found)


def _least(
    collective: Collective, ranks: int, size_bytes: float, link: Link, start_ns: float
) -> tuple[float, str]:
    return min(
        (start_ns + time(ranks, size_bytes, link), name)
        for name, time in algorithms_of(collective, link).items()
    )


def _flat(
    collective: Collective, size_bytes: float, group: RankGroup, inside: Link, outside: Link
) -> list[tuple[float, str]]:
    """Rings and trees through all ranks, one a rail, which enter and leave each node once.

    A rail's ring carries its share of the bytes, so that together they have the rate of all NICs;
    a step within a node costs what it does there.
    """
    link = Link(min(inside.rate, outside.rate * group.ranks_per_node), outside.step_ns)
    laps = 2 if collective == "all_reduce" else 1
    saved_ns = {
        "ring": laps * (group.ranks - group.nodes) * (outside.step_ns - inside.step_ns),
        # A tree joins nodes; within one it is a chain.
        "tree": 2 * ceil_log2(group.ranks) * outside.step_ns
        - 2 * ceil_log2(group.nodes) * outside.step_ns
        - 2 * (group.ranks_per_node - 1) * inside.step_ns,
    }
    return [
        (time(group.ranks, size_bytes, link) - saved_ns[name], name)
        for name, time in algorithms_of(collective, link).items()
    ]


def _two_level(
    cluster: Cluster, collective: Collective, size_bytes: float, group: RankGroup, dtype: str | None
) -> float:
    """Inside each node, then each rank with its peers of the other nodes, then inside again.

    A rank's share between nodes is S / ranks per node, over its rail; phases follow one another,
    in one kernel: only the first has a start, which is not in here.
    """
    inner = on_one_node(group.ranks_per_node)
    outer = RankGroup(
        ranks=group.nodes, ranks_per_node=1, sharing=group.sharing * group.ranks_per_node
    )
    halves: tuple[Collective, ...] = (collective,)
    if collective == "all_reduce":
        halves = ("reduce_scatter", "all_gather")
    time_ns = 0.0
    for half in halves:
        curve = curve_of(cluster, half, inner, dtype)
        if curve is not None:
            time_ns += curve.time_ns(size_bytes)
        else:
            time_ns += least_of_algorithms(cluster, half, size_bytes, inner, dtype)[0]
    share = size_bytes / group.ranks_per_node
    start_ns = cluster.number("collective_latency_ns")  # each phase begins with it
    time_ns += least_of_algorithms(cluster, collective, share, outer, dtype)[0]
    return max(0.0, time_ns - (len(halves) + 1) * start_ns)


def _all_to_all(size_bytes: float, group: RankGroup, inside: Link, outside: Link) -> float:
    """Take the longer of what stays in the node and what leaves it, over different links."""
    to_a_rank = size_bytes / group.ranks
    within_ns = (group.ranks_per_node - 1) * to_a_rank / inside.rate
    between_ns = (group.ranks - group.ranks_per_node) * to_a_rank / outside.rate
    return outside.step_ns + max(within_ns, between_ns)


def ceil_log2(count: int) -> int:
    """Levels of a binary tree over so many: 3 of 8, 4 of 9."""
    return (count - 1).bit_length()
