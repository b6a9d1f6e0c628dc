"""Threads as streams: the whole path on a machine without a GPU."""

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from twinstream.executor.backends.protocol import PASSES_AHEAD, PassTimes
from twinstream.executor.program import Launch, Program, Work
from twinstream.schedule.timeline import PassSpans

Job = Callable[[], None]
_Spans = tuple[list[int], list[int]]


class CpuBackend:
    """One thread per stream, each taking its jobs in order; events are `threading.Event`.

    Kernels use `compute_threads` intra-op threads, copies and the host one each, so that they
    overlap the way a GPU's copy engines overlap its kernels. The first error stops all further
    work and is raised by `finish`.
    """

    def __init__(self, program: Program, works: Sequence[Work], compute_threads: int) -> None:
        self.waited_ns = 0
        self._program = program
        self._works = works
        self._jobs: list[queue.SimpleQueue[Job | None]] = [
            queue.SimpleQueue() for _ in program.streams
        ]
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(jobs, compute_threads if stream.queue.startswith("compute") else 1),
                name=str(stream),
                daemon=True,
            )
            for stream, jobs in zip(program.streams, self._jobs, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        self._spans: list[_Spans] = []
        self._timed: list[bool] = []
        self._ends_of_passes: list[list[threading.Event]] = []
        self._error: BaseException | None = None
        self._zero_ns = time.perf_counter_ns()

    def begin_pass(self, number: int, *, timed: bool) -> None:
        if number:
            self._ends_of_passes.append([self._put_event(jobs) for jobs in self._jobs])
        if number >= PASSES_AHEAD:
            before_ns = time.perf_counter_ns()
            for event in self._ends_of_passes[number - PASSES_AHEAD]:
                event.wait()
            self.waited_ns += time.perf_counter_ns() - before_ns
        if self._error is not None:
            raise self._error
        num_ops = len(self._program.launches)
        self._spans.append(([0] * num_ops, [0] * num_ops))
        self._timed.append(timed)

    def wait(self, launch: Launch, event: threading.Event) -> None:
        self._jobs[launch.stream].put(lambda: _until(event))

    def launch(self, launch: Launch) -> None:
        number, position = len(self._spans) - 1, launch.position
        work, (starts, ends) = self._works[position], self._spans[number]

        def timed() -> None:
            if self._error is not None:
                return
            starts[position] = time.perf_counter_ns() - self._zero_ns
            try:
                work(number)
            except BaseException as error:  # handed to the thread that called finish
                self._error = error
            ends[position] = time.perf_counter_ns() - self._zero_ns

        self._jobs[launch.stream].put(timed)

    def record(self, launch: Launch) -> threading.Event:
        return self._put_event(self._jobs[launch.stream])

    def finish(self) -> list[PassTimes]:
        self._join()
        if self._error is not None:
            raise self._error
        last = self._program.last_compute()
        return [
            PassTimes(
                ends[last],
                PassSpans(start_ns=tuple(starts), end_ns=tuple(ends)) if timed else None,
            )
            for (starts, ends), timed in zip(self._spans, self._timed, strict=True)
        ]

    def abort(self) -> None:
        self._error = self._error or RuntimeError("the run was given up")
        self._join()

    def _join(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _put_event(self, jobs: "queue.SimpleQueue[Job | None]") -> threading.Event:
        event = threading.Event()
        jobs.put(event.set)
        return event


def _serve(jobs: "queue.SimpleQueue[Job | None]", intra_op_threads: int) -> None:
    torch.set_num_threads(intra_op_threads)
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            job()


def _until(event: threading.Event) -> None:
    event.wait()
