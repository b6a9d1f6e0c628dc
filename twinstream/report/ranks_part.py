"""The part of a page on the ranks of a mesh: lanes, exposed time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import plotly.graph_objects as go

from twinstream.hardware_profiles.schema import Machine
from twinstream.log.layout_choice import LayoutChoice
from twinstream.log.run_files import CLUSTER
from twinstream.measures.metrics import Summary, summarize
from twinstream.report.bars import MOST_OPS, shrunk
from twinstream.report.lanes_figure import lanes_figure
from twinstream.report.page import Card, Section, Table, Text
from twinstream.report.share_figures import MEAN, device_memory_figure, exposed_figure
from twinstream.report.view import MeshView, Span, shown_classes
from twinstream.schedule.analysis.comparison import GroupComparison, by_rank, compare
from twinstream.schedule.document import Schedule
from twinstream.schedule.sizes import gib
from twinstream.schedule.timeline import Timeline
from twinstream.screens.ranks_screen import MOST_CLASSES, causes_shown, layout_line, mesh_text
from twinstream.screens.tables import cause_name, pair_ns, readable, seconds


@dataclass(frozen=True)
class RanksPart:
    """A mesh's schedule as predicted, and what ranks measured; what is None is not there (yet).

    Attributes:
        machine: the profile of a node.
        choice: why a run has its layout.
        notes: sentences about the prediction.
    """

    schedule: Schedule
    predicted: Timeline
    machine: Machine
    measured: Timeline | None = None
    choice: LayoutChoice | None = None
    notes: Sequence[str] = ()

    @cached_property
    def summary(self) -> Summary:
        """Return the figures of the predicted timeline."""
        return summarize(self.schedule, self.predicted, self.machine)

    @cached_property
    def ran(self) -> Summary | None:
        """Return the figures of the measured timeline, a class for each rank; None without one."""
        if self.measured is None:
            return None
        return summarize(*by_rank(self.schedule, self.measured), self.machine)

    @property
    def told(self) -> str:
        """Model, ranks, layout and step, and the notes."""
        tokens = self.summary.tokens_per_step
        line = f"{layout_line(self.schedule)}, by {CLUSTER}; {tokens:,} tokens a step."
        error = self.summary.uncertainty
        return " ".join((line, *self.notes, *([] if error is None else [error.sentence])))

    @property
    def layout_told(self) -> str:
        """Return the parts of the layout that the mesh does not show, as text."""
        names = ("pipeline", "micro_batch", "zero", "recompute")
        layout = self.schedule.layout
        said = (f"{name.replace('_', '-')} {layout[name]}" for name in names if name in layout)
        most = "at most " if self.schedule.is_packed else ""
        sequences = f"{self.schedule.global_batch:,} sequences of {most}{self.schedule.seq_len:,}"
        return ", ".join((sequences, *said))

    def run_cards(self) -> list[Card]:
        """Return two cards for the page of a run: the layout, and the fullest stage's memory."""
        fullest = self.summary.fullest
        cap_bytes = self.schedule.schedules[fullest].caps.device_bytes
        cap = "no cap" if cap_bytes is None else f"cap {gib(cap_bytes)}"
        taken = gib(self.summary.device_peak_bytes)
        pipeline = self.schedule.layout["pipeline"]
        return [
            Card("layout", mesh_text(self.schedule), f"{pipeline}; {self._why}"),
            Card("device memory of a rank", taken, f"'{fullest}', the fullest; {cap}"),
        ]

    def run_sections(self) -> list[Section]:
        """Return sections for the page of a run: how the layout was chosen, and the step.

        Raises:
            TimelineMismatch: a timeline is not of the schedule.
        """
        if self.choice is None:
            return self.sections()
        others = "\n".join(self.choice.others)
        text = f"{self.choice.chosen}: {self._why}. Assumed: {self.choice.assumed}."
        text += " The others, with what is predicted of them or why they are none:" * bool(others)
        layout = Section("Layout", text, Text(others) if others else None)
        return [layout, *self.sections()]

    @property
    def _why(self) -> str:
        return "as asked" if self.choice is None else self.choice.why

    @cached_property
    def _views(self) -> list[MeshView]:
        views = [MeshView("predicted", self.schedule, self.predicted)]
        if self.measured is not None:
            views.append(MeshView("measured", *by_rank(self.schedule, self.measured)))
        return views

    def figures(self) -> list[go.Figure]:
        """The lanes of a whole step, of at most 16 classes; below, of the ranks that ran, as long.

        Raises:
            TimelineMismatch: a timeline is not of the schedule.
        """
        lasting_ns = max(view.whole.lasting_ns for view in self._views)
        return [
            lanes_figure(
                shown_classes(view.classes, MOST_CLASSES),
                view.whole,
                Span(view.whole.start_ns, view.whole.start_ns + lasting_ns),
                merged=True,
            )
            for view in self._views
        ]

    def sections(self) -> list[Section]:
        """Lanes, exposed time and memory of the step, and how far the prediction is off.

        Raises:
            TimelineMismatch: a timeline is not of the schedule.
        """
        view, figures = self._views[0], self.figures()
        classes = shown_classes(view.classes, MOST_CLASSES)
        names = [one.rank_class.name for one in classes]
        few = ""
        if len(names) < len(view.classes):
            few = (
                f" {len(names)} of {len(view.classes)} classes are shown, the first, the last and "
                "others at equal distances; the means are over all."
            )
        return [
            Section(
                "The whole step" if self.ran is None else "The whole step, as predicted",
                "A group of lanes for each class of ranks: compute by kind or phase, below it what "
                "is said, by axis, from when all its sides have come; before that whoever has come "
                "waits for the others. Where there are too many ops, those near to each other are "
                f"one bar that is as long as they together.{few}",
                figures[0],
            ),
            *self._ran_lanes(figures[1:]),
            *self._window(),
            Section(
                "Where the step goes, and what compute waited for",
                "A gap of compute is followed back from the op that ended it: what was under way "
                "is its cause, and before that the other side, which had not come yet (along the "
                f"pipeline a bubble).{few}",
                exposed_figure(self.summary, names),
            ),
            *self._ran_exposed(),
            Section(
                "Device memory of a rank",
                "What the arena of each class holds, by role of the tensors (where slots share "
                f"bytes, at the fullest moment of the step), and the reserve.{few}",
                device_memory_figure(self.summary, names),
            ),
            Section("Exposed time by class", "Per cent of the step of each class.",
                    _table(self.summary, names)),
            *self._compared(),
        ]  # fmt: skip

    def _window(self) -> list[Section]:
        """The middle of a long step, op by op."""
        view = self._views[0]
        classes = shown_classes(view.classes, MOST_CLASSES)
        window = shrunk(classes, view.whole, MOST_OPS)
        if window == view.whole:
            return []
        text = (
            f"{seconds(window.lasting_ns / 1e9)} around the middle of the step, op by op; hover "
            "says op, bytes, and what or whom it waited for."
        )
        return [Section("A window", text, lanes_figure(classes, window))]

    def _ran_lanes(self, figures: Sequence[go.Figure]) -> list[Section]:
        return [
            Section(
                "The whole step, as measured",
                "The last step that was timed, a group of lanes for each rank, on one clock that "
                f"is right within {self._views[1].timeline.clock_error_ns / 1e3:.0f} us (the "
                "shortest of 16 round trips to rank 0). The axis is as long as that of the "
                "prediction.",
                figure,
            )
            for figure in figures
        ]

    def _ran_exposed(self) -> list[Section]:
        if self.ran is None:
            return []
        classes = shown_classes(self._views[1].classes, MOST_CLASSES)
        names = [one.rank_class.name for one in classes]
        return [
            Section(
                "What compute waited for, as measured",
                "Of each rank's last step, by the same rule. What is under way takes a core, too, "
                "where ranks share cores.",
                exposed_figure(self.ran, names),
            )
        ]

    def _compared(self) -> list[Section]:
        """Busy times by kind of op over all ranks, and by stream of each."""
        if self.measured is None:
            return []
        found = compare(self.schedule, self.predicted, self.measured)
        rows = [("all ranks", "step time", *pair_ns(found.step_ns))]
        rows += [("all ranks", readable(kind.name), *pair_ns(kind.busy_ns)) for kind in found.kinds]
        for one in found.ranks:
            groups = (*one.comparison.streams, *one.said)
            rows += [(one.name, _stream(group), *pair_ns(group.busy_ns)) for group in groups]
        return [
            Section(
                "Predicted against measured",
                "Busy time in a step, mean of the passes. By stream what is said lasts from when "
                "the rank has come; below it is cut into waiting for others, and the rest.",
                Table(("rank", "time of", "predicted", "measured", "error"), rows, num_left=2),
            )
        ]


def _stream(group: GroupComparison) -> str:
    """Of a stream its queue, without the device before it, which is each rank's own."""
    return readable(group.name.rpartition(":")[2])


def _table(summary: Summary, names: list[str]) -> Table:
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
