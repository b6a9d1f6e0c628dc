"""What the page of a run has of its ranks: their layout and why, the step and its measurement."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinstream.log.layout_choice import LayoutChoice
from twinstream.log.run_files import CLUSTER
from twinstream.measures.cluster_summary import ClusterSummary
from twinstream.report.cluster.cluster_page import cluster_sections
from twinstream.report.page import Card, Section, Text
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.sizes import gib
from twinstream.screens.ranks_screen import layout_line


@dataclass(frozen=True)
class RunOnRanks:
    """The schedule of a run's ranks, as predicted; what is None is not there (yet).

    Attributes:
        summary: of the prediction.
        choice: why the run has its layout.
        notes: sentences about the prediction.
    """

    schedule: ClusterSchedule
    predicted: ClusterTimeline
    summary: ClusterSummary
    measured: ClusterTimeline | None = None
    choice: LayoutChoice | None = None
    notes: Sequence[str] = ()

    @property
    def told(self) -> str:
        """Model, ranks, layout and step, and the notes."""
        tokens = self.summary.tokens_per_step
        line = f"{layout_line(self.schedule)}, by {CLUSTER}; {tokens:,} tokens a step."
        error = self.summary.uncertainty
        return " ".join((line, *self.notes, *([] if error is None else [error.sentence])))

    def cards(self) -> list[Card]:
        """The layout, and the stage that takes most memory."""
        mesh = " x ".join(f"{axis.name} {axis.size}" for axis in self.schedule.mesh.axes)
        fullest = self.summary.fullest
        cap_bytes = self.schedule.schedules[fullest].caps.device_bytes
        cap = "no cap" if cap_bytes is None else f"cap {gib(cap_bytes)}"
        taken = gib(sum(self.summary.memory_bytes[fullest].values()))
        return [
            Card("layout", mesh, f"{self.schedule.layout['pipeline']}; {self._why()}"),
            Card("device memory of a rank", taken, f"'{fullest}', the fullest; {cap}"),
        ]

    def sections(self) -> list[Section]:
        """How the layout was chosen, and what the page of its schedule has of a step.

        Raises:
            TimelineMismatch: a timeline is not of the schedule.
        """
        step = cluster_sections(self.schedule, self.predicted, self.summary, self.measured)
        if self.choice is None:
            return step
        others = "\n".join(self.choice.others)
        text = f"{self.choice.chosen}: {self._why()}. Assumed: {self.choice.assumed}."
        text += " The others, with what is predicted of them or why they are none:" * bool(others)
        return [Section("Layout", text, Text(others) if others else None), *step]

    def _why(self) -> str:
        return "as asked" if self.choice is None else self.choice.why
