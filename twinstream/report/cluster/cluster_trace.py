"""A cluster's timeline as a Chrome trace: a process for each class, a thread for each queue."""

from collections.abc import Iterator
from typing import Any

from twinstream.measures.cluster_comparison import by_rank
from twinstream.report.cluster.lane_bars import shrunk
from twinstream.report.cluster.lanes import COMPUTE, ClassLanes, ClusterView
from twinstream.report.trace import Event, in_place, micros, named
from twinstream.report.view import Span
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.ops import Communicate, Compute
from twinstream.screens.tables import readable

MOST_OPS = 100_000  # of all classes
_At = tuple[int, int]  # a class and a position


def cluster_trace(
    schedule: ClusterSchedule,
    timeline: ClusterTimeline,
    most_ops: int = MOST_OPS,
    *,
    measured: ClusterTimeline | None = None,
) -> dict[str, Any]:
    """The last pass: ops are slices; an exchange of several classes has arrows.

    A slice of an exchange begins when its class comes to it; the arrow goes from the side that
    sends (of a collective: that comes last) to the others. What ranks measured has a process for
    each rank, behind those that are predicted; both begin together. Of a pass with more ops than
    `most_ops` a window around its middle is written; `otherData` tells.

    Raises:
        TimelineMismatch: a timeline is not of this schedule.
    """
    views = {"predicted": ClusterView(schedule, timeline)}
    if measured is not None:
        views["measured"] = ClusterView(*by_rank(schedule, measured))
    events: list[Event] = []
    about = {"model": str(schedule.model.get("name", "a model"))}
    num_classes = num_arrows = 0
    for name, view in views.items():
        whole = view.whole
        window = shrunk(view.classes, whole, most_ops)
        shown = [
            list(range(len(one.ops))) if window == whole else one.within(window)
            for one in view.classes
        ]
        writer = _Writer(view, shown, window, f"{name}: " if len(views) > 1 else "", num_classes)
        events += [event for number in range(len(shown)) for event in writer.process(number)]
        arrows = list(writer.arrows(num_arrows))
        events += arrows
        num_classes, num_arrows = num_classes + len(shown), num_arrows + len(arrows) // 2
        about[name] = _told(view, sum(map(len, shown)))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _told(view: ClusterView, num_shown: int) -> str:
    total = sum(len(one.ops) for one in view.classes)
    return (
        f"{view.timeline.provenance.description}; {len(view.classes)} classes of "
        f"{view.schedule.mesh.size:,} ranks, {num_shown} of {total} ops of the last pass"
    )


class _Writer:
    """Events of the ops shown, in us from the first of them.

    Args:
        label: before the name of each class.
        before: processes of other timelines.
    """

    def __init__(
        self, view: ClusterView, shown: list[list[int]], window: Span, label: str, before: int
    ) -> None:
        self._view, self._shown, self._label, self._before = view, shown, label, before
        self._threads = [_threads(one, self._pid(n)) for n, one in enumerate(view.classes)]
        starts = [self._came_ns((number, at)) for number, mine in enumerate(shown) for at in mine]
        self._origin_ns = min(starts, default=window.start_ns)

    def _pid(self, number: int) -> int:
        return self._before + number + 1

    def process(self, number: int) -> Iterator[Event]:
        """A class with its queues and ops."""
        one, pid = self._view.classes[number], self._pid(number)
        ranks = f"{one.num_ranks:,} rank{'s' * (one.num_ranks > 1)}"
        yield named(pid, 0, "process_name", f"{self._label}{one.name}, {ranks}")
        yield in_place(pid, 0, "process_sort_index", pid)
        for queue, tid in self._threads[number].items():
            yield named(pid, tid, "thread_name", readable(queue))
            yield in_place(pid, tid, "thread_sort_index", tid)
        for at in self._shown[number]:
            yield self._slice(one, (number, at))

    def arrows(self, number: int) -> Iterator[Event]:
        """From who sends, or comes last, to who waits; numbered on from that of the last."""
        position = {
            (one.name, one.ops[at].op_id): (place, at)
            for place, one in enumerate(self._view.classes)
            for at in self._shown[place]
            if isinstance(one.ops[at], Communicate)
        }
        for exchange in self._view.schedule.order:
            sides = [position[side] for side in exchange.sides if side in position]
            if len({place for place, _ in sides}) < 2:
                continue
            source = max(sides, key=self._leads)
            for target in sides:
                if target == source or not self._lasts(source) or not self._lasts(target):
                    continue
                number += 1
                begun = int(self._view.classes[source[0]].start_ns[source[1]])
                ended = int(self._view.classes[target[0]].end_ns[target[1]])
                yield self._end("s", number, source, begun)
                yield self._end("f", number, target, ended - 1) | {"bp": "e"}

    def _slice(self, one: ClassLanes, place: _At) -> Event:
        op, came_ns, at = one.ops[place[1]], self._came_ns(place), place[1]
        told: dict[str, object] = {}
        if isinstance(op, Compute | Communicate):
            told |= op.label.model_dump(exclude_none=True)
        if isinstance(op, Communicate):
            told |= {"collective": op.collective, "axes": ", ".join(op.axes)}
            told["waited_us"] = micros(one.waited_ns[at])
        if one.size_bytes[at]:
            told["size_bytes"] = one.size_bytes[at]
        return {
            "ph": "X", "name": op.op_id, "cat": one.key[at], "pid": self._pid(place[0]),
            "tid": self._threads[place[0]][op.stream.queue],
            "ts": micros(came_ns - self._origin_ns), "dur": micros(int(one.end_ns[at]) - came_ns),
            "args": told,
        }  # fmt: skip

    def _end(self, phase: str, number: int, place: _At, moment_ns: int) -> Event:
        op = self._view.classes[place[0]].ops[place[1]]
        return {
            "ph": phase, "id": number, "name": "exchange", "cat": "exchange",
            "pid": self._pid(place[0]), "tid": self._threads[place[0]][op.stream.queue],
            "ts": micros(moment_ns - self._origin_ns),
        }  # fmt: skip

    def _came_ns(self, place: _At) -> int:
        one = self._view.classes[place[0]]
        return int(one.start_ns[place[1]] - one.waited_ns[place[1]])

    def _lasts(self, place: _At) -> bool:
        one = self._view.classes[place[0]]
        return bool(one.end_ns[place[1]] > one.start_ns[place[1]])

    def _leads(self, place: _At) -> tuple[bool, int, _At]:
        op = self._view.classes[place[0]].ops[place[1]]
        sends = isinstance(op, Communicate) and op.collective == "send"
        return sends, self._came_ns(place), place


def _threads(one: ClassLanes, pid: int) -> dict[str, int]:
    """Numbers of a class's queues, compute first; no thread has its process's number."""
    queues = sorted(
        dict.fromkeys(op.stream.queue for op in one.ops), key=lambda queue: queue != COMPUTE
    )
    return {queue: 1000 * pid + place for place, queue in enumerate(queues, start=1)}
