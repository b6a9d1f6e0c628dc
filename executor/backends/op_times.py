"""When ops of timed passes ran: CUDA events from a bounded pool, read when their pass is over."""

from collections import deque
from dataclasses import dataclass, field

from twinstream.executor.backends.gpu import Gpu, GpuEvent
from twinstream.schedule.timeline import PassSpans

MAX_PASSES_HELD = 4
"""Passes whose events exist at the same time; the oldest is read before a fifth is timed."""

Moment = GpuEvent | int
"""An event, or host time in ns since the run began."""


@dataclass
class _TimedPass:
    number: int
    base: GpuEvent
    base_ns: int
    starts: list[Moment] = field(default_factory=list)
    ends: list[Moment] = field(default_factory=list)


class OpTimes:
    """Start and end of every op of the passes that are timed, relative to the run's begin.

    A pass is measured from an event shortly before it, since `elapsed_time` is a float32 number
    of milliseconds: over minutes it would be coarser than the ops.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._free: list[GpuEvent] = []
        self._held: deque[_TimedPass] = deque()
        self._spans: dict[int, PassSpans] = {}
        self.num_events = 0

    def begin_pass(self, number: int, base: GpuEvent, base_ns: int) -> None:
        """Time this pass. `base` happened `base_ns` after the run began, before any of its ops.

        The pass `MAX_PASSES_HELD` before it must have completed.
        """
        if len(self._held) >= MAX_PASSES_HELD:
            self._read(self._held.popleft())
        self._held.append(_TimedPass(number, base, base_ns))

    def start(self, stream: object) -> None:
        self._held[-1].starts.append(self._record(stream))

    def end(self, stream: object) -> None:
        self._held[-1].ends.append(self._record(stream))

    def begin_host(self) -> tuple[list[Moment], list[Moment], int]:
        """Room for the times of a host op: two lists and the place in them to fill in."""
        found = self._held[-1]
        found.starts.append(0)
        found.ends.append(0)
        return found.starts, found.ends, len(found.starts) - 1

    def spans(self) -> dict[int, PassSpans]:
        """Spans by pass; all timed passes must have completed."""
        while self._held:
            self._read(self._held.popleft())
        return self._spans

    def _record(self, stream: object) -> GpuEvent:
        if self._free:
            event = self._free.pop()
        else:
            event = self._gpu.new_event(timing=True)
            self.num_events += 1
        event.record(stream)
        return event

    def _read(self, found: _TimedPass) -> None:
        self._spans[found.number] = PassSpans(
            start_ns=tuple(self._ns(found, moment) for moment in found.starts),
            end_ns=tuple(self._ns(found, moment) for moment in found.ends),
        )
        self._free += [m for m in (*found.starts, *found.ends) if not isinstance(m, int)]

    def _ns(self, found: _TimedPass, moment: Moment) -> int:
        if isinstance(moment, int):
            return max(0, moment)
        return max(0, found.base_ns + round(found.base.elapsed_time(moment) * 1e6))
