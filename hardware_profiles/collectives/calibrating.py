"""Measured collectives in, a cluster's profile with their curves out."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.collectives.fitting import FittedCurve, fit_curves
from twinstream.hardware_profiles.collectives.points import CollectivePoint
from twinstream.hardware_profiles.errors import CollectiveTableError


@dataclass(frozen=True)
class CalibratedCluster:
    """The profile with its new curves, and how each of them was come to."""

    cluster: Cluster
    fitted: tuple[FittedCurve, ...]


def calibrated(
    cluster: Cluster, points: Sequence[CollectivePoint], name: str, source: str, today: date
) -> CalibratedCluster:
    """The cluster under a new name, with a curve for each series of points beside its others.

    Args:
        source: what the points are called in the curves' source: a file's name.

    Raises:
        CollectiveTableError: a series has one size, or more ranks a node than the cluster has.
    """
    gpus = cluster.count("gpus_per_node")
    for point in points:
        if point.ranks_per_node > gpus:
            raise CollectiveTableError(
                f"{source} has {point.ranks_per_node} ranks on one node, and a node of cluster "
                f"'{cluster.name}' has {gpus} GPUs: give the profile of the cluster it was "
                "measured on"
            )
    of_gpu = f" on {points[0].gpu}" if points and points[0].gpu else ""
    fitted = fit_curves(points, f"{source}{of_gpu}, calibrated {today.isoformat()}")
    replaced = {one.curve.key for one in fitted}
    kept = tuple(curve for curve in cluster.curves if curve.key not in replaced)
    curves = (*kept, *(one.curve for one in fitted))
    return CalibratedCluster(cluster.model_copy(update={"name": name, "curves": curves}), fitted)
