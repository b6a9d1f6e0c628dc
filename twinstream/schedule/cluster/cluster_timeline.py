"""When every op of every class of ranks ran: one timeline for each class, on one clock."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.cluster.cluster_schedule import THE_DEVICE, ClusterSchedule
from twinstream.schedule.errors import require
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import MeanNs, PositiveCount, PositiveMeanNs, TimeNs
from twinstream.schedule.timeline import Provenance, Timeline, TimelineMismatch, require_timeline_of


class ClusterTimeline(Node):
    """Timelines of all classes by name; the step is that of the whole cluster.

    All have the same passes. `step_ns`, `spread_ns` and `period_passes` are as in a `Timeline`,
    over the ops of all classes. `cold_ns` is one step from idle streams to idle streams.

    Measured, a class has the timeline of its first rank; where a class has several, `ranks` has
    those of all, by the names of `expanded`'s classes. Clocks of ranks are right within
    `clock_error_ns` of each other's.
    """

    schema_version: Literal[1] = 1
    classes: Annotated[dict[str, Timeline], Field(min_length=1)]
    step_ns: PositiveMeanNs
    spread_ns: MeanNs = 0.0
    period_passes: PositiveCount | None = None
    cold_ns: TimeNs
    ranks: dict[str, Timeline] = Field(default_factory=dict)
    clock_error_ns: TimeNs = 0
    provenance: Provenance

    @model_validator(mode="after")
    def _passes_are_the_same(self) -> Self:
        counts = {name: len(line.passes) for name, line in self.classes.items()}
        if len(set(counts.values())) > 1:
            raise PydanticCustomError(
                "pass_count", "classes have different numbers of passes: {counts}",
                {"counts": str(counts)},
            )  # fmt: skip
        return self

    def __repr__(self) -> str:
        ops = sum(len(line.op_ids) for line in self.classes.values())
        where = f"{self.provenance.kind} on {self.provenance.where}"
        return (
            f"<ClusterTimeline {where}: {len(self.classes)} classes, {ops:,} ops, "
            f"{self.step_ns / 1e9:.6g} s a step>"
        )

    __str__ = __repr__


def require_timeline_of_cluster(schedule: ClusterSchedule, timeline: ClusterTimeline) -> None:
    """Refuse a timeline of another cluster's schedule.

    Raises:
        TimelineMismatch: says which class, and how it differs.
    """
    require("schedule", schedule, ClusterSchedule)
    require("timeline", timeline, ClusterTimeline)
    names = [one.name for one in schedule.classes]
    if set(names) != set(timeline.classes):
        raise TimelineMismatch(
            f"the timeline is of the classes {', '.join(sorted(timeline.classes))}, and the "
            f"schedule's are {', '.join(sorted(names))}"
        )
    for one in schedule.classes:
        require_timeline_of(schedule.of(one), timeline.classes[one.name], f"class '{one.name}'")


def as_cluster_timeline(timeline: Timeline | ClusterTimeline) -> ClusterTimeline:
    """One device's timeline as that of a mesh of one rank; a mesh's as it is."""
    if isinstance(timeline, ClusterTimeline):
        return timeline
    return ClusterTimeline(
        classes={THE_DEVICE: timeline},
        step_ns=timeline.step_ns,
        spread_ns=timeline.spread_ns,
        period_passes=timeline.period_passes,
        cold_ns=timeline.cold_ns,
        provenance=timeline.provenance,
    )
