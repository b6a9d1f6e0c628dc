"""Tables of clusters and of the curves of their collectives."""

from collections.abc import Sequence

from rich.console import Group

from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.collectives.fitting import FittedCurve
from twinstream.screens.tables import listing_table, number_text


def clusters_table(clusters: Sequence[Cluster]) -> Group:
    """What each cluster is made of; rates are nominal, of one direction."""
    columns = ("GPUs/node", "GPU GB/s", "NICs/node", "NIC GB/s", "most nodes", "curves")
    table = listing_table(("name", "node"), columns)
    table.columns[0].no_wrap = True  # a name is there to be copied
    for one in clusters:
        table.add_row(
            one.name,
            one.machine,
            number_text(one.gpus_per_node, 1),
            number_text(one.node_bytes_per_s, 1e9),
            number_text(one.nics_per_node, 1),
            number_text(one.nic_bytes_per_s, 1e9),
            number_text(one.most_nodes, 1),
            str(len(one.curves)),
        )
    return Group("Clusters", table)


def curves_table(fitted: Sequence[FittedCurve]) -> Group:
    """Each curve that was made, with how far it is off on its points and on sizes left out."""
    table = listing_table(
        ("collective", "ranks", "a node", "dtype", "form"), ("points", "error", "left out")
    )
    for one in fitted:
        curve = one.curve
        unseen = "-" if one.left_out_error is None else f"{one.left_out_error:.1%}"
        table.add_row(
            curve.collective.replace("_", "-"),
            str(curve.ranks),
            str(curve.ranks_per_node),
            curve.dtype or "any",
            curve.form,
            str(one.num_points),
            f"{one.error:.1%}",
            unseen,
        )
    told = "Left out: each size but the least and the most, by a curve made of the others."
    return Group("Curves of collectives", table, told)
