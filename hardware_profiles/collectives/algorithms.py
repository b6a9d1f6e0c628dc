"""Times of the algorithms of collectives, in closed form.

One rank sends `rate` bytes a nanosecond and receives as many at the same time; one step costs
`step_ns` beside its bytes. Bytes are nccl-tests' size S: the larger of what a rank gives and what
it receives. A collective's start is not in here.

Sources: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH
(2005), for ring, pairwise and their alpha-beta costs; Sanders, Speck, Traeff, Two-tree algorithms
for full bandwidth broadcast, reduction and scan (2009); Klenk et al., An In-Network Architecture
for Accelerating Shared-Memory Multiprocessor Collectives (ISCA 2020), for in-switch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2

from twinstream.hardware_profiles.clusters.curves import Collective
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.collectives.rank_group import RankGroup, RankGroupError


@dataclass(frozen=True)
class Link:
    """The link from one rank to the others: bytes per ns and direction, ns per step.

    `in_switch_rate`: bytes per ns of a rank while switches reduce and multicast; None where they
    do not.
    """

    rate: float
    step_ns: float
    in_switch_rate: float | None = None


Algorithm = Callable[[int, float, Link], float]


def ring(ranks: int, size_bytes: float, link: Link) -> float:
    """Reduce-scatter or all-gather: ranks - 1 steps of S / ranks.

    >>> ring(4, 400.0, Link(rate=1.0, step_ns=10.0))
    330.0
    """
    return (ranks - 1) * (link.step_ns + size_bytes / ranks / link.rate)


def ring_all_reduce(ranks: int, size_bytes: float, link: Link) -> float:
    """A reduce-scatter and an all-gather."""
    return 2 * ring(ranks, size_bytes, link)


def tree_all_reduce(ranks: int, size_bytes: float, link: Link) -> float:
    """Up and down a double binary tree, pipelined: every rank sends and receives 2 S."""
    return 2 * (ceil(log2(ranks)) * link.step_ns + size_bytes / link.rate)


def in_switch_all_reduce(ranks: int, size_bytes: float, link: Link) -> float:
    """Each rank has the switch reduce its share and send the result to all: S + S / ranks each way.

    The others read S of a rank's contribution while it sends its own share's result.
    """
    assert link.in_switch_rate is not None
    return 2 * link.step_ns + size_bytes * (1 + 1 / ranks) / link.in_switch_rate


def in_switch_half(ranks: int, size_bytes: float, link: Link) -> float:
    """Reduce-scatter (every rank's S is read once) or all-gather (every rank receives S)."""
    assert link.in_switch_rate is not None
    return link.step_ns + size_bytes / link.in_switch_rate


def pairwise(ranks: int, size_bytes: float, link: Link) -> float:
    """All-to-all: ranks - 1 messages of S / ranks, sent together: they share one start."""
    return link.step_ns + (ranks - 1) * size_bytes / ranks / link.rate


def message(ranks: int, size_bytes: float, link: Link) -> float:
    """Send and receive: S in one step, whoever else does so too."""
    return link.step_ns + size_bytes / link.rate


_BY_LINK: Mapping[Collective, Mapping[str, Algorithm]] = {
    "all_reduce": {"ring": ring_all_reduce, "tree": tree_all_reduce},
    "reduce_scatter": {"ring": ring},
    "all_gather": {"ring": ring},
    "all_to_all": {"pairwise": pairwise},
    "send_recv": {"message": message},
}
_IN_SWITCH: Mapping[Collective, Algorithm] = {
    "all_reduce": in_switch_all_reduce,
    "reduce_scatter": in_switch_half,
    "all_gather": in_switch_half,
}


def algorithms_of(collective: Collective, link: Link) -> dict[str, Algorithm]:
    """Return the algorithms that can carry a collective over a link, by name."""
    found = dict(_BY_LINK[collective])
    if link.in_switch_rate is not None and collective in _IN_SWITCH:
        found["in_switch"] = _IN_SWITCH[collective]
    return found


_NS = 1e-9


def require_room(cluster: Cluster, group: RankGroup) -> None:
    """Refuse a group that the cluster cannot hold.

    Raises:
        RankGroupError: a node has fewer GPUs, or the cluster fewer nodes.
        MissingNetworkNumberError: the profile does not state how many GPUs a node has.
    """
    gpus = cluster.count("gpus_per_node")
    if group.ranks_per_node > gpus:
        raise RankGroupError(
            f"{group.ranks_per_node} ranks a node, and a node of cluster '{cluster.name}' has "
            f"{gpus} GPUs"
        )
    if cluster.most_nodes is not None and group.nodes > cluster.count("most_nodes"):
        raise RankGroupError(
            f"{group.nodes} nodes, and cluster '{cluster.name}' has {cluster.count('most_nodes')}"
        )


def node_link(cluster: Cluster) -> Link:
    """Return the link between GPUs of a node.

    Raises:
        MissingNetworkNumberError: the profile lacks a rate, an efficiency or a latency.
    """
    nominal = cluster.number("node_bytes_per_s") * _NS
    in_switch = None
    if cluster.node_in_switch_efficiency is not None:
        in_switch = nominal * cluster.number("node_in_switch_efficiency")
    return Link(
        nominal * cluster.number("node_efficiency"), cluster.number("node_latency_ns"), in_switch
    )


def network_link(cluster: Cluster, group: RankGroup) -> Link:
    """Return the link between nodes, as one of the group's ranks on a node has it.

    A rank has its own rail, or its equal share of the node's NICs where more ranks than NICs use
    them at once. The level that joins the group's nodes sets oversubscription and latency.

    Raises:
        MissingNetworkNumberError: as `node_link`.
    """
    nic, num_nics = cluster.number("nic_bytes_per_s") * _NS, cluster.number("nics_per_node")
    rail = max(1.0, num_nics / cluster.number("gpus_per_node"))
    share = min(rail, num_nics / (group.ranks_per_node * group.sharing))
    oversubscription, latency_ns = _levels(cluster, group.nodes)
    nominal = nic * share / oversubscription
    in_switch = None
    if cluster.network_in_switch_efficiency is not None:
        in_switch = nominal * cluster.number("network_in_switch_efficiency")
    step_ns = cluster.number("network_latency_ns") + latency_ns
    return Link(nominal * cluster.number("network_efficiency"), step_ns, in_switch)


def _levels(cluster: Cluster, nodes: int) -> tuple[float, float]:
    """Oversubscription and latency on the way through the lowest level that joins so many nodes.

    Oversubscription is the worst on the way, latencies add up.

    Raises:
        RankGroupError: no level joins them.
    """
    worst, latency_ns = 1.0, 0.0
    for level in cluster.levels:
        assert level.nodes.value and level.oversubscription.value  # the schema has checked
        worst = max(worst, level.oversubscription.value)
        latency_ns += level.latency_ns.value or 0.0
        if nodes <= level.nodes.value:
            return worst, latency_ns
    if cluster.levels:
        raise RankGroupError(
            f"{nodes} nodes, and the levels of cluster '{cluster.name}' join at most "
            f"{cluster.levels[-1].nodes.value:g}: state a level above"
        )
    return worst, latency_ns
