"""Exposed communication: what the compute of a class waited for, by cause."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from pydantic import NonNegativeInt

from twinstream.schedule.analysis.critical_path import released_by, releases_of
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule, RankClass
from twinstream.schedule.cluster.cluster_timeline import (
    ClusterTimeline,
    require_timeline_of_cluster,
)
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount
from twinstream.schedule.ops import Communicate, Copy, Stream
from twinstream.schedule.timeline import PassSpans

AXES = ("tp", "cp", "ep", "dp")
ALL_RANKS, BUBBLE, TRANSFER, LATE_RANKS = "all_ranks", "bubble", "transfer", "late_ranks"
COPY, HOST, LATENCY = "copy", "host", "latency"
CAUSES = (*AXES, ALL_RANKS, TRANSFER, BUBBLE, LATE_RANKS, COPY, HOST, LATENCY)
"""Why compute is idle: an exchange of an axis was under way, or one of all ranks (the norm), or a
message along the pipeline; its other side had not come yet (along the pipeline a bubble, otherwise
ranks that are late); a copy; the host; nothing but latency of waits and launches."""

_PIPELINE = "pp"
_COMPUTE = Stream(queue="compute")
_At = tuple[int, int]  # the number of a class, and the position of an op in it


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


def family_of(op: Communicate) -> str:
    """What an exchange counts as while it is under way: an axis, `transfer` or `all_ranks`.

    The queue says so by convention (`dp.gather` is of dp, whatever axes it is along), else the
    axes do.
    """
    family = op.stream.queue.partition(".")[0]
    if family in AXES:
        return family
    if op.shift and op.axes == (_PIPELINE,):
        return TRANSFER
    if len(op.axes) == 1 and op.axes[0] in AXES:
        return op.axes[0]
    return ALL_RANKS


def exposed_times(schedule: ClusterSchedule, timeline: ClusterTimeline) -> tuple[ExposedTime, ...]:
    """Of every class's last pass, every ns in which its compute queue was idle, by cause.

    A gap is followed back from the compute op that ends it: by what ended last of all that
    released it, what had released that, and so on until the gap began. While an exchange was
    under way it is the cause; before that, its side waited for the others'. Without a pass before
    the last, the pass begins with the first op of any class.

    Raises:
        TimelineMismatch: the timeline is not of this schedule.
    """
    require_timeline_of_cluster(schedule, timeline)
    begun = Begun(schedule, timeline)
    return tuple(_Gaps(schedule, begun, number).found() for number in range(len(schedule.classes)))


def mean_causes_ns(found: Sequence[ExposedTime]) -> dict[str, float]:
    """Mean over all ranks of `compute` and every cause that there is."""
    ranks = [one.num_ranks for one in found]
    names = [cause for cause in CAUSES if any(cause in one.causes_ns for one in found)]
    total = {"compute": fmean([one.compute_ns for one in found], ranks)}
    return total | {
        name: fmean([one.causes_ns.get(name, 0) for one in found], ranks) for name in names
    }


class Begun:
    """When exchanges were under way: as soon as the last of their sides had come."""

    def __init__(self, schedule: ClusterSchedule, timeline: ClusterTimeline) -> None:
        names = {one.name: number for number, one in enumerate(schedule.classes)}
        self.passes = [timeline.classes[one.name].passes[-2:] for one in schedule.classes]
        position = {
            (one.name, op.op_id): at
            for one in schedule.classes
            for at, op in enumerate(schedule.of(one).ops)
            if op.kind == "communicate"
        }
        self._sides: dict[_At, tuple[_At, ...]] = {}
        for exchange in schedule.order:
            sides = tuple((names[side[0]], position[side]) for side in exchange.sides)
            self._sides |= dict.fromkeys(sides, sides)

    def start_ns(self, number: int, at: _At) -> int:
        return self.passes[at[0]][number].start_ns[at[1]]

    def begun_ns(self, number: int, at: _At) -> int:
        """In a pass (a number from 0) the moment from which the exchange of a side runs."""
        return max(self.start_ns(number, side) for side in self.sides(at))

    def own_last(self, number: int, at: _At) -> int:
        """Of the sides of the class itself (it may both send and receive), which came last."""
        own = [side for side in self.sides(at) if side[0] == at[0]]
        return max(own, key=lambda side: (self.start_ns(number, side), side))[1]

    def sides(self, at: _At) -> tuple[_At, ...]:
        """All that meet with a side, itself too; it alone if the order does not have it."""
        return self._sides.get(at, (at,))


class _Gaps:
    """The gaps of one class's compute, put down to causes."""

    def __init__(self, schedule: ClusterSchedule, begun: Begun, number: int) -> None:
        self._class: RankClass = schedule.classes[number]
        self._num_ranks = schedule.num_ranks(self._class)
        self._ops = schedule.of(self._class).ops
        self._begun, self._number = begun, number
        self._passes: Sequence[PassSpans] = begun.passes[number]
        self._releases = releases_of(schedule.of(self._class))
        self._first_ns = min(min(one[-1].start_ns, default=0) for one in begun.passes)
        self._causes: dict[str, int] = {}

    def found(self) -> ExposedTime:
        """The whole pass."""
        mine = [at for at, op in enumerate(self._ops) if op.stream == _COMPUTE]
        last = self._passes[-1]
        begin_ns = self._first_ns
        if len(self._passes) > 1 and mine:
            begin_ns = self._passes[0].end_ns[mine[-1]]
        free_ns, compute_ns = begin_ns, 0
        for at in mine:
            start_ns = max(free_ns, last.start_ns[at])
            self._follow(at, free_ns, start_ns)
            free_ns = max(start_ns, last.end_ns[at])
            compute_ns += free_ns - start_ns
        return ExposedTime(
            name=self._class.name, num_ranks=self._num_ranks, step_ns=free_ns - begin_ns,
            compute_ns=compute_ns,
            causes_ns={name: self._causes[name] for name in CAUSES if self._causes.get(name)},
        )  # fmt: skip

    def _follow(self, at: int, from_ns: int, to_ns: int) -> None:
        """What a gap before an op is made of, from its end to its beginning."""
        number, now_ns = len(self._passes) - 1, to_ns
        seen: set[tuple[int, int]] = set()
        while now_ns > from_ns:
            released = released_by(self._releases[at], self._passes, number)
            if released is None or released in seen:  # not known, or sides that never can meet
                self._add(LATENCY, from_ns, now_ns)
                return
            seen.add(released)
            number, at = released
            ended_ns = min(now_ns, max(from_ns, self._passes[number].end_ns[at]))
            self._add(LATENCY, ended_ns, now_ns)
            now_ns = ended_ns
            for cause, start_ns in self._stages(number, at):
                start_ns = min(now_ns, max(from_ns, start_ns))
                self._add(cause, start_ns, now_ns)
                now_ns = start_ns
            at = self._begun.own_last(number, (self._number, at))

    def _stages(self, number: int, at: int) -> list[tuple[str, int]]:
        """Causes and since when, the last first, of the time that an op took."""
        op, start_ns = self._ops[at], self._passes[number].start_ns[at]
        if not isinstance(op, Communicate):
            return [(COPY if isinstance(op, Copy) else HOST, start_ns)]
        place = self._number, at
        own = self._begun.own_last(number, place)
        waiting = BUBBLE if _PIPELINE in op.axes else LATE_RANKS
        return [
            (family_of(op), self._begun.begun_ns(number, place)),
            (waiting, self._begun.start_ns(number, (self._number, own))),
        ]

    def _add(self, cause: str, start_ns: int, end_ns: int) -> None:
        if end_ns > start_ns:
            self._causes[cause] = self._causes.get(cause, 0) + end_ns - start_ns


def shares(found: ExposedTime) -> Mapping[str, float]:
    """Of a class's step, by cause; `compute` first."""
    whole = max(1, found.step_ns)
    parts = {"compute": found.compute_ns} | found.causes_ns
    return {name: ns / whole for name, ns in parts.items()}
