"""Threads as streams: the whole path on a machine without a GPU."""

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twinstream.executor.backends.protocol import PASSES_AHEAD, MeasuredPass
from twinstream.executor.program.compiled import Launch, Program, Work
from twinstream.schedule.timeline import PassSpans


class Happening:
    """An event between threads: it happens once, and any number of threads may wait for it.

    A lock that is held until then: unlike `threading.Event`, whose every call is Python code, it
    costs nothing when it has happened already. Threads that wait would take that time from the
    kernel's thread, since only one runs Python at a time.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def happened(self) -> None:
        self._lock.release()

    def wait(self) -> None:
        with self._lock:
            pass


_Spans = tuple[list[int], list[int]]
"""Start and end of every op of a pass, filled in by the streams; ns."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One op of a stream, all of it: what it waits for, its work, where its span goes.

    `work` is None for the end of a pass. `spans` is None where the op is not timed.
    """

    work: Work | None
    pass_number: int
    position: int
    waits: tuple[Happening, ...]
    done: Happening | None
    spans: _Spans | None


_Jobs = queue.SimpleQueue[_Job | None]


class CpuBackend:
    """One thread per stream, each taking its ops in order, an op at a time.

    Kernels use one intra-op thread, as copies and the host do, so that they overlap the way a
    GPU's copy engines overlap its kernels. The first error stops all further
    work and is raised by `finish`. Spans are kept of passes that are timed; of the others when
    they ended. They count from `zero_ns`, by default from now.
    """

    def __init__(self, program: Program, works: Sequence[Work], zero_ns: int | None = None) -> None:
        self.waited_ns = 0
        self._program = program
        self._works = works
        self._last = program.last_compute()
        self._jobs: list[_Jobs] = [queue.SimpleQueue() for _ in program.streams]
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(jobs, stream.queue.startswith("compute")),
                name=str(stream),
                daemon=True,
            )
            for stream, jobs in zip(program.streams, self._jobs, strict=True)
        ]
        self._kernels_wall_ns = self._kernels_core_ns = 0
        self._number = 0
        self._spans: _Spans | None = None
        self._timed: dict[int, _Spans] = {}
        self._ends_ns: list[int] = []
        self._waits: list[Happening] = []
        self._done: Happening | None = None
        self._ends_of_passes: deque[list[Happening]] = deque()
        self._error: BaseException | None = None
        self._zero_ns = time.perf_counter_ns() if zero_ns is None else zero_ns
        for thread in self._threads:
            thread.start()

    def begin_pass(self, number: int, *, timed: bool) -> None:
        if number:
            self._ends_of_passes.append([self._put_end(jobs) for jobs in self._jobs])
        if number >= PASSES_AHEAD:
            before_ns = time.perf_counter_ns()
            for end in self._ends_of_passes.popleft():
                end.wait()
            self.waited_ns += time.perf_counter_ns() - before_ns
        if self._error is not None:
            raise self._error
        self._number, self._spans = number, None
        if timed:
            num_ops = len(self._program.launches)
            self._spans = self._timed[number] = ([0] * num_ops, [0] * num_ops)
        self._ends_ns.append(0)

    def wait(self, launch: Launch, event: Happening) -> None:
        self._waits.append(event)

    def launch(self, launch: Launch) -> None:
        self._done = Happening() if launch.records else None
        self._jobs[launch.stream].put(
            _Job(
                work=self._works[launch.position],
                pass_number=self._number,
                position=launch.position,
                waits=tuple(self._waits),
                done=self._done,
                spans=self._spans,
            )
        )
        self._waits.clear()

    def record(self, launch: Launch) -> Happening:
        assert self._done is not None, "the op just launched records"
        return self._done

    def synchronize(self) -> None:
        for end in [self._put_end(jobs) for jobs in self._jobs]:
            end.wait()
        if self._error is not None:
            raise self._error

    def finish(self) -> list[MeasuredPass]:
        self._join()
        if self._error is not None:
            raise self._error
        spans = {
            number: PassSpans(start_ns=tuple(starts), end_ns=tuple(ends))
            for number, (starts, ends) in self._timed.items()
        }
        return [MeasuredPass(end_ns, spans.get(i)) for i, end_ns in enumerate(self._ends_ns)]

    @property
    def processor_share(self) -> float | None:
        """The share of the kernels' time in which they had a core, in all passes but the first."""
        if not self._kernels_wall_ns or self._kernels_core_ns <= 0:
            return None
        return min(1.0, self._kernels_core_ns / self._kernels_wall_ns)

    def abort(self) -> None:
        self._error = self._error or RuntimeError("the run was given up")
        self._join()

    def _join(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _put_end(self, jobs: _Jobs) -> Happening:
        end = Happening()
        jobs.put(_Job(None, self._number, -1, (), end, None))
        return end

    def _serve(self, jobs: _Jobs, computes: bool) -> None:
        """A stream's thread."""
        torch.set_num_threads(1)
        with torch.no_grad():
            while (job := jobs.get()) is not None:
                for event in job.waits:
                    event.wait()
                if job.work is not None and self._error is None:
                    core_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
                    self._run(job.work, job)
                    if computes and job.pass_number:
                        self._kernels_core_ns += time.thread_time_ns() - core_ns
                        self._kernels_wall_ns += time.perf_counter_ns() - wall_ns
                if job.done is not None:
                    job.done.happened()

    def _run(self, work: Work, job: _Job) -> None:
        start_ns = time.perf_counter_ns()
        try:
            work(job.pass_number)
        except BaseException as error:  # handed to the thread that called finish
            self._error = self._error or error
        end_ns = time.perf_counter_ns() - self._zero_ns
        if job.spans is not None:
            starts, ends = job.spans
            starts[job.position], ends[job.position] = start_ns - self._zero_ns, end_ns
        if job.position == self._last:
            self._ends_ns[job.pass_number] = end_ns
