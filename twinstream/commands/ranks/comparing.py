"""`compare` of a cluster's schedule: each rank measured with its class predicted."""

from pathlib import Path

from twinstream.commands.arguments.inputs import read_as
from twinstream.commands.arguments.options import Profiles
from twinstream.commands.cluster_inputs import cluster_inputs, measured_of_cluster, read_cluster
from twinstream.commands.output import print_json, print_report, progress
from twinstream.measures.cluster_comparison import ClusterComparison, compare_cluster
from twinstream.planner.planner import gc_paused
from twinstream.schedule.analysis.comparison import GroupComparison, Pair
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.screens.ranks_compared import ranks_compared_tables


def compare_cluster_file(
    path: Path, predicted: Path | None, measured: Path, where: Profiles, *, as_json: bool
) -> None:
    """Join the timelines; without a prediction the schedule is simulated on its cluster.

    Raises:
        TwinstreamError: a file holds something else, or no cluster is known.
    """
    with progress(f"comparing {measured}", quiet=as_json), gc_paused():
        if predicted is None:
            inputs = cluster_inputs(path, where)
            schedule, before = inputs.schedule, inputs.timeline()
        else:
            schedule, before = read_cluster(path), read_as(ClusterTimeline, predicted)
        found = compare_cluster(schedule, before, measured_of_cluster(schedule, measured))
    if as_json:
        print_json(comparison_json(found))
    else:
        print_report(*ranks_compared_tables(found))


def comparison_json(found: ClusterComparison) -> dict[str, object]:
    """Everything that is joined, with its errors."""
    return {
        "step_ns": _pair(found.step_ns),
        "cold_ns": _pair(found.cold_ns),
        "clock_error_ns": found.clock_error_ns,
        "kinds": [_group(group) for group in found.kinds],
        "ranks": [
            {
                "name": one.name,
                "step_ns": _pair(one.comparison.step_ns),
                "kinds": [_group(group) for group in one.comparison.kinds],
                "streams": [_group(group) for group in one.comparison.streams],
                "said": [_group(group) for group in one.said],
                "worst_ops": [
                    op.model_dump() | {"error": op.duration_ns.error}
                    for op in one.comparison.worst_ops
                ],
            }
            for one in found.ranks
        ],
    }


def _pair(pair: Pair) -> dict[str, float]:
    return pair.model_dump() | {"error": pair.error}


def _group(group: GroupComparison) -> dict[str, object]:
    return group.model_dump() | {"error": group.busy_ns.error}
