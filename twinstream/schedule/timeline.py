"""Timelines, which both worlds return: when every op ran."""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.document import THE_DEVICE, RankSchedule, Schedule
from twinstream.schedule.errors import ArgumentError, TwinstreamError, did_you_mean
from twinstream.schedule.node import MeshDocument, Node, facts_html
from twinstream.schedule.numbers import (
    Count,
    Finite,
    MeanNs,
    PositiveCount,
    PositiveMeanNs,
    Size,
    TimeNs,
)


class HostCost(Node):
    """What the dispatching thread spent on enqueueing, means over the passes after the first.

    Of those only the ones that were not timed op by op; `ops_timed` where there were no others,
    so that the cost of timing is in it.

    `ns_per_op` is per op of the schedule; `ns_per_call` and `calls_per_pass` are by kind of call:
    the kinds of ops, and `graph` for the launch of a CUDA graph, which enqueues many. Blocked
    time (`waited_ns_per_pass`) is not in them: it is for host work that is not done yet, or for
    the pass that is too far behind, and no loss as long as the device has work.
    """

    num_passes: Count
    ns_per_op: Finite
    ns_per_call: dict[str, Finite]
    calls_per_pass: dict[str, Finite]
    waited_ns_per_pass: Finite
    ops_timed: bool = False


class DeviceMemory(Node):
    """Bytes of the device's memory in use, by the driver's own figure, at moments of a run.

    `before_bytes` is what was in use before the arena (context, and others on the device), of
    which other processes had `others_bytes`,
    `warm_bytes` once every kernel has run, `peak_bytes` the largest seen. `libraries_bytes` is
    what torch's allocator holds beside the arena: workspaces of libraries and their temporaries;
    `temporary_bytes` the most that each kernel call allocated for itself, when it was first run,
    of which the plan declared `declared_bytes` at most.
    """

    arena_bytes: Size
    cap_bytes: Size | None = None
    reserve_bytes: Size
    before_bytes: Size
    warm_bytes: Size
    peak_bytes: Size
    others_bytes: Size = 0
    libraries_bytes: Size
    temporary_bytes: dict[str, Size] = Field(default_factory=dict)
    declared_bytes: Size = 0

    @property
    def undeclared_bytes(self) -> int:
        """By how much the greediest kernel call is over what the plan declared for libraries."""
        return max(0, max(self.temporary_bytes.values(), default=0) - self.declared_bytes)

    @property
    def excess_bytes(self) -> int:
        """By how much this process's share of the peak is over the cap.

        A reserve of 0 says that the cap is the arena's alone; then there is nothing to compare.
        """
        if self.cap_bytes is None or not self.reserve_bytes:
            return 0
        return max(0, self.peak_bytes - self.others_bytes - self.cap_bytes)


class Provenance(Node):
    """Simulated on which profile, or measured on which device, and with what.

    `timed_passes` of the run had every op timed (measured only). `nondeterministic` names the
    kernels of the schedule that do not give the same bits from run to run. `processor_share` is the
    share of their time that kernels on a CPU had a core; the rest other processes had it, or
    threads waited. `clock_error_ns` is how far the device's clock may have been from the host's.
    """

    kind: Literal["simulated", "measured"]
    where: str
    detail: str = ""
    nondeterministic: tuple[str, ...] = ()
    timed_passes: Count | None = None
    host_cost: HostCost | None = None
    device_memory: DeviceMemory | None = None
    processor_share: float | None = Field(default=None, gt=0, le=1)
    clock_error_ns: Count | None = None

    @property
    def description(self) -> str:
        """Where the timeline is from, and whether another run would have other bits."""
        text = f"{self.kind} on {self.where}"
        if self.nondeterministic:
            text += f" (not deterministic: {', '.join(self.nondeterministic)})"
        return text


class PassSpans(Node):
    """Start and end of every op of one pass, ns since the run began, in the schedule's op order."""

    start_ns: tuple[TimeNs, ...]
    end_ns: tuple[TimeNs, ...]

    @model_validator(mode="after")
    def _none_ends_before_it_starts(self) -> Self:
        for i, (start_ns, end_ns) in enumerate(zip(self.start_ns, self.end_ns, strict=False)):
            if start_ns > end_ns:
                raise PydanticCustomError(
                    "ends_before_start",
                    "op {op} starts at {start} ns and ends at {end} ns, before",
                    {"op": i, "start": start_ns, "end": end_ns},
                )
        return self


class RankTimeline(Node):
    """Spans of one or more consecutive passes, and the step time they give.

    `passes` are the last ones run, the steady state if there is one; `cold` is one pass from
    empty streams, drained at its end. `step_ns` is the mean over one period of
    `period_passes` passes once the state at the pass boundary repeats; when it did not,
    `period_passes` is None and `step_ns`, `spread_ns` are mean and standard deviation over the
    last passes; simulated, the step is no shorter than any stream or resource takes alone, and
    where streams hardly wait for one another a long run may differ from it (`is_unproven`).
    `utilization` is the share of each resource's capacity used over `passes` (simulated only).
    """

    op_ids: tuple[str, ...]
    passes: tuple[PassSpans, ...] = Field(min_length=1)
    cold: PassSpans
    step_ns: PositiveMeanNs
    spread_ns: MeanNs = 0.0
    period_passes: PositiveCount | None = None
    utilization: dict[str, Finite] = Field(default_factory=dict)
    provenance: Provenance

    def __repr__(self) -> str:
        where = f"{self.provenance.kind} on {self.provenance.where}"
        return f"<Timeline {where}: {len(self.op_ids):,} ops, {self.step_ns / 1e9:.6g} s a step>"

    __str__ = __repr__

    def records(self) -> list[dict[str, object]]:
        """A row for each op of the last pass, in the schedule's order; ns since the run began."""
        spans = self.passes[-1]
        rows = zip(self.op_ids, spans.start_ns, spans.end_ns, strict=True)
        return [{"op_id": op_id, "start_ns": at, "end_ns": to} for op_id, at, to in rows]

    def span_ns(self, op_id: str) -> tuple[int, int]:
        """Start and end of an op in the last pass.

        Raises:
            TimelineMismatch: there is no such op.
        """
        if op_id not in self.op_ids:
            hint = did_you_mean(op_id, self.op_ids) or "op_ids lists them"
            raise TimelineMismatch(f"there is no op '{op_id}': {hint}")
        spans, at = self.passes[-1], self.op_ids.index(op_id)
        return spans.start_ns[at], spans.end_ns[at]

    def _repr_html_(self) -> str:
        repeats = "not proven to repeat" if self.is_unproven else f"{self.period_passes} passes"
        facts = {
            "step": f"{self.step_ns / 1e9:.6g} s, period: {repeats}",
            "from a cold start": f"{self.cold_ns / 1e9:.6g} s",
            "ops": f"{len(self.op_ids):,}",
        } | {f"use of {name}": f"{share:.1%}" for name, share in self.utilization.items()}
        return facts_html(f"Timeline {self.provenance.description}", facts)

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

    @model_validator(mode="after")
    def _passes_follow_one_another(self) -> Self:
        last_ends = [max(spans.end_ns, default=0) for spans in self.passes]
        if last_ends != sorted(last_ends):
            raise PydanticCustomError("pass_order", "a pass ends before the one that it follows")
        return self

    @property
    def is_unproven(self) -> bool:
        """Whether the step was predicted without a proof that passes repeat."""
        return self.provenance.kind == "simulated" and self.period_passes is None

    @property
    def cold_ns(self) -> int:
        """Time of one pass from empty streams until its last op has ended."""
        return max(self.cold.end_ns, default=0) - min(self.cold.start_ns, default=0)


class Timeline(MeshDocument):
    """When every op of every rank ran: a timeline for each class, on one clock.

    The step is that of all ranks together; one device is a class of its own. All classes have the
    same passes. `step_ns`, `spread_ns` and `period_passes` are as in a `RankTimeline`, over the ops
    of all classes. `cold_ns` is one step from idle streams to idle streams.

    Measured, a class has the timeline of its first rank; where a class has several, `ranks` has
    those of all, by the names of `expanded`'s classes. Clocks of ranks are right within
    `clock_error_ns` of each other's.
    """

    rank_kind: ClassVar[type[Node]] = RankTimeline

    schema_version: Literal[1] = 1
    classes: Annotated[dict[str, RankTimeline], Field(min_length=1)]
    step_ns: PositiveMeanNs
    spread_ns: MeanNs = 0.0
    period_passes: PositiveCount | None = None
    cold_ns: TimeNs
    ranks: dict[str, RankTimeline] = Field(default_factory=dict)
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

    @classmethod
    def of_rank(cls, rank: RankTimeline) -> Self:
        """Return the timeline of one device."""
        return cls(
            classes={THE_DEVICE: rank},
            step_ns=rank.step_ns,
            spread_ns=rank.spread_ns,
            period_passes=rank.period_passes,
            cold_ns=rank.cold_ns,
            provenance=rank.provenance,
        )

    @property
    def is_one_device(self) -> bool:
        """Whether it is one device's alone."""
        return list(self.classes) == [THE_DEVICE]

    @property
    def only(self) -> RankTimeline:
        """When the ops of the one device ran.

        Raises:
            ArgumentError: the timeline is of ranks of a layout.
        """
        if not self.is_one_device:
            raise ArgumentError(
                "this is asked of one device's timeline, and the one given is of "
                f"{len(self.classes)} classes of ranks"
            )
        return self.classes[THE_DEVICE]

    @property
    def op_ids(self) -> tuple[str, ...]:
        """Ops of the one device, in issue order."""
        return self.only.op_ids

    @property
    def passes(self) -> tuple[PassSpans, ...]:
        """The last passes of the one device, ns."""
        return self.only.passes

    @property
    def cold(self) -> PassSpans:
        """One pass of the one device from empty streams, ns."""
        return self.only.cold

    @property
    def utilization(self) -> dict[str, float]:
        """Share of each resource that is used, of the one device."""
        return self.only.utilization

    def records(self) -> list[dict[str, object]]:
        """A row for each op of one device; see `RankTimeline.records`."""
        return self.only.records()

    def span_ns(self, op_id: str) -> tuple[int, int]:
        """Return start and end of an op of one device in the last pass.

        Raises:
            TimelineMismatch: there is no such op.
        """
        return self.only.span_ns(op_id)

    def __repr__(self) -> str:
        if self.is_one_device:
            return repr(self.only)
        ops = sum(len(line.op_ids) for line in self.classes.values())
        where = f"{self.provenance.kind} on {self.provenance.where}"
        return (
            f"<Timeline {where}: {len(self.classes)} classes, {ops:,} ops, "
            f"{self.step_ns / 1e9:.6g} s a step>"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return self.only._repr_html_() if self.is_one_device else facts_html(repr(self), {})


class TimelineMismatch(TwinstreamError):
    """A timeline is not of this schedule."""


def require_timeline_of_rank(schedule: RankSchedule, timeline: RankTimeline, which: str) -> None:
    """
    Raises:
        TimelineMismatch: the timeline, called `which`, has other ops than the schedule.
    """
    if timeline.op_ids != tuple(op.op_id for op in schedule.ops):
        raise TimelineMismatch(
            f"the {which} timeline has {len(timeline.op_ids)} ops that are not the schedule's "
            f"{len(schedule.ops)} in its order; make it from this schedule"
        )


def require_timeline_of(schedule: Schedule, timeline: Timeline, which: str = "given") -> None:
    """Refuse a timeline of another schedule.

    Raises:
        TimelineMismatch: says which class, and how it differs.
    """
    names = [one.name for one in schedule.classes]
    if set(names) != set(timeline.classes):
        raise TimelineMismatch(
            f"the timeline is of {_whose(timeline.classes)}, and the schedule of {_whose(names)}"
        )
    for one in schedule.classes:
        told = which if schedule.is_one_device else f"class '{one.name}'"
        require_timeline_of_rank(schedule.of(one), timeline.classes[one.name], told)


def _whose(names: Iterable[str]) -> str:
    known = ", ".join(sorted(names))
    return "one device" if known == THE_DEVICE else f"the classes {known}"
