"""CUDA streams and events: one host thread enqueues, only the GPU waits.

Not yet run on a GPU (see docs/benchmarks/README.md); its dispatch is the loop that the CPU and
virtual backends are tested with.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from twinstream.executor.work import OpRunner
from twinstream.schedule.ops import Compute, Copy, Feed, Fetch, Stream

HostEvent = threading.Event
CudaEvent = torch.cuda.Event | HostEvent


@dataclass
class _Timed:
    """Start and end of one op: CUDA events, or host times in ns since the run began."""

    start: torch.cuda.Event | int
    end: torch.cuda.Event | int


class CudaBackend:
    """Queues are CUDA streams, except `host`, which is a thread that waits for CUDA events.

    When an op on a CUDA stream waits for the host, the dispatching thread waits before it
    enqueues: what the host does was due long before, because inputs are fed a round ahead and
    results are taken a whole pass before their slot is written again.
    """

    def __init__(self, runner: OpRunner, num_ops_per_pass: int, device: torch.device) -> None:
        self._runner = runner
        self._num_ops = num_ops_per_pass
        self._device = device
        self._streams: dict[Stream, torch.cuda.Stream] = {}
        self._timed: list[_Timed] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="twinstream-host", daemon=True)
        self._thread.start()
        self._zero = self._event()
        self._zero.record(torch.cuda.current_stream(device))
        self._zero.synchronize()
        self._zero_ns = time.perf_counter_ns()

    def wait(self, stream: Stream, event: CudaEvent) -> None:
        if stream.queue == "host":
            if isinstance(event, torch.cuda.Event):
                self._jobs.put(event.synchronize)
        elif isinstance(event, torch.cuda.Event):
            self._stream(stream).wait_event(event)
        else:
            event.wait()

    def compute(self, op: Compute) -> None:
        self._enqueue(op.stream, lambda: self._runner.compute(op))

    def copy(self, op: Copy) -> None:
        self._enqueue(op.stream, lambda: self._runner.copy(op))

    def host(self, op: Feed | Fetch) -> None:
        pass_index = len(self._timed) // self._num_ops
        timed = _Timed(0, 0)
        self._timed.append(timed)

        def work() -> None:
            timed.start = time.perf_counter_ns() - self._zero_ns
            if self._error is None:
                try:
                    self._runner.host(op, pass_index)
                except BaseException as error:  # handed to the thread that called finish
                    self._error = error
            timed.end = time.perf_counter_ns() - self._zero_ns

        self._jobs.put(work)

    def record(self, stream: Stream) -> CudaEvent:
        if stream.queue == "host":
            happened = HostEvent()
            self._jobs.put(happened.set)
            return happened
        end = self._timed[-1].end
        assert isinstance(end, torch.cuda.Event), "an op was enqueued on this stream just before"
        return end

    def finish(self) -> list[tuple[int, int]]:
        self._jobs.put(None)
        self._thread.join()
        for stream in self._streams.values():
            stream.synchronize()
        if self._error is not None:
            raise self._error
        return [(self._ns(timed.start), self._ns(timed.end)) for timed in self._timed]

    def _enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        start, end = self._event(), self._event()
        with torch.cuda.stream(self._stream(stream)):
            start.record()
            work()
            end.record()
        self._timed.append(_Timed(start, end))

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._streams[stream]

    def _ns(self, moment: torch.cuda.Event | int) -> int:
        if isinstance(moment, int):
            return max(0, moment)
        return max(0, int(self._zero.elapsed_time(moment) * 1e6))

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
