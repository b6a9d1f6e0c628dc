"""Timelines as a Chrome trace (Trace Event Format, JSON), which ui.perfetto.dev opens.

Source: "Trace Event Format" (Google, 2016), and perfetto.dev/docs/getting-started/other-formats.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twinstream.report.bars import shrunk
from twinstream.report.view import MeshView, Span, View, memory_curve, memory_samples, stream_name
from twinstream.schedule.analysis.comparison import kind_of
from twinstream.schedule.analysis.resource_use import use_over_time
from twinstream.schedule.files import write_bytes
from twinstream.schedule.ops import Communicate, Compute
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.screens.tables import readable

MOST_OPS = 40_000  # of each timeline, all classes together
_NUM_POINTS = 1000
_GIB = 2**30

Event = dict[str, Any]
_Place = tuple[int, int]  # a class and a position


def trace_of(views: Sequence[MeshView], most_ops: int = MOST_OPS) -> dict[str, Any]:
    """The last pass of each timeline: a process for a device or a class, a thread for a stream.

    Ops are slices (an exchange begins when its class comes to it); waits are flow arrows, and so
    are exchanges of several classes, from the side that sends (of a collective: that comes last) to
    the others; live bytes by role, and use of the links, are counters (means or fullest moments of
    a thousandth). Steps begin at the same time in all processes. Of a timeline with more ops than
    `most_ops` only a window around its loss is written; `otherData` tells.
    """
    windows = [shrunk(view.classes, view.whole, most_ops) for view in views]
    writers = []
    num_processes = 0
    for view, window in zip(views, windows, strict=True):
        label = f"{view.world}: " if len(views) > 1 else ""
        writers.append(_Writer(view, window, label, num_processes))
        num_processes += len(view.classes)
    # What runs before a window begins leads; time 0 is the start of the longest lead.
    lead_ns = max(0, *(writer.window.start_ns - writer.first_ns for writer in writers))
    events: list[Event] = []
    first = views[0].classes[0].schedule
    about = {"model": str(views[0].schedule.model.get("name", "a model")), "policy": first.policy}
    for view, writer in zip(views, writers, strict=True):
        events += writer.events(writer.window.start_ns - lead_ns)
        about[view.world] = writer.told
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write_trace(trace: dict[str, Any], path: Path) -> None:
    """Write the trace; compressed if the name ends in `.gz`, which ui.perfetto.dev opens, too.

    Raises:
        DocumentError: it cannot be written.
    """
    content = json.dumps(trace, separators=(",", ":")).encode()
    write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content, path)


class _Writer:
    """Events of one timeline.

    Args:
        label: before the name of each class.
        before: processes of other timelines.
    """

    def __init__(self, view: MeshView, window: Span, label: str, before: int) -> None:
        self._view, self.window, self._label, self._before = view, window, label, before
        self._shown = [
            list(range(len(one.ops))) if window == view.whole else one.within(window)
            for one in view.classes
        ]
        # Perfetto takes a thread with its process's number for the main one.
        self._threads = [
            {name: 1000 * self._pid(number) + at for at, name in enumerate(one.streams, start=1)}
            for number, one in enumerate(view.classes)
        ]

    @property
    def first_ns(self) -> int:
        """Return when the first of the ops shown begins, or its class comes to it, in ns."""
        starts = [self._came_ns((n, at)) for n, mine in enumerate(self._shown) for at in mine]
        return min(starts, default=self.window.start_ns)

    @property
    def told(self) -> str:
        """Return in words where the timeline is from, and how much of it is shown."""
        classes = self._view.classes
        of = "" if classes[0].is_device else (
            f"{len(classes)} classes of {self._view.schedule.mesh.size:,} ranks, "
        )  # fmt: skip
        total = sum(len(one.ops) for one in classes)
        return (
            f"{self._view.timeline.provenance.description}; "
            f"{of}{sum(map(len, self._shown))} of {total} ops of the last pass"
        )

    def events(self, origin_ns: int) -> Iterator[Event]:
        """Yield all trace events, with times in us from `origin_ns`."""
        for number, one in enumerate(self._view.classes):
            pid = self._pid(number)
            name = f"{self._label}{one.name}, {one.num_ranks:,} rank{'s' * (one.num_ranks > 1)}"
            if one.is_device:
                name = f"{one.world}: {self._view.timeline.provenance.description}"
            yield named(pid, 0, "process_name", name)
            yield in_place(pid, 0, "process_sort_index", pid)
            for stream, tid in self._threads[number].items():
                yield named(pid, tid, "thread_name", readable(stream))
                yield in_place(pid, tid, "thread_sort_index", tid)
            for at in self._shown[number]:
                yield self._slice(one, (number, at), origin_ns)
            yield from self._waits(number, one, origin_ns)
            yield from _counters(one, self.window, pid, origin_ns, len(self._view.classes))
        yield from self._exchanges(origin_ns)

    def _pid(self, number: int) -> int:
        return self._before + number + 1

    def _slice(self, one: View, place: _Place, origin_ns: int) -> Event:
        number, at = place
        op, came_ns = one.ops[at], self._came_ns(place)
        told: dict[str, object] = {"moved_bytes": int(one.moved_bytes[at])}
        if isinstance(op, Compute | Communicate):
            told |= op.label.model_dump(exclude_none=True)
        else:
            told |= {"tensor": op.tensor, "role": one.roles[op.tensor]}
        idle = one.idle.get(op.op_id)
        if idle is not None:
            told["waited_for"] = idle.waited_for or "latency"
            told["waited_us"] = micros(idle.end_ns - idle.start_ns)
        if isinstance(op, Communicate):
            told |= {"collective": op.collective, "axes": ", ".join(op.axes)}
            told |= {"size_bytes": one.said_bytes(op), "waited_us": micros(one.waited_ns[at])}
        return {
            "ph": "X", "name": op.op_id, "cat": kind_of(op), "pid": self._pid(number),
            "tid": self._threads[number][stream_name(op)], "ts": micros(came_ns - origin_ns),
            "dur": micros(int(one.end_ns[at]) - came_ns), "args": told,
        }  # fmt: skip

    def _waits(self, number: int, one: View, origin_ns: int) -> Iterator[Event]:
        """An arrow from the last ns of an op waited for to the start of the op that waits."""
        position = {one.ops[at].op_id: at for at in self._shown[number]}
        arrow = self._pid(number) << 32
        for at in self._shown[number]:
            for wait in one.ops[at].waits:
                source = position.get(wait)
                if source is None:
                    continue
                arrow += 1
                begin = (number, source), int(one.end_ns[source]) - 1
                end = (number, at), self._came_ns((number, at))
                yield from self._arrow("wait", arrow, begin, end, origin_ns)

    def _exchanges(self, origin_ns: int) -> Iterator[Event]:
        """From who sends, or comes last, to who waits."""
        classes = self._view.classes
        position = {
            (one.name, one.ops[at].op_id): (number, at)
            for number, one in enumerate(classes)
            for at in self._shown[number]
            if isinstance(one.ops[at], Communicate)
        }
        arrow = (self._pid(0) << 32) + (1 << 31)  # beside the waits of the first class
        for exchange in self._view.schedule.order:
            sides = [position[side] for side in exchange.sides if side in position]
            if len({number for number, _ in sides}) < 2:
                continue
            source = max(sides, key=self._leads)
            begun_ns = int(classes[source[0]].start_ns[source[1]])
            for target in sides:
                if target == source:
                    continue
                arrow += 1
                end = target, int(classes[target[0]].end_ns[target[1]]) - 1
                yield from self._arrow("exchange", arrow, (source, begun_ns), end, origin_ns)

    def _arrow(
        self, name: str, arrow: int, begin: tuple[_Place, int], end: tuple[_Place, int],
        origin_ns: int,
    ) -> Iterator[Event]:  # fmt: skip
        """Ops that take no time have none: an arrow begins and ends inside a slice."""
        if not (self._lasts(begin[0]) and self._lasts(end[0])):
            return
        for phase, (place, moment_ns) in (("s", begin), ("f", end)):
            op = self._view.classes[place[0]].ops[place[1]]
            event: Event = {
                "ph": phase, "id": arrow, "name": name, "cat": name, "pid": self._pid(place[0]),
                "tid": self._threads[place[0]][stream_name(op)],
                "ts": micros(moment_ns - origin_ns),
            }  # fmt: skip
            yield event | ({"bp": "e"} if phase == "f" else {})

    def _came_ns(self, place: _Place) -> int:
        one = self._view.classes[place[0]]
        return int(one.start_ns[place[1]] - one.waited_ns[place[1]])

    def _lasts(self, place: _Place) -> bool:
        one = self._view.classes[place[0]]
        return int(one.end_ns[place[1]]) > self._came_ns(place)

    def _leads(self, place: _Place) -> tuple[bool, int, _Place]:
        op = self._view.classes[place[0]].ops[place[1]]
        sends = isinstance(op, Communicate) and op.collective == "send"
        return sends, self._came_ns(place), place


def named(pid: int, tid: int, what: str, name: str) -> Event:
    """Return the event that names a process or a thread."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def in_place(pid: int, tid: int, what: str, place: int) -> Event:
    """Return the event that orders a process or a thread among the others."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"sort_index": place}}


def micros(moment_ns: int) -> float:
    return int(moment_ns) / 1000


def _counters(
    view: View, span: Span, pid: int, origin_ns: int, num_classes: int
) -> Iterator[Event]:
    """Of a device or a class; of several classes each has its share of the points."""
    points = max(2, _NUM_POINTS // num_classes)
    for name, tier in (("device memory, GiB", DEVICE), ("host memory, GiB", HOST)):
        curve = memory_curve(memory_samples(view, tier), span, points)
        for number, moment_ns in enumerate(curve.start_ns):
            levels = {
                role: round(float(c[number]) / _GIB, 6) for role, c in curve.bytes_by_role.items()
            }
            yield _counter(pid, name, moment_ns - origin_ns, levels)
    edges = np.linspace(span.start_ns, span.end_ns, points + 1)
    used = use_over_time(view.schedule, view.timeline, edges)
    for resource, rates in used.items():
        for moment_ns, rate in zip(edges[:-1], rates, strict=True):
            levels = {"GB/s": round(float(rate), 3)}
            yield _counter(pid, readable(resource), moment_ns - origin_ns, levels)


def _counter(pid: int, name: str, moment_ns: float, levels: dict[str, float]) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "ts": micros(round(moment_ns)), "args": levels}
