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
from twinstream.report.memory import memory_curve, memory_samples
from twinstream.report.view import Span, View, stream_name
from twinstream.schedule.analysis.comparison import kind_of
from twinstream.schedule.analysis.resource_use import use_over_time
from twinstream.schedule.files import write_bytes
from twinstream.schedule.ops import Communicate, Compute
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.screens.tables import readable

MOST_OPS = 40_000  # of each timeline
_NUM_POINTS = 1000
_GIB = 2**30

Event = dict[str, Any]


def trace_of(views: Sequence[View], most_ops: int = MOST_OPS) -> dict[str, Any]:
    """The last pass of each timeline as a process, with a thread per stream.

    Ops are slices; waits are flow arrows; live bytes by role, and use of the links, are counters
    (means or fullest moments of a thousandth). Steps begin at the same time in all processes. Of
    a timeline with more ops than `most_ops` only a window around its loss is written;
    `otherData` tells.
    """
    spans = [shrunk(view, view.whole, most_ops) for view in views]
    # What runs before a span begins leads; time 0 is the start of the longest lead.
    leads = [span.start_ns - _first_ns(view, span) for view, span in zip(views, spans, strict=True)]
    events: list[Event] = []
    told: dict[str, str] = {}
    for pid, (view, span) in enumerate(zip(views, spans, strict=True), start=1):
        events += _process(view, span, pid, span.start_ns - max(0, *leads))
        told[view.name] = (
            f"{view.timeline.provenance.description}; "
            f"{len(_shown(view, span))} of {len(view.schedule.ops)} ops of the last pass"
        )
    schedule = views[0].schedule
    about = {"model": schedule.model.name, "policy": schedule.policy}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about | told}


def write_trace(trace: dict[str, Any], path: Path) -> None:
    """Write the trace; compressed if the name ends in `.gz`, which ui.perfetto.dev opens, too.

    Raises:
        DocumentError: it cannot be written.
    """
    content = json.dumps(trace, separators=(",", ":")).encode()
    write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content, path)


def _shown(view: View, span: Span) -> list[int]:
    """All ops of the pass where the span is the whole; else those that run in it."""
    return list(range(len(view.schedule.ops))) if span == view.whole else view.within(span)


def _first_ns(view: View, span: Span) -> int:
    return int(view.start_ns[_shown(view, span)].min())


def _process(view: View, span: Span, pid: int, origin_ns: int) -> Iterator[Event]:
    yield named(pid, 0, "process_name", f"{view.name}: {view.timeline.provenance.description}")
    yield in_place(pid, 0, "process_sort_index", pid)
    # Perfetto takes a thread with its process's number for the main one.
    threads = {queue: tid for tid, queue in enumerate(view.queues, start=100 * pid + 1)}
    for queue, tid in threads.items():
        yield named(pid, tid, "thread_name", readable(queue))
        yield in_place(pid, tid, "thread_sort_index", tid)
    shown = _shown(view, span)
    yield from _slices(view, shown, pid, threads, origin_ns)
    yield from _flows(view, shown, pid, threads, origin_ns)
    yield from _counters(view, span, pid, origin_ns)


def named(pid: int, tid: int, what: str, name: str) -> Event:
    """The name of a process or a thread."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def in_place(pid: int, tid: int, what: str, place: int) -> Event:
    """Where a process or a thread stands among the others."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"sort_index": place}}


def micros(moment_ns: int) -> float:
    return int(moment_ns) / 1000


def _slices(
    view: View, shown: Sequence[int], pid: int, threads: dict[str, int], origin_ns: int
) -> Iterator[Event]:
    for i in shown:
        op = view.schedule.ops[i]
        told: dict[str, object] = {"moved_bytes": int(view.moved_bytes[i])}
        if isinstance(op, Compute | Communicate):
            told |= op.label.model_dump(exclude_none=True, exclude={"kind"})
        else:
            told |= {"tensor": op.tensor, "role": view.roles[op.tensor]}
        idle = view.idle.get(op.op_id)
        if idle is not None:
            told |= {
                "waited_for": idle.waited_for or "latency",
                "waited_us": micros(idle.end_ns - idle.start_ns),
            }
        yield {
            "ph": "X", "name": op.op_id, "cat": kind_of(op), "pid": pid,
            "tid": threads[stream_name(op)], "ts": micros(view.start_ns[i] - origin_ns),
            "dur": micros(view.end_ns[i] - view.start_ns[i]), "args": told,
        }  # fmt: skip


def _flows(
    view: View, shown: Sequence[int], pid: int, threads: dict[str, int], origin_ns: int
) -> Iterator[Event]:
    """An arrow from the last ns of an op waited for to the start of the op that waits.

    Ops that take no time have none: an arrow begins and ends inside a slice.
    """
    position = {view.schedule.ops[i].op_id: i for i in shown}
    number = pid << 32
    for i in shown:
        op = view.schedule.ops[i]
        for wait in op.waits:
            source = position.get(wait)
            if source is None or view.end_ns[i] == view.start_ns[i]:
                continue
            if view.end_ns[source] == view.start_ns[source]:
                continue
            number += 1
            ends = {
                "s": (source, view.end_ns[source] - 1),
                "f": (i, view.start_ns[i]),
            }
            for phase, (end, moment_ns) in ends.items():
                event: Event = {
                    "ph": phase, "id": number, "name": "wait", "cat": "wait", "pid": pid,
                    "tid": threads[stream_name(view.schedule.ops[end])],
                    "ts": micros(moment_ns - origin_ns),
                }  # fmt: skip
                yield event | ({"bp": "e"} if phase == "f" else {})


def _counters(view: View, span: Span, pid: int, origin_ns: int) -> Iterator[Event]:
    for name, tier in (("device memory, GiB", DEVICE), ("host memory, GiB", HOST)):
        curve = memory_curve(memory_samples(view, tier), span, _NUM_POINTS)
        for number, moment_ns in enumerate(curve.start_ns):
            levels = {
                role: round(float(c[number]) / _GIB, 6) for role, c in curve.bytes_by_role.items()
            }
            yield _counter(pid, name, moment_ns - origin_ns, levels)
    edges = np.linspace(span.start_ns, span.end_ns, _NUM_POINTS + 1)
    used = use_over_time(view.schedule, view.timeline, edges)
    for resource, rates in used.items():
        for moment_ns, rate in zip(edges[:-1], rates, strict=True):
            levels = {"GB/s": round(float(rate), 3)}
            yield _counter(pid, readable(resource), moment_ns - origin_ns, levels)


def _counter(pid: int, name: str, moment_ns: float, levels: dict[str, float]) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "ts": micros(round(moment_ns)), "args": levels}
