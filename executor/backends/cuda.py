"""CUDA streams and events: one host thread enqueues, only the GPU waits.

Not yet run on a GPU (see docs/benchmarks/README.md). Its logic is tested on a GPU of the tests,
which runs streams in any order that they allow.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any

from twinstream.executor.backends.gpu import Gpu, GpuEvent
from twinstream.executor.backends.host_thread import HostThread
from twinstream.executor.backends.op_times import OpTimes
from twinstream.executor.backends.protocol import PASSES_AHEAD, MeasuredPass
from twinstream.executor.program.compiled import Launch, Program, Work
from twinstream.schedule.timeline import PassSpans

HostEvent = threading.Event
CudaEvent = GpuEvent | HostEvent
_TRIES = 8
EventTable = list[list[GpuEvent | None]]
"""By parity of the pass and position, the event of every awaited op that the device runs."""


@dataclass(frozen=True)
class _Moment:
    """When an event happened by the host's clock, right within `error_ns`."""

    error_ns: int
    host_ns: int
    event: GpuEvent


class CudaBackend:
    """Queues are CUDA streams, except `host` and `host_compute`, which are threads that wait for
    CUDA events.

    The events are made once: those of a pass are recorded again two passes later, which cannot
    mistake one pass for another, since a stream that waits takes the record of the moment, and
    since no pass begins before the one two before it has completed.

    When an op on a CUDA stream waits for the host, the dispatching thread waits before it
    enqueues: inputs are fed about half a round before they are used, and results taken a whole
    pass before their slot is written again. That is how far launches run ahead.

    Times count from `zero_ns`, a reading of the host's clock, by default from now. The device's
    clock is read beside the host's before and after the passes, within `clock_error_ns`, and taken
    to go evenly in between.
    """

    def __init__(
        self, program: Program, works: Sequence[Work], gpu: Gpu, zero_ns: int | None = None
    ) -> None:
        self.waited_ns = 0
        self.gpu = gpu
        on_host = program.host_streams
        self.streams: list[Any] = [
            None if number in on_host else gpu.stream(str(stream))
            for number, stream in enumerate(program.streams)
        ]
        self.events = event_table(program, gpu)
        self._program = program
        self._works = works
        self._hosts = {number: HostThread(gpu.enter_thread) for number in sorted(on_host)}
        self._current: Any = None
        self._number = -1
        self._times = OpTimes(gpu)
        self._timed = False
        self._completes: list[list[CudaEvent]] = []
        self._end_stream = self.streams[program.launches[program.last_compute()].stream]
        self._end_events: list[GpuEvent | None] = []
        self._end_ns: list[int] = []
        zero = self._moment()
        self._zero = zero.event
        self._zero_ns = zero.host_ns if zero_ns is None else zero_ns
        self._since_ns = zero.host_ns - self._zero_ns
        self.clock_error_ns = zero.error_ns

    def begin_pass(self, number: int, *, timed: bool) -> None:
        if number:
            self._close_pass()
        if number >= PASSES_AHEAD:
            self._await_pass(number - PASSES_AHEAD)
        self._raise_hosts_error()
        self._number, self._timed = number, timed
        if timed:
            past = number - PASSES_AHEAD
            base = self._end_events[past] if past >= 0 else self._zero
            assert base is not None
            since_ns = self._end_ns[past] if past >= 0 else self._since_ns
            self._times.begin_pass(number, base, since_ns)

    def wait(self, launch: Launch, event: CudaEvent) -> None:
        if isinstance(event, HostEvent) and launch.on_host:
            self._hosts[launch.stream].put(partial(_wait, event))
        elif isinstance(event, HostEvent):
            self.await_host(event)
        elif launch.on_host:
            self._hosts[launch.stream].put(event.synchronize)
        else:
            event.wait(self.streams[launch.stream])

    def await_host(self, event: HostEvent) -> None:
        """Block until the host has done its part, and count how long that takes."""
        if not event.is_set():
            before_ns = perf_counter_ns()
            event.wait()
            self.waited_ns += perf_counter_ns() - before_ns

    def launch(self, launch: Launch) -> None:
        work = self._works[launch.position]
        if launch.on_host:
            self._launch_on_host(self._hosts[launch.stream], work)
            return
        stream = self.use(launch.stream)
        if self._timed:
            self._times.start(stream)
            work(self._number)
            self._times.end(stream)
        else:
            work(self._number)

    def record(self, launch: Launch) -> CudaEvent:
        if launch.on_host:
            return self._hosts[launch.stream].put_event()
        event = self.events[self._number % PASSES_AHEAD][launch.position]
        assert event is not None, "awaited ops have an event"
        event.record(self.streams[launch.stream])
        return event

    def use(self, stream: int) -> Any:
        """Make a stream of the program the current one, and return it."""
        found = self.streams[stream]
        if found is not self._current:
            self.gpu.use(found)
            self._current = found
        return found

    def forget_current(self) -> None:
        """Someone else may have changed the current stream."""
        self._current = None

    def synchronize(self) -> None:
        for event in self._ends_of_hosts():
            event.wait()
        self.gpu.synchronize()
        self._raise_hosts_error()
        self.forget_current()

    def finish(self) -> list[MeasuredPass]:
        self._close_pass()
        for number in range(len(self._end_ns), self._number + 1):
            self._await_pass(number)
        self._stop_hosts()
        self.gpu.synchronize()
        self._raise_hosts_error()
        on_host = self._compare_clocks()
        spans = {i: self._put_right(one, on_host) for i, one in self._times.spans().items()}
        return [
            MeasuredPass(on_host(end_ns), spans.get(i)) for i, end_ns in enumerate(self._end_ns)
        ]

    def abort(self) -> None:
        self._stop_hosts()
        # What is raised is why the run was given up; a device that failed says so once more.
        with contextlib.suppress(RuntimeError):
            self.gpu.synchronize()

    def _ends_of_hosts(self) -> list[HostEvent]:
        """Events of what the host's threads were given so far."""
        return [host.put_event() for host in self._hosts.values()]

    def _stop_hosts(self) -> None:
        for host in self._hosts.values():
            host.stop()

    def _raise_hosts_error(self) -> None:
        for host in self._hosts.values():
            if host.error is not None:
                raise host.error

    def _launch_on_host(self, host: HostThread, work: Work) -> None:
        number, zero_ns = self._number, self._zero_ns
        if not self._timed:
            host.put(lambda: work(number))
            return
        starts, ends, at = self._times.begin_host()

        def timed() -> None:
            starts[at] = perf_counter_ns() - zero_ns
            work(number)
            ends[at] = perf_counter_ns() - zero_ns

        host.put(timed)

    def _moment(self) -> "_Moment":
        """An event and the host's time at it: between readings before and after, in the middle."""
        found = []
        for _ in range(_TRIES):
            event = self.gpu.new_event(timing=True, blocking=True)
            before_ns = perf_counter_ns()
            event.record(self._end_stream)
            event.synchronize()
            half_ns = (perf_counter_ns() - before_ns + 1) // 2
            found.append(_Moment(half_ns, before_ns + half_ns, event))
        return min(found, key=lambda moment: moment.error_ns)

    def _compare_clocks(self) -> Callable[[int], int]:
        """What the host's clock had when the device's had so much, by both at begin and end."""
        last, now = self._end_events[-1], self._moment()
        assert last is not None
        device_ns = self._end_ns[-1] + round(last.elapsed_time(now.event) * 1e6) - self._since_ns
        host_ns = now.host_ns - self._zero_ns - self._since_ns
        rate = host_ns / device_ns if device_ns else 1.0
        self.clock_error_ns = max(self.clock_error_ns, now.error_ns)
        return lambda at_ns: self._since_ns + round((at_ns - self._since_ns) * rate)

    def _put_right(self, spans: PassSpans, on_host: Callable[[int], int]) -> PassSpans:
        """What the device did, by the host's clock."""
        at_host = [launch.on_host for launch in self._program.launches]

        def right(times_ns: Sequence[int]) -> tuple[int, ...]:
            pairs = zip(times_ns, at_host, strict=True)
            return tuple(at_ns if on else max(0, on_host(at_ns)) for at_ns, on in pairs)

        return PassSpans(start_ns=right(spans.start_ns), end_ns=right(spans.end_ns))

    def _close_pass(self) -> None:
        """Record when everything enqueued so far, which ends with a pass, has completed."""
        end = self.gpu.new_event(timing=True, blocking=True)
        completes: list[CudaEvent] = [end, *self._ends_of_hosts()]
        end.record(self._end_stream)
        for stream in self.streams:
            if stream is not None and stream is not self._end_stream:
                event = self.gpu.new_event(blocking=True)
                event.record(stream)
                completes.append(event)
        self._end_events.append(end)
        self._completes.append(completes)

    def _await_pass(self, number: int) -> None:
        before_ns = perf_counter_ns()
        for event in self._completes[number]:
            if isinstance(event, HostEvent):
                event.wait()
            else:
                event.synchronize()
        self.waited_ns += perf_counter_ns() - before_ns
        self._completes[number] = []
        since, since_ns, end = self._zero, self._since_ns, self._end_events[number]
        if number:
            earlier = self._end_events[number - 1]
            assert earlier is not None
            since, since_ns = earlier, self._end_ns[number - 1]
            if number > 1:
                self._end_events[number - 2] = None
        assert end is not None
        self._end_ns.append(since_ns + round(since.elapsed_time(end) * 1e6))


def _wait(event: HostEvent) -> None:
    event.wait()


def event_table(program: Program, gpu: Gpu) -> EventTable:
    """An event for every awaited op that the device runs, in two sets."""
    awaited_by_host = program.awaited_by_host()
    return [
        [
            gpu.new_event(blocking=launch.position in awaited_by_host)
            if launch.records and not launch.on_host
            else None
            for launch in program.launches
        ]
        for _ in range(PASSES_AHEAD)
    ]
