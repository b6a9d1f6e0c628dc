"""One timeline of a schedule as arrays, ready to be drawn."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from twinstream.schedule.analysis.idle import IdleInterval, idle_intervals
from twinstream.schedule.analysis.resource_use import bytes_by_op
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Communicate, Compute, Op
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.timeline import Timeline, require_timeline_of

Times = NDArray[np.int64]
_LONG_NS = 5e9


@dataclass(frozen=True)
class Span:
    """From when to when, ns of the timeline's clock."""

    start_ns: int
    end_ns: int

    @property
    def lasting_ns(self) -> int:
        return self.end_ns - self.start_ns


class View:
    """The last pass of a timeline; `name` is `predicted` or `measured`."""

    def __init__(self, name: str, schedule: Schedule, timeline: Timeline) -> None:
        require_timeline_of(schedule, timeline, name)
        self.name, self.schedule, self.timeline = name, schedule, timeline
        self.start_ns: Times = np.asarray(timeline.passes[-1].start_ns, np.int64)
        self.end_ns: Times = np.asarray(timeline.passes[-1].end_ns, np.int64)

    @cached_property
    def queues(self) -> list[str]:
        """The streams' names, compute first, then in order of their first op."""
        found = list(dict.fromkeys(stream_name(op) for op in self.schedule.ops))
        return sorted(found, key=lambda name: not name.startswith("compute"))

    @cached_property
    def whole(self) -> Span:
        """The pass from the end of compute in the pass before (if known) to its own last end."""
        mine = [i for i, op in enumerate(self.schedule.ops) if op.stream.queue == "compute"]
        before = self.timeline.passes[-2:-1]
        if not mine:
            return Span(int(self.start_ns.min()), int(self.end_ns.max()))
        end_ns = int(self.end_ns[mine[-1]])
        if before:
            return Span(before[0].end_ns[mine[-1]], end_ns)
        return Span(int(self.start_ns[mine[0]]), end_ns)

    def round_span(self, number: int) -> Span:
        """From the start of a round's first task to the end of its last."""
        mine = [
            i
            for i, op in enumerate(self.schedule.ops)
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
    def idle(self) -> dict[str, IdleInterval]:
        """What each op waited for while its stream was idle."""
        streams = dict.fromkeys(op.stream for op in self.schedule.ops)
        return {
            interval.before: interval
            for stream in streams
            for interval in idle_intervals(self.schedule, self.timeline, stream)
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
        """A task's kind; the role of what a copy, feed or fetch moves."""
        return op.label.kind if isinstance(op, Compute | Communicate) else self.roles[op.tensor]


def stream_name(op: Op) -> str:
    return op.stream.queue if op.stream.device == 0 else f"{op.stream.queue}, {op.stream.device}"


def time_unit(lasting_ns: float) -> tuple[int, str]:
    """Seconds, or ms of what is shorter than five."""
    return (10**9, "s") if lasting_ns > _LONG_NS else (10**6, "ms")


def size_unit(schedule: Schedule) -> tuple[int, str]:
    """GiB, or MiB where the arenas are small."""
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
