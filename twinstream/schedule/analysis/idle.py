"""Why a stream was idle: each gap is charged to what was under way, or to ranks that were late."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, Self

from pydantic import NonNegativeInt

from twinstream.schedule.analysis.critical_path import Releases
from twinstream.schedule.document import Schedule
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount
from twinstream.schedule.ops import DISK_QUEUES, Communicate, Compute, Copy, Op, Stream
from twinstream.schedule.timeline import (
    PassSpans,
    Timeline,
    require_timeline_of,
)

AXES = ("tp", "cp", "ep", "dp")
ALL_RANKS, TRANSFER, BUBBLE, LATE_RANKS = "all_ranks", "transfer", "bubble", "late_ranks"
COPY, DISK, HOST, LATENCY = "copy", "disk", "host", "latency"
CAUSES = (*AXES, ALL_RANKS, TRANSFER, BUBBLE, LATE_RANKS, COPY, DISK, HOST, LATENCY)
"""Why a stream is idle: a collective of an axis was under way, or one of all ranks (the norm), or a
message along the pipeline; its other side had not come yet (along the pipeline a bubble, otherwise
ranks that are late); a copy; a disk is read or written; the host; nothing but latency of waits and
launches."""

_PIPELINE = "pp"
COMPUTE_STREAM = Stream(queue="compute")
_Place = tuple[int, int]  # the number of a class, and the position of an op in it


class IdlePiece(NamedTuple):
    """A part of a gap with one cause, and the op that was waited for (None: latency)."""

    cause: str
    start_ns: int
    end_ns: int
    op: Op | None = None

    @property
    def lasting_ns(self) -> int:
        return self.end_ns - self.start_ns


class IdleInterval(NamedTuple):
    """A gap on a stream before op `before`, made of `pieces`, the last first."""

    start_ns: int
    end_ns: int
    before: str
    pieces: tuple[IdlePiece, ...]

    @property
    def op(self) -> Op | None:
        """The op that ended last of those waited for; None where all were over before the gap
        began, so that the rest is latency of waiting and launching."""
        return next((piece.op for piece in self.pieces if piece.op is not None), None)

    @property
    def waited_for(self) -> str | None:
        """The id of that op."""
        return None if self.op is None else self.op.op_id

    @property
    def tensor(self) -> str | None:
        """The tensor that the op moved or made: the first that it writes; None without operands."""
        op = self.op
        if op is None or not isinstance(op, Compute | Communicate):
            return None if op is None else op.tensor
        made = [o.tensor for o in op.operands if o.mode in ("write", "update")]
        return next(iter((*made, *(o.tensor for o in op.operands))), None)


class ExposedTime(Node):
    """Where a pass of a class goes, ns: `compute_ns` and the causes make `step_ns`, exactly.

    The pass is from the end of compute in the pass before to its own. Causes that took no time
    are left out.
    """

    name: str
    num_ranks: PositiveCount
    step_ns: NonNegativeInt
    compute_ns: NonNegativeInt
    causes_ns: dict[str, NonNegativeInt]

    def with_further(self, more: Self, times: int) -> Self:
        """This pass and so many times what more takes."""
        causes = dict(self.causes_ns)
        for name, ns in more.causes_ns.items():
            causes[name] = causes.get(name, 0) + times * ns
        return self.model_copy(
            update={
                "step_ns": self.step_ns + times * more.step_ns,
                "compute_ns": self.compute_ns + times * more.compute_ns,
                "causes_ns": {name: causes[name] for name in CAUSES if name in causes},
            }
        )

    @property
    def fractions(self) -> dict[str, float]:
        """Shares of the pass, `compute` first."""
        whole = max(1, self.step_ns)
        parts = {"compute": self.compute_ns} | self.causes_ns
        return {name: ns / whole for name, ns in parts.items()}


def cause_of(op: Op) -> str:
    """Return the cause that waiting for an op counts as while it is under way.

    A collective belongs to its axis. Along several, all of which hold copies or shards of the same
    weights, it is of `dp`; if it crosses the ranks of a stage or of a layer it is of all ranks.
    """
    if not isinstance(op, Communicate):
        if op.stream.queue in DISK_QUEUES:
            return DISK
        return COPY if isinstance(op, Copy) else HOST
    if op.shift and op.axes == (_PIPELINE,):
        return TRANSFER
    if len(op.axes) == 1 and op.axes[0] in AXES:
        return op.axes[0]
    return ALL_RANKS if {_PIPELINE, "tp"} & set(op.axes) else "dp"


def exposed_times(schedule: Schedule, timeline: Timeline) -> tuple[ExposedTime, ...]:
    """Return, of every class's last pass, each ns in which its compute queue was idle, by cause.

    A gap is followed back from the compute op that ends it: by what ended last of all that
    released it, what had released that, and so on until the gap began. While a collective was
    under way it is the cause; before that, its side waited for the others'. Without a pass before
    the last, the pass begins with the first op of any class.

    Raises:
        TimelineMismatch: the timeline is not of this schedule.
    """
    exchanges = ExchangeTimes(schedule, timeline)
    numbers = range(len(exchanges.schedule.classes))
    return tuple(exchanges.gaps(number).exposed() for number in numbers)


def idle_intervals(
    schedule: Schedule, timeline: Timeline, stream: Stream = COMPUTE_STREAM, number: int = 0
) -> list[IdleInterval]:
    """Gaps of a stream in the last pass of a class, by its number, in order."""
    return list(ExchangeTimes(schedule, timeline).gaps(number).of(stream))


def idle_by_queue(intervals: Sequence[IdleInterval]) -> dict[str, int]:
    """Idle ns by the queue of what was waited for; `latency` where nothing was."""
    total: dict[str, int] = {}
    for piece in (piece for interval in intervals for piece in interval.pieces):
        queue = LATENCY if piece.op is None else piece.op.stream.queue
        total[queue] = total.get(queue, 0) + piece.lasting_ns
    return total


def mean_fractions(found: Sequence[ExposedTime]) -> dict[str, float]:
    """Shares of the step, mean over all ranks: `compute`, and every cause that there is."""
    return _fractions(_mean_ns(found))


def shares_of(steps: Sequence[Sequence[ExposedTime]], further: float = 0.0) -> dict[str, float]:
    """Return where a step's time goes, mean over all ranks; the shares add up to 1.

    Args:
        steps: the step's classes, or those of two that have fewer microbatches.
        further: how many times what the last has more than the first comes on top of it.
    """
    few, more = (_mean_ns(steps[place]) if further or place else {} for place in (0, -1))
    return _fractions(
        {name: max(0.0, ns + (ns - few.get(name, 0.0)) * further) for name, ns in more.items()}
    )


def _mean_ns(found: Sequence[ExposedTime]) -> dict[str, float]:
    ranks = [one.num_ranks for one in found]
    names = [cause for cause in CAUSES if any(cause in one.causes_ns for one in found)]
    total = {"compute": fmean([one.compute_ns for one in found], ranks)}
    return total | {
        name: fmean([one.causes_ns.get(name, 0) for one in found], ranks) for name in names
    }


def _fractions(found_ns: Mapping[str, float]) -> dict[str, float]:
    whole = max(1.0, sum(found_ns.values()))
    return {name: ns / whole for name, ns in found_ns.items()}


def exposed_communication(shares: Mapping[str, float]) -> float:
    """The share of collectives that compute waits for, of all axes together."""
    return sum(shares.get(name, 0.0) for name in (*AXES, ALL_RANKS))


class ExchangeTimes:
    """When exchanges were under way: from the moment at which the last of their sides came."""

    def __init__(self, schedule: Schedule, timeline: Timeline) -> None:
        require_timeline_of(schedule, timeline)
        self.schedule = schedule
        names = {one.name: number for number, one in enumerate(schedule.classes)}
        self.passes = [timeline.classes[one.name].passes[-2:] for one in schedule.classes]
        position = {
            (one.name, op.op_id): at
            for one in schedule.classes
            for at, op in enumerate(schedule.of(one).ops)
            if op.kind == "communicate"
        }
        self._sides: dict[_Place, tuple[_Place, ...]] = {}
        for exchange in schedule.order:
            sides = tuple((names[side[0]], position[side]) for side in exchange.sides)
            self._sides |= dict.fromkeys(sides, sides)
        self._releases: dict[str, Releases] = {}

    def releases(self, number: int) -> Releases:
        """Return what releases the ops of a class; classes may share a schedule."""
        name = self.schedule.classes[number].schedule
        if name not in self._releases:
            self._releases[name] = Releases(self.schedule.schedules[name])
        return self._releases[name]

    def gaps(self, number: int) -> "Gaps":
        """Of a class of ranks."""
        return Gaps(self, number)

    def start_ns(self, number: int, at: _Place) -> int:
        return self.passes[at[0]][number].start_ns[at[1]]

    def begun_ns(self, number: int, at: _Place) -> int:
        """Return the moment in a pass (a number from 0) from which a side's exchange runs."""
        return max(self.start_ns(number, side) for side in self.sides(at))

    def own_last(self, number: int, at: _Place) -> int:
        """Return which of the class's own sides (it may both send and receive) came last."""
        own = [side for side in self.sides(at) if side[0] == at[0]]
        return max(own, key=lambda side: (self.start_ns(number, side), side))[1]

    def sides(self, at: _Place) -> tuple[_Place, ...]:
        """Return all sides of a side's exchange; only itself if the order does not have it."""
        return self._sides.get(at, (at,))


class Gaps:
    """The gaps of one class's streams, put down to causes."""

    def __init__(self, exchanges: ExchangeTimes, number: int) -> None:
        schedule = exchanges.schedule
        self._class = schedule.classes[number]
        self._num_ranks = schedule.num_ranks(self._class)
        self._ops = schedule.of(self._class).ops
        self._exchanges, self._number = exchanges, number
        self._passes: Sequence[PassSpans] = exchanges.passes[number]
        self._releases = exchanges.releases(number)

    def of(self, stream: Stream) -> Iterator[IdleInterval]:
        """In order. Two passes are needed to know of the time before the first op of a stream."""
        last = self._passes[-1]
        mine = self._on(stream)
        free_ns = self._begin_ns(mine)
        for at in mine:
            start_ns = max(free_ns, last.start_ns[at])
            if start_ns > free_ns:
                pieces = tuple(self._follow(at, free_ns, start_ns))
                yield IdleInterval(free_ns, start_ns, self._ops[at].op_id, pieces)
            free_ns = max(start_ns, last.end_ns[at])

    def exposed(self) -> ExposedTime:
        """The whole pass of the compute queue."""
        mine = self._on(COMPUTE_STREAM)
        begin_ns = self._begin_ns(mine)
        step_ns = max(0, self._passes[-1].end_ns[mine[-1]] - begin_ns) if mine else 0
        causes: dict[str, int] = {}
        for interval in self.of(COMPUTE_STREAM):
            for piece in interval.pieces:
                causes[piece.cause] = causes.get(piece.cause, 0) + piece.lasting_ns
        return ExposedTime(
            name=self._class.name, num_ranks=self._num_ranks, step_ns=step_ns,
            compute_ns=step_ns - sum(causes.values()),
            causes_ns={name: causes[name] for name in CAUSES if name in causes},
        )  # fmt: skip

    def _on(self, stream: Stream) -> list[int]:
        device, queue = stream.device, stream.queue
        return [
            at
            for at, op in enumerate(self._ops)
            if op.stream.queue == queue and op.stream.device == device
        ]

    def _begin_ns(self, mine: Sequence[int]) -> int:
        """The end of a stream in the pass before; else the first op of any class."""
        if len(self._passes) > 1 and mine:
            return self._passes[0].end_ns[mine[-1]]
        return min(min(one[-1].start_ns, default=0) for one in self._exchanges.passes)

    def _follow(self, at: int, from_ns: int, to_ns: int) -> Iterator[IdlePiece]:
        """What a gap before an op is made of, from its end to its beginning."""
        number, now_ns = len(self._passes) - 1, to_ns
        seen: set[tuple[int, int]] = set()
        while now_ns > from_ns:
            released = self._releases.last(at, self._passes, number)
            if released is None or released in seen:  # not known, or sides that never can meet
                yield IdlePiece(LATENCY, from_ns, now_ns)
                return
            seen.add(released)
            number, at = released
            ended_ns = min(now_ns, max(from_ns, self._passes[number].end_ns[at]))
            if ended_ns < now_ns:
                yield IdlePiece(LATENCY, ended_ns, now_ns)
            now_ns = ended_ns
            for cause, since_ns in self._stages(number, at):
                start_ns = min(now_ns, max(from_ns, since_ns))
                if start_ns < now_ns:
                    yield IdlePiece(cause, start_ns, now_ns, self._ops[at])
                now_ns = start_ns
            at = self._exchanges.own_last(number, (self._number, at))

    def _stages(self, number: int, at: int) -> list[tuple[str, int]]:
        """Causes and since when, the last first, of the time that an op took."""
        op, start_ns = self._ops[at], self._passes[number].start_ns[at]
        if not isinstance(op, Communicate):
            return [(cause_of(op), start_ns)]
        place = self._number, at
        own = self._exchanges.own_last(number, place)
        waiting = BUBBLE if _PIPELINE in op.axes else LATE_RANKS
        return [
            (cause_of(op), self._exchanges.begun_ns(number, place)),
            (waiting, self._exchanges.start_ns(number, (self._number, own))),
        ]
