"""What a search of layouts found, and what it looked at."""

from dataclasses import dataclass

from twinstream.clusters.predict import Prediction
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.schedule.document import Schedule
from twinstream.schedule.node import records_html
from twinstream.schedule.timeline import Timeline


@dataclass(frozen=True)
class Candidate:
    """A layout that was looked at: its tokens/s, or why it is none.

    `is_bound`: no plan of it is faster, and that was enough to know.
    """

    layout: Layout
    tokens_per_s: float | None
    why_not: str = ""
    is_bound: bool = False

    def __str__(self) -> str:
        if self.tokens_per_s is None:
            return f"{self.layout.text}: {self.why_not}"
        most = "at most " if self.is_bound else ""
        return f"{self.layout.text}: {most}{self.tokens_per_s:,.0f} tokens/s"


@dataclass(frozen=True)
class RankedLayout:
    """A layout that was simulated whole, its job with the kernels that compute it; with its
    schedule and its timeline, where all of the step was planned."""

    job: Job
    bound_s: float
    prediction: Prediction
    schedule: Schedule | None = None
    timeline: Timeline | None = None

    @property
    def layout(self) -> Layout:
        """That of the job."""
        return self.job.layout

    @property
    def step_s(self) -> float:
        """Seconds of a step, as predicted."""
        return self.prediction.step_s

    @property
    def candidate(self) -> Candidate:
        """The layout and its tokens/s."""
        return Candidate(self.layout, self.prediction.tokens_per_s)


@dataclass(frozen=True)
class SearchResult:
    """The best layouts, fastest first, and what was looked at.

    `least_bound_s`: what no layout that fits can beat, of those in the space; 0 where no bound is
    known. `num_simulated` with layers as single ops, or planned whole where layouts run here:
    `candidates` then are all that were looked at.
    """

    best: tuple[RankedLayout, ...]
    least_bound_s: float
    num_layouts: int
    num_fit: int
    num_simulated: int
    candidates: tuple[Candidate, ...] = ()

    def records(self) -> list[dict[str, object]]:
        """A row for each of the best layouts, the fastest first."""
        return [
            {
                "layout": one.layout.text, "kernels": one.job.recipe.implementations.vector,
                "step_s": one.prediction.step_s, "tokens_per_s": one.prediction.tokens_per_s,
                "mfu": one.prediction.mfu, "memory_bytes": one.prediction.memory_bytes,
                "host_bytes": one.prediction.host_bytes, "bound_s": one.bound_s,
            }
            for one in self.best
        ]  # fmt: skip

    def __repr__(self) -> str:
        best, gap = self.best[0], self.gap
        above = "" if gap is None else f", {gap:.1%} above the bound"
        return (
            f"<SearchResult: {best.layout.text} is the fastest of {self.num_simulated:,} simulated"
            f" layouts, {best.step_s:.4g} s a step{above}>"
        )

    def _repr_html_(self) -> str:
        return records_html(repr(self).strip("<>"), self.records())

    @property
    def gap(self) -> float | None:
        """How far the fastest is above the least bound, as a share of it; None without one."""
        return self.best[0].step_s / self.least_bound_s - 1 if self.least_bound_s else None
