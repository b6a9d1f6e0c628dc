"""The dispatch loop: walk the ops in issue order, enqueue each, let streams wait on events."""

from typing import assert_never

from twinstream.executor.backends.protocol import Backend, EventT
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute, Copy, Feed, Fetch
from twinstream.schedule.timeline import PassSpans


def run_passes(schedule: Schedule, backend: Backend[EventT], num_passes: int) -> list[PassSpans]:
    """Run so many passes, one after the other with no barrier between them.

    Events are kept for this pass and the one before, and nothing else: a wait on an op of the
    pass before finds its event recorded, and the first pass has none to wait for.
    """
    previous: dict[str, EventT] = {}
    for _ in range(num_passes):
        done: dict[str, EventT] = {}
        for op in schedule.ops:
            for wait in op.waits:
                backend.wait(op.stream, done[wait])
            for wait in op.waits_previous:
                if wait in previous:
                    backend.wait(op.stream, previous[wait])
            match op:
                case Compute():
                    backend.compute(op)
                case Copy():
                    backend.copy(op)
                case Feed() | Fetch():
                    backend.host(op)
                case _:
                    assert_never(op)
            done[op.op_id] = backend.record(op.stream)
        previous = done
    spans = backend.finish()
    num_ops = len(schedule.ops)
    return [
        _pass_spans(spans[number * num_ops : (number + 1) * num_ops])
        for number in range(num_passes)
    ]


def _pass_spans(spans: list[tuple[int, int]]) -> PassSpans:
    return PassSpans(start_ns=tuple(s for s, _ in spans), end_ns=tuple(e for _, e in spans))
