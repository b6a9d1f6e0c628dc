"""What ranks measured, on the page of a cluster: their lanes, and how far predictions were off."""

from twinstream.measures.cluster_comparison import by_rank, compare_cluster
from twinstream.report.cluster.lane_bars import merged_bars
from twinstream.report.cluster.lanes import ClusterView, shown_classes
from twinstream.report.cluster.lanes_figure import lanes_figure
from twinstream.report.page import Section, Table
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.screens.cluster_screen import MOST_CLASSES
from twinstream.screens.tables import pair_ns, readable


def measured_sections(
    schedule: ClusterSchedule, predicted: ClusterTimeline, measured: ClusterTimeline | None
) -> list[Section]:
    """None where nothing was measured.

    Raises:
        TimelineMismatch: one of them is of another schedule.
    """
    if measured is None:
        return []
    found = compare_cluster(schedule, predicted, measured)
    view = ClusterView(*by_rank(schedule, measured))
    classes = shown_classes(view.classes, MOST_CLASSES)
    rows = [("all ranks", "step time", *pair_ns(found.step_ns))]
    rows += [("all ranks", readable(kind.name), *pair_ns(kind.busy_ns)) for kind in found.kinds]
    for one in found.ranks:
        groups = (*one.comparison.streams, *one.said)
        rows += [(one.name, readable(group.name), *pair_ns(group.busy_ns)) for group in groups]
    heads = ("rank", "time of", "predicted", "measured", "error")
    return [
        Section(
            "As measured",
            "The last step of the ranks that ran, on one clock, right within "
            f"{found.clock_error_ns / 1e3:.0f} us: by the shortest of 16 round trips to rank 0. "
            "What is said begins once all sides have come.",
            lanes_figure(classes, merged_bars(classes, view.whole), view.whole),
        ),
        Section(
            "Predicted against measured",
            "Busy time in a step, mean of the passes. By stream what is said lasts from when the "
            "rank has come; below it is cut into waiting for others, and the rest.",
            Table(heads, rows, num_left=2),
        ),
    ]
