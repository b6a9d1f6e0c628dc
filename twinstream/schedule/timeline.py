"""What both worlds return: when every op ran."""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.node import Node


class Provenance(Node):
    """Simulated on which profile, or measured on which device, and with what."""

    kind: Literal["simulated", "measured"]
    where: str
    detail: str = ""


class PassSpans(Node):
    """Start and end of every op of one pass, ns since the run began, in the schedule's op order."""

    start_ns: tuple[NonNegativeInt, ...]
    end_ns: tuple[NonNegativeInt, ...]


class Timeline(Node):
    """Spans of one or more consecutive passes, and the step time they give.

    `passes` are the last ones run, the steady state if there is one; `cold` is one pass from
    empty streams, drained at its end. `step_ns` is the mean over one period of
    `period_passes` passes once the state at the pass boundary repeats; when it did not,
    `period_passes` is None and `step_ns`, `spread_ns` are mean and standard deviation over the
    last passes. `utilization` is the share of each resource's capacity used over `passes`
    (simulated only).
    """

    op_ids: tuple[str, ...]
    passes: tuple[PassSpans, ...]
    cold: PassSpans
    step_ns: float
    spread_ns: float = 0.0
    period_passes: int | None = None
    utilization: dict[str, float] = Field(default_factory=dict)
    provenance: Provenance

    @model_validator(mode="after")
    def _spans_match_ops(self) -> Self:
        for spans in (*self.passes, self.cold):
            if not len(spans.start_ns) == len(spans.end_ns) == len(self.op_ids):
                raise PydanticCustomError(
                    "span_count",
                    "{ops} ops have {starts} starts and {ends} ends",
                    {
                        "ops": len(self.op_ids),
                        "starts": len(spans.start_ns),
                        "ends": len(spans.end_ns),
                    },
                )
        return self

    @property
    def cold_ns(self) -> int:
        """Time of one pass from empty streams until its last op has ended."""
        return max(self.cold.end_ns) - min(self.cold.start_ns)
