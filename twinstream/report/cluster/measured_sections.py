"""What ranks measured, on the page of a cluster: their lanes, and how far predictions were off."""

from twinstream.measures.cluster_comparison import by_rank, compare_cluster
from twinstream.measures.cluster_summary import ClusterSummary
from twinstream.measures.metrics import rate_text
from twinstream.report.cluster.lane_bars import merged_bars, waiting_bars
from twinstream.report.cluster.lanes import ClusterView, shown_classes
from twinstream.report.cluster.lanes_figure import lanes_figure
from twinstream.report.cluster.share_figures import exposed_figure
from twinstream.report.page import Card, Section, Table
from twinstream.report.view import Span
from twinstream.schedule.analysis.comparison import GroupComparison
from twinstream.schedule.analysis.idle import exposed_times, mean_fractions
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.screens.cluster_screen import MOST_CLASSES
from twinstream.screens.tables import pair_ns, readable, seconds


class MeasuredRanks:
    """Cards and sections of what ranks measured beside what was predicted of their classes.

    Args:
        summary: of the prediction.

    Raises:
        TimelineMismatch: one of the timelines is of another schedule.
    """

    def __init__(
        self,
        schedule: ClusterSchedule,
        predicted: ClusterTimeline,
        measured: ClusterTimeline,
        summary: ClusterSummary,
    ) -> None:
        self._found = compare_cluster(schedule, predicted, measured)
        cut, after = by_rank(schedule, measured)
        self._view = ClusterView(cut, after)
        self._classes = shown_classes(self._view.classes, MOST_CLASSES)
        exposed = exposed_times(cut, after)
        self._summary = summary.model_copy(
            update={
                "step_time_s": measured.step_ns / 1e9,
                "tokens_per_s": summary.tokens_per_step / (measured.step_ns / 1e9),
                "exposed": exposed,
                "uncertainty": None,
                "mean_fraction": mean_fractions(exposed),
            }
        )

    @property
    def lasting_ns(self) -> int:
        """Of the step that is drawn."""
        return self._view.whole.lasting_ns

    def cards(self) -> list[Card]:
        """The step as measured, and how far its prediction is off."""
        off = f"predicted is {self._found.step_ns.error:+.1%}"
        waits = 1.0 - self._summary.mean_fraction.get("compute", 0.0)
        return [
            Card("measured, tokens/s", rate_text(self._summary.tokens_per_s), off),
            Card("measured step time", seconds(self._summary.step_time_s),
                 f"the first, cold one {seconds(self._found.cold_ns.measured / 1e9)}"),
            Card("measured: compute waits", f"{waits:.1%}", "of the last step, mean of ranks"),
        ]  # fmt: skip

    def lanes(self, lasting_ns: int) -> Section:
        """All ranks, on an axis that is so long."""
        whole = self._view.whole
        bars = merged_bars(self._classes, whole)
        axis = Span(whole.start_ns, whole.start_ns + lasting_ns)
        return Section(
            "The whole step, as measured",
            "The last step that was timed, a group of lanes for each rank, on one clock that is "
            f"right within {self._found.clock_error_ns / 1e3:.0f} us (the shortest of 16 round "
            "trips to rank 0). The axis is as long as that of the prediction.",
            lanes_figure(self._classes, bars, axis, waiting_bars(self._classes, whole)),
        )

    def exposed(self) -> Section:
        """What compute waited for."""
        names = [one.name for one in self._classes]
        return Section(
            "What compute waited for, as measured",
            "Of each rank's last step, by the same rule. What is under way takes a core, too, "
            "where ranks share cores.",
            exposed_figure(self._summary, names),
        )

    def compared(self) -> Section:
        """Busy times by kind of op over all ranks, and by stream of each."""
        found = self._found
        rows = [("all ranks", "step time", *pair_ns(found.step_ns))]
        rows += [("all ranks", readable(kind.name), *pair_ns(kind.busy_ns)) for kind in found.kinds]
        for one in found.ranks:
            groups = (*one.comparison.streams, *one.said)
            rows += [(one.name, _name(group), *pair_ns(group.busy_ns)) for group in groups]
        heads = ("rank", "time of", "predicted", "measured", "error")
        return Section(
            "Predicted against measured",
            "Busy time in a step, mean of the passes. By stream what is said lasts from when the "
            "rank has come; below it is cut into waiting for others, and the rest.",
            Table(heads, rows, num_left=2),
        )


def _name(group: GroupComparison) -> str:
    """Of a stream its queue, without the device before it, which is each rank's own."""
    return readable(group.name.rpartition(":")[2])
