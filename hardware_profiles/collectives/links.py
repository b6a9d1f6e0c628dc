"""The links of one rank of a group, inside its node and between nodes, by a cluster's numbers."""

from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.collectives.algorithms import Link
from twinstream.hardware_profiles.collectives.rank_group import RankGroup, RankGroupError

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
