"""A pass of a cluster as lanes: for each class of ranks compute, and what is said by axis."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinstream.report.palette import AXIS_COLOURS
from twinstream.report.view import Span
from twinstream.schedule.analysis.idle import ALL_RANKS, AXES, TRANSFER, ExchangeTimes, cause_of
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule, RankClass
from twinstream.schedule.cluster.cluster_timeline import (
    ClusterTimeline,
    require_timeline_of_cluster,
)
from twinstream.schedule.ops import Communicate, Compute, Op

Times = NDArray[np.int64]
COMPUTE = "compute"
_ORDER = (COMPUTE, *AXES, "send", "recv", ALL_RANKS, "h2d", "h2d_inputs", "d2h", "host")
_PHASES = ("forward", "backward", "weight", "recompute", "optimizer")
_PHASE_OF_KIND = {
    "loss": "forward",
    "head_loss": "forward",
    "part": "weight",
    "accumulate": "optimizer",
    "cast": "optimizer",
    "gradients_complete": "optimizer",
    "gradient_norm": "optimizer",
    "squares": "optimizer",
    "gathered": "optimizer",
    "optimizer_step": "optimizer",
    "tied_gradients": "optimizer",
}
_IN_BOTH = ("core", "kv")  # of attention around a ring: the op's name says which pass it is of


@dataclass(frozen=True)
class ClassLanes:
    """What a class does in the last pass: of every op its lane, its colour's key, and when.

    What is said begins once all sides have come; `waited_ns` is how long the class waited for
    them.
    """

    rank_class: RankClass
    num_ranks: int
    ops: tuple[Op, ...]
    lane: tuple[str, ...]
    key: tuple[str, ...]
    size_bytes: tuple[int, ...]
    start_ns: Times
    end_ns: Times
    waited_ns: Times

    @property
    def name(self) -> str:
        return self.rank_class.name

    @property
    def lanes(self) -> list[str]:
        """Those that the class has, compute on top."""
        known = [lane for lane in _ORDER if lane in self.lane]
        return known + sorted(set(self.lane) - set(_ORDER))

    def within(self, span: Span) -> list[int]:
        """Positions of ops that run in a span, as they begin."""
        found = np.flatnonzero((self.end_ns > span.start_ns) & (self.start_ns < span.end_ns))
        return [int(at) for at in found[np.argsort(self.start_ns[found], kind="stable")]]


class ClusterView:
    """The last pass of all classes."""

    def __init__(self, schedule: ClusterSchedule, timeline: ClusterTimeline) -> None:
        require_timeline_of_cluster(schedule, timeline)
        self.schedule, self.timeline = schedule, timeline
        self.begun = ExchangeTimes(schedule, timeline)
        self.classes = [self._lanes(number) for number in range(len(schedule.classes))]

    @property
    def whole(self) -> Span:
        """From the first compute of any class to the end of the last op."""
        starts = [
            int(one.start_ns[at])
            for one in self.classes
            for at, lane in enumerate(one.lane)
            if lane == COMPUTE
        ]
        ends = [int(one.end_ns.max(initial=0)) for one in self.classes]
        first = min(starts, default=0)
        return Span(first, max(first + 1, *ends))

    def _lanes(self, number: int) -> ClassLanes:
        one = self.schedule.classes[number]
        part = self.schedule.of(one)
        spans, last = self.begun.passes[number][-1], len(self.begun.passes[number]) - 1
        came = np.asarray(spans.start_ns, np.int64)
        start = came.copy()
        for at, op in enumerate(part.ops):
            if isinstance(op, Communicate):
                # Measured, a message may be on its way before its receiver has come.
                start[at] = min(self.begun.begun_ns(last, (number, at)), spans.end_ns[at])
        sizes = {tensor.tensor_id: tensor.size_bytes for tensor in part.tensors}
        return ClassLanes(
            rank_class=one, num_ranks=self.schedule.num_ranks(one), ops=part.ops,
            lane=tuple(map(lane_of, part.ops)), key=tuple(map(key_of, part.ops)),
            size_bytes=tuple(_size_bytes(op, sizes) for op in part.ops),
            start_ns=start, end_ns=np.asarray(spans.end_ns, np.int64), waited_ns=start - came,
        )  # fmt: skip


def shown_classes(classes: Sequence[ClassLanes], most: int) -> list[ClassLanes]:
    """All, or so many of them: the first, the last, and others at equal distances."""
    if len(classes) <= most:
        return list(classes)
    places = np.linspace(0, len(classes) - 1, most).round().astype(int)
    return [classes[int(place)] for place in places]


def lane_of(op: Op) -> str:
    """The lane of an op: its axis, `send` or `recv` along the pipeline, else its queue."""
    if isinstance(op, Communicate):
        family = cause_of(op)
        return op.collective if family == TRANSFER else family
    return op.stream.queue


def key_of(op: Op) -> str:
    """What decides the colour of an op: compute's phase, the axis of what is said, a copy."""
    if isinstance(op, Compute):
        return phase_of(op)
    if isinstance(op, Communicate):
        return cause_of(op)
    return "copy" if op.kind == "copy" else "host"


def phase_of(op: Compute) -> str:
    """The phase of training that a task belongs to, by its label; `other` where that is open."""
    kind, parts = op.label.kind, op.op_id.split(".")
    if "again" in parts:
        return "recompute"
    if kind in _IN_BOTH:
        return "backward" if len(parts) > 1 and parts[1].startswith("b") else "forward"
    for phase in _PHASES:
        if kind == phase or kind.endswith(f"_{phase}"):
            return phase
    return _PHASE_OF_KIND.get(kind, "other")


def is_said(key: str) -> bool:
    """Whether a colour's key is of what is said or copied, not of compute."""
    return key in AXIS_COLOURS


def _size_bytes(op: Op, sizes: dict[str, int]) -> int:
    """The larger of what an exchange is given and makes; of a copy what it moves."""
    if isinstance(op, Compute):
        return 0
    if isinstance(op, Communicate):
        given = sum(sizes[o.tensor] for o in op.operands if o.mode != "write")
        made = sum(sizes[o.tensor] for o in op.operands if o.mode != "read")
        return max(given, made)
    return sizes[op.tensor]
