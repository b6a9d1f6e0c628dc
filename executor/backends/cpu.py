"""Threads as streams: the whole path on a machine without a GPU."""

import queue
import threading
import time
from collections.abc import Callable

import torch

from twinstream.executor.work import OpRunner
from twinstream.schedule.ops import Compute, Copy, Feed, Fetch, Stream

Job = Callable[[], None]


class CpuBackend:
    """One thread per stream, each taking its jobs in order; events are `threading.Event`.

    Kernels use `compute_threads` intra-op threads, copies and the host one each, so that they
    overlap the way a GPU's copy engines overlap its kernels. The first error stops all further
    work and is raised by `finish`.
    """

    def __init__(self, runner: OpRunner, num_ops_per_pass: int, compute_threads: int) -> None:
        self._runner = runner
        self._num_ops = num_ops_per_pass
        self._compute_threads = compute_threads
        self._jobs: dict[Stream, queue.SimpleQueue[Job | None]] = {}
        self._threads: list[threading.Thread] = []
        self._spans: list[tuple[int, int]] = []
        self._error: BaseException | None = None
        self._zero_ns = time.perf_counter_ns()

    def wait(self, stream: Stream, event: threading.Event) -> None:
        self._put(stream, lambda: _until(event))

    def compute(self, op: Compute) -> None:
        self._op(op.stream, lambda: self._runner.compute(op))

    def copy(self, op: Copy) -> None:
        self._op(op.stream, lambda: self._runner.copy(op))

    def host(self, op: Feed | Fetch) -> None:
        pass_index = len(self._spans) // self._num_ops
        self._op(op.stream, lambda: self._runner.host(op, pass_index))

    def record(self, stream: Stream) -> threading.Event:
        event = threading.Event()
        self._put(stream, event.set)
        return event

    def finish(self) -> list[tuple[int, int]]:
        for jobs in self._jobs.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return self._spans

    def _op(self, stream: Stream, work: Job) -> None:
        index = len(self._spans)
        self._spans.append((0, 0))

        def timed() -> None:
            if self._error is not None:
                return
            start_ns = time.perf_counter_ns()
            try:
                work()
            except BaseException as error:  # handed to the thread that called finish
                self._error = error
            self._spans[index] = (start_ns - self._zero_ns, time.perf_counter_ns() - self._zero_ns)

        self._put(stream, timed)

    def _put(self, stream: Stream, job: Job) -> None:
        if stream not in self._jobs:
            self._jobs[stream] = queue.SimpleQueue()
            threads = self._compute_threads if stream.queue.startswith("compute") else 1
            thread = threading.Thread(
                target=_serve, args=(self._jobs[stream], threads), name=str(stream), daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._jobs[stream].put(job)


def _serve(jobs: "queue.SimpleQueue[Job | None]", intra_op_threads: int) -> None:
    torch.set_num_threads(intra_op_threads)
    while (job := jobs.get()) is not None:
        job()


def _until(event: threading.Event) -> None:
    event.wait()
