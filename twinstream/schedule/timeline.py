"""What both worlds return: when every op ran."""

from typing import Literal, Self

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.node import Node


class HostCost(Node):
    """What the dispatching thread spent on enqueueing, means over the passes after the first.

    Of those only the ones that were not timed op by op; `ops_timed` where there were no others,
    so that the cost of timing is in it.

    `ns_per_op` is per op of the schedule; `ns_per_call` and `calls_per_pass` are by kind of call:
    the kinds of ops, and `graph` for the launch of a CUDA graph, which enqueues many. Blocked
    time (`waited_ns_per_pass`) is not in them: it is for host work that is not done yet, or for
    the pass that is too far behind, and no loss as long as the device has work.
    """

    num_passes: int
    ns_per_op: float
    ns_per_call: dict[str, float]
    calls_per_pass: dict[str, float]
    waited_ns_per_pass: float
    ops_timed: bool = False


class DeviceMemory(Node):
    """Bytes of the device's memory in use, by the driver's own figure, at moments of a run.

    `before_bytes` is what was in use before the arena (context, and others on the device),
    `warm_bytes` once every kernel has run, `peak_bytes` the largest seen. `libraries_bytes` is
    what torch's allocator holds beside the arena: workspaces of libraries and their temporaries;
    `temporary_bytes` the most that each kernel call allocated for itself, when it was first run,
    of which the plan declared `declared_bytes` at most.
    """

    arena_bytes: NonNegativeInt
    cap_bytes: NonNegativeInt | None
    reserve_bytes: NonNegativeInt
    before_bytes: NonNegativeInt
    warm_bytes: NonNegativeInt
    peak_bytes: NonNegativeInt
    libraries_bytes: NonNegativeInt
    temporary_bytes: dict[str, NonNegativeInt] = Field(default_factory=dict)
    declared_bytes: NonNegativeInt = 0

    @property
    def undeclared_bytes(self) -> int:
        """By how much the greediest kernel call is over what the plan declared for libraries."""
        return max(0, max(self.temporary_bytes.values(), default=0) - self.declared_bytes)

    @property
    def excess_bytes(self) -> int:
        """By how much the peak is over the cap.

        A reserve of 0 says that the cap is the arena's alone; then there is nothing to compare.
        """
        if self.cap_bytes is None or not self.reserve_bytes:
            return 0
        return max(0, self.peak_bytes - self.cap_bytes)


class Provenance(Node):
    """Simulated on which profile, or measured on which device, and with what.

    `timed_passes` of the run had every op timed (measured only). `processor_share` is the share of
    their time that kernels on a CPU had a core; the rest other processes had it, or threads waited.
    """

    kind: Literal["simulated", "measured"]
    where: str
    detail: str = ""
    timed_passes: NonNegativeInt | None = None
    host_cost: HostCost | None = None
    device_memory: DeviceMemory | None = None
    processor_share: float | None = Field(default=None, gt=0, le=1)


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
    last passes; simulated, the step is no shorter than any stream or resource takes alone.
    `utilization` is the share of each resource's capacity used over `passes` (simulated only).
    """

    op_ids: tuple[str, ...]
    passes: tuple[PassSpans, ...] = Field(min_length=1)
    cold: PassSpans
    step_ns: FiniteFloat = Field(gt=0)
    spread_ns: FiniteFloat = Field(default=0.0, ge=0)
    period_passes: PositiveInt | None = None
    utilization: dict[str, FiniteFloat] = Field(default_factory=dict)
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
