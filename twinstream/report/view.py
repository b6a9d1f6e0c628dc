"""The last pass of a timeline as arrays, ready to be drawn: of one device, or of every class."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from twinstream.report.palette import TASK_COLOURS
from twinstream.schedule.analysis.idle import (
    ALL_RANKS,
    AXES,
    COMPUTE_STREAM,
    TRANSFER,
    ExchangeTimes,
    IdleInterval,
    cause_of,
)
from twinstream.schedule.analysis.occupancy import MemorySample, memory_over_time
from twinstream.schedule.analysis.resource_use import bytes_by_op
from twinstream.schedule.document import THE_DEVICE, RankSchedule, Schedule
from twinstream.schedule.ops import Communicate, Compute, Op
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST, Tier
from twinstream.schedule.timeline import RankTimeline, Timeline

Times = NDArray[np.int64]
Floats = NDArray[np.float64]
COMPUTE = "compute"
_LONG_NS = 5e9
_ORDER = (COMPUTE, *AXES, "send", "recv", ALL_RANKS)
_PHASES = ("forward", "backward", "weight", "recompute", "optimizer")
_PHASE_OF_KIND = {
    "loss": "forward",
    "part": "weight",
    "accumulate": "optimizer",
    "cast": "optimizer",
    "gradients_complete": "optimizer",
    "gradient_norm": "optimizer",
    "squares": "optimizer",
    "gathered": "optimizer",
    "tied_gradients": "optimizer",
}


@dataclass(frozen=True)
class Span:
    """A span of time, in ns of the timeline's clock."""

    start_ns: int
    end_ns: int

    @property
    def lasting_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes by role from each of `start_ns` on, at the fullest moment until the next."""

    start_ns: Floats
    bytes_by_role: dict[str, Floats]


class View:
    """The last pass of a timeline on one device, or on a class of ranks.

    Ops of an exchange begin once all sides have come; `waited_ns` is how long this class waited
    for them. `world` is `predicted` or `measured`, and the name of one device.
    """

    def __init__(
        self, world: str, exchanges: ExchangeTimes, timeline: RankTimeline, number: int
    ) -> None:
        self.world, self._meetings, self._number = world, exchanges, number
        self.timeline = timeline
        self.rank_class = exchanges.schedule.classes[number]
        self.num_ranks = exchanges.schedule.num_ranks(self.rank_class)
        self.schedule: RankSchedule = exchanges.schedule.of(self.rank_class)
        self.is_device = self.rank_class.name == THE_DEVICE
        self.name = world if self.is_device else self.rank_class.name
        spans, last = exchanges.passes[number][-1], len(exchanges.passes[number]) - 1
        came = np.asarray(spans.start_ns, np.int64)
        self.start_ns: Times = came.copy()
        self.end_ns: Times = np.asarray(spans.end_ns, np.int64)
        for at, op in enumerate(self.ops):
            if isinstance(op, Communicate):
                # Measured, a message may be on its way before its receiver has come.
                begun_ns = exchanges.begun_ns(last, (number, at))
                self.start_ns[at] = min(begun_ns, spans.end_ns[at])
        self.waited_ns: Times = self.start_ns - came
        self.lane = tuple(map(lane_of, self.ops))

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.schedule.ops

    @cached_property
    def key(self) -> tuple[str, ...]:
        """Return for each op the key that decides its colour."""
        return tuple(map(self.colour_key, self.ops))

    @cached_property
    def lanes(self) -> list[str]:
        """Compute on top, below it what is said by axis, then other queues by their first op."""
        found = dict.fromkeys(self.lane)
        known = [lane for lane in _ORDER if lane in found]
        computes = [lane for lane in found if lane.startswith(COMPUTE) and lane != COMPUTE]
        return [*dict.fromkeys((*known[:1], *computes, *known[1:], *found))]

    @cached_property
    def streams(self) -> list[str]:
        """The streams' names, compute first, then in order of their first op."""
        found = list(dict.fromkeys(map(stream_name, self.ops)))
        return sorted(found, key=lambda name: not name.startswith(COMPUTE))

    @cached_property
    def whole(self) -> Span:
        """The pass from the end of compute in the pass before (if known) to its own last end."""
        mine = [i for i, op in enumerate(self.ops) if op.stream.queue == COMPUTE]
        before = self._meetings.passes[self._number][-2:-1]
        if not mine:
            return Span(int(self.start_ns.min()), int(self.end_ns.max()))
        end_ns = int(self.end_ns[mine[-1]])
        return Span(before[0].end_ns[mine[-1]] if before else int(self.start_ns[mine[0]]), end_ns)

    def round_span(self, number: int) -> Span:
        """Return the span from the start of a round's first task to the end of its last."""
        mine = [
            i
            for i, op in enumerate(self.ops)
            if isinstance(op, Compute) and op.label.round == number
        ]
        if not mine:
            return self.whole
        return Span(int(self.start_ns[mine].min()), int(self.end_ns[mine].max()))

    def within(self, span: Span) -> list[int]:
        """Positions of the ops that run in a span, in order."""
        touching = (self.end_ns > span.start_ns) & (self.start_ns < span.end_ns)
        return [int(i) for i in np.flatnonzero(touching)]

    @cached_property
    def compute_gaps(self) -> list[IdleInterval]:
        """When the compute stream had nothing to run, in order."""
        return list(self._meetings.gaps(self._number).of(COMPUTE_STREAM))

    @cached_property
    def idle(self) -> dict[str, IdleInterval]:
        """Return, by op, the idle interval of its stream before it, with what it waited for."""
        streams = {str(op.stream): op.stream for op in self.ops}
        return {
            interval.before: interval
            for stream in streams.values()
            for interval in self._meetings.gaps(self._number).of(stream)
        }

    @cached_property
    def moved_bytes(self) -> Times:
        """Bytes that each op moves over HBM (what the host fills or takes: over its DRAM)."""
        by_resource = bytes_by_op(self.schedule)
        return np.maximum(by_resource["hbm"], by_resource["host_dram"])

    @cached_property
    def roles(self) -> dict[str, str]:
        return {tensor.tensor_id: tensor.role for tensor in self.schedule.tensors}

    def colour_key(self, op: Op) -> str:
        """A task's kind or phase; what an exchange is of; the role of what is copied."""
        if isinstance(op, Compute):
            return op.label.kind if op.label.kind in TASK_COLOURS else phase_of(op)
        return cause_of(op) if isinstance(op, Communicate) else self.roles[op.tensor]

    def said_bytes(self, op: Communicate) -> int:
        """The larger of what an exchange is given and what it makes."""
        given = sum(self._sizes[o.tensor] for o in op.operands if o.mode != "write")
        made = sum(self._sizes[o.tensor] for o in op.operands if o.mode != "read")
        return max(given, made)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {tensor.tensor_id: tensor.size_bytes for tensor in self.schedule.tensors}


class MeshView:
    """The last pass of all classes of ranks; one device is a class of its own."""

    def __init__(self, world: str, schedule: Schedule, timeline: Timeline) -> None:
        self.world = world
        self.schedule, self.timeline = schedule, timeline
        exchanges = ExchangeTimes(self.schedule, self.timeline)
        self.classes = [
            View(world, exchanges, self.timeline.classes[one.name], number)
            for number, one in enumerate(self.schedule.classes)
        ]

    @cached_property
    def whole(self) -> Span:
        """Return the pass of one device; of classes the first compute to the last end."""
        if self.classes[0].is_device:
            return self.classes[0].whole
        starts = [
            int(one.start_ns[at])
            for one in self.classes
            for at, lane in enumerate(one.lane)
            if lane == COMPUTE
        ]
        ends = [int(one.end_ns.max(initial=0)) for one in self.classes]
        first = min(starts, default=0)
        return Span(first, max(first + 1, *ends))


def view_of(world: str, schedule: Schedule, timeline: Timeline) -> View:
    """Return the view of a schedule of one device."""
    return MeshView(world, schedule, timeline).classes[0]


def memory_samples(view: View, tier: Tier) -> list[MemorySample]:
    return memory_over_time(view.schedule, view.timeline.passes[-1], tier)


def memory_curve(samples: list[MemorySample], span: Span, num_points: int) -> MemoryCurve:
    """The samples of a span in equal intervals, each at the moment when most bytes are alive."""
    edges = np.linspace(span.start_ns, span.end_ns, num_points + 1)
    moments = np.asarray([sample.start_ns for sample in samples], np.float64)
    totals = np.asarray([sample.total_bytes for sample in samples])
    names = list(dict.fromkeys(role for sample in samples for role in sample.bytes_by_role))
    curves = {str(name): np.zeros(num_points + 1) for name in names}
    # The level at an interval's start is that of the last change before it.
    first = np.maximum(np.searchsorted(moments, edges, side="right") - 1, 0)
    for number, low in enumerate(first):
        high = first[number + 1] + 1 if number + 1 < len(first) else low + 1
        if not samples:
            break
        fullest = int(low + np.argmax(totals[low:high]))
        for role, size_bytes in samples[fullest].bytes_by_role.items():
            curves[role][number] = size_bytes
    return MemoryCurve(edges, curves)


def shown_classes(classes: Sequence[View], most: int) -> list[View]:
    """All, or so many of them: the first, the last, and others at equal distances."""
    if len(classes) <= most:
        return list(classes)
    places = np.linspace(0, len(classes) - 1, most).round().astype(int)
    return [classes[int(place)] for place in places]


def lane_of(op: Op) -> str:
    """The lane of an op: its axis, `send` or `recv` along the pipeline, else its stream."""
    if isinstance(op, Communicate):
        cause = cause_of(op)
        return op.collective if cause == TRANSFER else cause
    return stream_name(op)


def phase_of(op: Compute) -> str:
    """The phase of training that a task belongs to, by its label; `other` where that is open."""
    if op.label.phase is not None:
        return op.label.phase
    kind = op.label.kind
    for phase in _PHASES:
        if kind == phase or kind.endswith(f"_{phase}"):
            return phase
    return _PHASE_OF_KIND.get(kind, "other")


def stream_name(op: Op) -> str:
    return op.stream.queue if op.stream.device == 0 else f"{op.stream.queue}, {op.stream.device}"


def time_unit(lasting_ns: float) -> tuple[int, str]:
    """Seconds, or ms of what is shorter than five."""
    return (10**9, "s") if lasting_ns > _LONG_NS else (10**6, "ms")


def size_unit(schedule: RankSchedule) -> tuple[int, str]:
    """Return bytes and name of the unit of sizes: GiB, or MiB if the arenas are small."""
    largest = max(arena_bytes(schedule, tier) for tier in (DEVICE, HOST))
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")


def round_name(number: int, rounds: int) -> str:
    """
    >>> round_name(1, 2), round_name(0, 1)
    ('round 2 of 2 (r1 in the names of its ops)', "the step's only round")
    """
    if rounds == 1:
        return "the step's only round"
    return f"round {number + 1} of {rounds} (r{number} in the names of its ops)"
