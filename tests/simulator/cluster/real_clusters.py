"""Schedules on shipped clusters, and when each of their ops runs."""

from collections.abc import Mapping

from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import PassSpans, RankTimeline, Timeline
from twinstream.simulator.network_costs import ClusterCosts
from twinstream.simulator.replay import replay_cluster

Spans = dict[str, tuple[tuple[int, int], ...]]  # by op: (start, end) in each pass


def calm_cluster(name: str) -> Cluster:
    """A shipped cluster whose collectives take a tenth of the compute.

    Where several together take more than there is, a rank's own and those of its class share it
    otherwise, and neither is a ring quite its class nor a step linear in its microbatches.
    """
    cluster = load_cluster(name)
    assert cluster.compute_lost is not None
    lost = cluster.compute_lost.model_copy(update={"value": 0.1})
    return cluster.model_copy(update={"compute_lost": lost})


def two_passes(
    schedule: Schedule, name: str, machines: Mapping[str, Machine] | None = None
) -> Timeline:
    """Of exactly two passes, with the prices of a `calm_cluster`."""
    cluster = calm_cluster(name)
    costs = ClusterCosts(schedule, cluster, machine_of(cluster), machines)
    return replay_cluster(schedule, costs, name, num_passes=2)


def spans_of(timeline: RankTimeline) -> Spans:
    """Of all its passes; by op, since issue order may differ between classes."""
    assert timeline.cold is not None
    passes: list[PassSpans] = [timeline.cold, *timeline.passes]
    columns = [tuple(zip(one.start_ns, one.end_ns, strict=True)) for one in passes]
    return dict(zip(timeline.op_ids, zip(*columns, strict=True), strict=True))
