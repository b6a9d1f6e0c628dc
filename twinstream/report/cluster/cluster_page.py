"""`twinstream report` of a cluster: lanes of all classes, exposed communication, memory."""

from collections.abc import Sequence

import plotly.graph_objects as go

from twinstream.measures.cluster_comparison import by_rank
from twinstream.measures.cluster_summary import ClusterSummary
from twinstream.measures.metrics import rate_text
from twinstream.report.cluster.lane_bars import (
    MOST_OPS,
    merged_bars,
    op_bars,
    shrunk,
    waiting_bars,
)
from twinstream.report.cluster.lanes import ClassLanes, ClusterView, shown_classes
from twinstream.report.cluster.lanes_figure import lanes_figure
from twinstream.report.cluster.measured_sections import MeasuredRanks
from twinstream.report.cluster.share_figures import (
    MEAN,
    exposed_figure,
    memory_figure,
)
from twinstream.report.page import Card, Page, Section, Table, html_of
from twinstream.report.view import Span
from twinstream.schedule.analysis.idle import BUBBLE
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.sizes import gib
from twinstream.screens.cluster_screen import MOST_CLASSES, causes_shown
from twinstream.screens.tables import cause_name, seconds


def cluster_html(
    schedule: ClusterSchedule,
    timeline: ClusterTimeline,
    summary: ClusterSummary,
    where: str,
    *,
    measured: ClusterTimeline | None = None,
    notes: Sequence[str] = (),
) -> str:
    """One self-contained page about a cluster's schedule and its timeline.

    Args:
        summary: of this timeline (`summarize_cluster`).
        where: the name of the cluster.
        measured: of ranks that ran; all of them are shown beside.
        notes: sentences about the prediction.

    Raises:
        TimelineMismatch: a timeline is not of this schedule.
    """
    view = ClusterView(schedule, timeline)
    ran = None if measured is None else MeasuredRanks(schedule, timeline, measured, summary)
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in schedule.mesh.axes)
    name = schedule.model.get("name", "a model")
    return html_of(
        Page(
            title=f"{name} on {summary.num_gpus:,} {summary.devices} of {where}",
            subtitle=f"{mesh}; {summary.tokens_per_step:,} tokens a step, "
            f"{_layout_told(schedule)}. Predicted: {timeline.provenance.description}."
            + ("" if measured is None else f" Measured: {measured.provenance.description}.")
            + "".join(f" {note}" for note in (*notes, *_sentence(summary))),
            cards=[*([] if ran is None else ran.cards()), *_cards(summary)],
            sections=_sections(view, summary, ran),
            footer="Made by twinstream report. Lanes show the last simulated pass; shares of a "
            "class's step are of its own pass, from the end of compute in the pass before to its "
            "own. A figure is zoomed by dragging along it, and reset by a double click; a click on "
            "the legend hides, a double click isolates.",
        )
    )


def cluster_sections(
    schedule: ClusterSchedule,
    timeline: ClusterTimeline,
    summary: ClusterSummary,
    measured: ClusterTimeline | None = None,
) -> list[Section]:
    """What the page has of a step, for other pages.

    Raises:
        TimelineMismatch: a timeline is not of this schedule.
    """
    ran = None if measured is None else MeasuredRanks(schedule, timeline, measured, summary)
    return _sections(ClusterView(schedule, timeline), summary, ran)


def step_figures(
    schedule: ClusterSchedule, timeline: ClusterTimeline, measured: ClusterTimeline | None = None
) -> list[go.Figure]:
    """The lanes of a whole step, of at most 16 classes; below, of the ranks that ran, as long."""
    views = [ClusterView(schedule, timeline)]
    if measured is not None:
        views.append(ClusterView(*by_rank(schedule, measured)))
    lasting_ns = max(view.whole.lasting_ns for view in views)
    return [
        _lanes(shown_classes(view.classes, MOST_CLASSES), view.whole, _axis(view, lasting_ns))
        for view in views
    ]


def _axis(view: ClusterView, lasting_ns: int) -> Span:
    return Span(view.whole.start_ns, view.whole.start_ns + lasting_ns)


def _lanes(classes: Sequence[ClassLanes], whole: Span, axis: Span) -> go.Figure:
    bars, waits = merged_bars(classes, whole), waiting_bars(classes, whole)
    return lanes_figure(classes, bars, axis, waits)


def _layout_told(schedule: ClusterSchedule) -> str:
    """What of the layout does not show in the mesh."""
    names = ("pipeline", "micro_batch", "zero", "recompute")
    said = (f"{name.replace('_', '-')} {schedule.layout[name]}" for name in names
            if name in schedule.layout)  # fmt: skip
    most = "at most " if schedule.is_packed else ""
    sequences = f"{schedule.global_batch:,} sequences of {most}{schedule.seq_len:,}"
    return ", ".join((sequences, *said))


def _error(summary: ClusterSummary) -> str:
    """What stands below a predicted number."""
    return "predicted" + ("" if summary.uncertainty is None else f", {summary.uncertainty.short}")


def _sentence(summary: ClusterSummary) -> list[str]:
    return [] if summary.uncertainty is None else [summary.uncertainty.sentence]


def _cards(summary: ClusterSummary) -> list[Card]:
    fullest = summary.fullest
    taken = gib(sum(summary.memory_bytes[fullest].values()))
    has = "" if summary.device_bytes is None else f" of {gib(summary.device_bytes)}"
    if summary.missing_bytes:
        has += f": {gib(summary.missing_bytes)} are missing"
    mean = summary.mean_fraction
    waits = {name: share for name, share in mean.items() if name != "compute"}
    cards = [
        Card("throughput, tokens/s", rate_text(summary.tokens_per_s), _error(summary)),
        Card("step time", seconds(summary.step_time_s),
             f"{_error(summary)}; the first, cold one {seconds(summary.cold_step_time_s)}"),
        Card("MFU", f"{summary.mfu:.1%}", f"of the peak of all {summary.devices}"),
        Card(summary.devices, f"{summary.num_gpus:,}", f"{len(summary.exposed)} classes of ranks"),
        Card("device memory", taken, f"class '{fullest}', the fullest{has}"),
        Card("compute waits", f"{sum(waits.values()):.1%}", "of the step, mean of ranks"),
    ]  # fmt: skip
    if host_bytes := max(summary.host_bytes.values()):
        cards.append(Card("host memory", gib(host_bytes), "of the rank that takes most"))
    if BUBBLE in waits:
        cards.append(Card("bubble", f"{waits.pop(BUBBLE):.1%}", "of the step, mean of ranks"))
    if waits:
        cause = max(waits, key=waits.__getitem__)
        cards.append(Card("exposed most", cause_name(cause), f"{waits[cause]:.1%} of the step"))
    return cards


def _sections(
    view: ClusterView, summary: ClusterSummary, ran: MeasuredRanks | None
) -> list[Section]:
    classes = shown_classes(view.classes, MOST_CLASSES)
    names = [one.name for one in classes]
    few = ""
    if len(names) < len(view.classes):
        few = (
            f" {len(names)} of {len(view.classes)} classes are shown, the first, the last and "
            "others at equal distances; the means are over all."
        )
    whole = view.whole
    lasting_ns = max(whole.lasting_ns, 0 if ran is None else ran.lasting_ns)
    return [
        Section(
            "The whole step" if ran is None else "The whole step, as predicted",
            "A group of lanes for each class of ranks: compute by phase, below it what is said, by "
            "axis, from when all its sides have come; before that whoever has come waits for the "
            "others. Where there are too many ops, those near to each other are one bar that is as "
            f"long as they together.{few}",
            _lanes(classes, whole, _axis(view, lasting_ns)),
        ),
        *([] if ran is None else [ran.lanes(lasting_ns)]),
        *_window(view, classes),
        Section(
            "Where the step goes, and what compute waited for",
            "A gap of compute is followed back from the op that ended it: what was under way is "
            "its cause, and before that the other side, which had not come yet (along the pipeline "
            f"a bubble).{few}",
            exposed_figure(summary, names),
        ),
        *([] if ran is None else [ran.exposed()]),
        Section(
            "Device memory of a rank",
            "What the arena of each class holds, by role of the tensors (where slots share bytes, "
            f"at the fullest moment of the step), and the reserve.{few}",
            memory_figure(summary, names),
        ),
        Section("Exposed time by class", "Per cent of the step of each class.",
                _table(summary, names)),
        *([] if ran is None else [ran.compared()]),
    ]  # fmt: skip


def _window(view: ClusterView, classes: list[ClassLanes]) -> list[Section]:
    """The middle of a long step, op by op."""
    window = shrunk(classes, view.whole, MOST_OPS)
    if window == view.whole:
        return []
    text = (
        f"{seconds(window.lasting_ns / 1e9)} around the middle of the step, op by op; hover says "
        "op, bytes, and who was waited for."
    )
    bars, waits = op_bars(classes, window), waiting_bars(classes, window)
    return [Section("A window", text, lanes_figure(classes, bars, window, waits))]


def _table(summary: ClusterSummary, names: list[str]) -> Table:
    causes = ["compute", *causes_shown(summary.exposed)]
    parts = {
        one.name: (one.num_ranks, one.fractions) for one in summary.exposed if one.name in names
    }
    rows = [*parts.items(), (MEAN, (summary.num_gpus, summary.mean_fraction))]
    return Table(
        ("class", "ranks", *map(cause_name, causes)),
        [
            (name, f"{ranks:,}", *(f"{100 * found[c]:.2f}" if c in found else "-" for c in causes))
            for name, (ranks, found) in rows
        ],
    )
