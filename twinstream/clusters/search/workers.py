"""Layouts timed in processes beside this one, as soon as there is enough to do for them."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Self, TypeVar

from twinstream.clusters.kernel_sets import with_kernels
from twinstream.clusters.offload import OffloadError
from twinstream.clusters.predict import Prediction, predict
from twinstream.clusters.search.chains import Pricing
from twinstream.clusters.search.folded import folded_step_s
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import LayoutError
from twinstream.planner.planner import gc_paused
from twinstream.schedule.document import Caps
from twinstream.schedule.worker_processes import (
    ForkedWorkerContext,
    ignore_interrupts,
    interrupts_held,
)

_WORTH_S = 4.0  # of work that is left; starting processes takes a second or two
_Found = TypeVar("_Found")
_pricing: Pricing | None = None  # of a worker


class LayoutTimers:
    """A context: times layouts, several at once where there are cores and enough is left to do.

    `width` of them are best asked for together. What is found is the same with any.
    """

    def __init__(self, pricing: Pricing, num_processes: int | None = None) -> None:
        self._pricing = pricing
        self._most = num_processes or _cores()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        if kind is not None:  # what is at work is not waited for
            for process in list(self._pool._processes.values()):
                process.terminate()
        self._pool.shutdown(cancel_futures=True)

    @property
    def width(self) -> int:
        """How many layouts are timed at once."""
        return 1 if self._pool is None else self._most

    def folded_s(self, asked: Sequence[tuple[Job, float]], num_left: int) -> list[float]:
        """Seconds of steps (see `folded_step_s`); so many more may be asked for."""
        return self._each(_folded_s, asked, num_left)

    def predictions(
        self, jobs: Sequence[Job], num_left: int
    ) -> list[tuple[Job, Prediction] | None]:
        """Steps simulated whole, with the kernels that compute them; None of what cannot be."""
        return self._each(_predicted, [(job,) for job in jobs], num_left)

    def _each(self, work: Any, asked: Sequence[tuple[Any, ...]], num_left: int) -> list[Any]:
        if self._pool is not None:
            try:
                with interrupts_held():  # by what is started meanwhile
                    futures = [self._pool.submit(_in_worker, work, each) for each in asked]
                return [future.result() for future in futures]
            except BrokenProcessPool:  # short of memory, probably: on with one process
                self._pool, self._most = None, 1
        begun_s = time.perf_counter()
        found = [work(self._pricing, *each) for each in asked]
        each_s = (time.perf_counter() - begun_s) / max(1, len(asked))
        if self._most > 1 and each_s * num_left > _WORTH_S:
            self._pool = ProcessPoolExecutor(
                self._most, mp_context=ForkedWorkerContext(__name__), initializer=_begin,
                initargs=(self._pricing.cluster, self._pricing.machine, self._pricing.caps),
            )  # fmt: skip
        return found


def _cores() -> int:
    """Of this process; one in a process that is itself one of several."""
    if multiprocessing.parent_process() is not None:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin(cluster: Cluster, machine: Machine, caps: Caps | None) -> None:
    global _pricing
    ignore_interrupts()
    _pricing = Pricing(cluster, machine, caps)


def _in_worker(work: Any, asked: tuple[Any, ...]) -> Any:
    return work(_pricing, *asked)


def _folded_s(pricing: Pricing, job: Job, most_s: float) -> float:
    with gc_paused():
        return folded_step_s(job, pricing, most_s)


def _predicted(pricing: Pricing, job: Job) -> tuple[Job, Prediction] | None:
    with gc_paused():
        try:
            job = with_kernels(job, pricing.machine)
            return job, predict(job, pricing.cluster, caps=pricing.caps)
        except (OffloadError, LayoutError):
            return None
