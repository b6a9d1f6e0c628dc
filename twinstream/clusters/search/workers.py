"""Layouts timed or planned in processes beside this one, as soon as there is enough to do."""

import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
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


class Processes:
    """A context: pieces of work, several at once where there are cores and enough is left to do.

    What is found is the same with any number. `begin` is called in each process first.
    """

    def __init__(
        self, num_processes: int | None = None, begin: Callable[..., None] = ignore_interrupts,
        told: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        self._most = num_processes or _cores()
        self._begin, self._told = begin, told
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is None:
            return
        for process in list(self._pool._processes.values()):  # what is left is not wanted
            process.terminate()
        self._pool.shutdown(cancel_futures=True)

    @property
    def width(self) -> int:
        """How many pieces are done at once."""
        return 1 if self._pool is None else self._most

    def each(
        self, work: Callable[..., _Found], asked: Sequence[tuple[Any, ...]],
        num_left: int | None = None, there: Callable[..., _Found] | None = None,
    ) -> Generator[_Found]:  # fmt: skip
        """What comes of each in order; those that are not waited for end with the context.

        Args:
            work: a module's function.
            num_left: as many may be asked for later; None: as many as now.
            there: what does the same in a process that has begun; None: `work`.
        """
        left = len(asked) + (len(asked) if num_left is None else num_left)
        for place, one in enumerate(asked):
            if self._pool is not None:
                yield from self._at_once(work, there or work, asked[place:])
                return
            begun_s = time.perf_counter()
            found = work(*one)
            left -= 1
            if self._most > 1 and (time.perf_counter() - begun_s) * left > _WORTH_S:
                self._pool = ProcessPoolExecutor(
                    self._most, mp_context=ForkedWorkerContext(__name__),
                    initializer=self._begin, initargs=self._told,
                )  # fmt: skip
            yield found

    def _at_once(
        self, work: Callable[..., _Found], there: Callable[..., _Found],
        asked: Sequence[tuple[Any, ...]],
    ) -> Generator[_Found]:  # fmt: skip
        assert self._pool is not None, "it has been started"
        done = 0
        futures = list[Future[_Found]]()
        try:
            with interrupts_held():  # by what is started meanwhile
                futures += [self._pool.submit(there, *each) for each in asked]
            for future in futures:
                yield future.result()
                done += 1
        except BrokenProcessPool:  # short of memory, probably: on with one process
            self._pool, self._most = None, 1
            yield from (work(*each) for each in asked[done:])
        finally:
            for future in futures:
                future.cancel()


class LayoutTimers(Processes):
    """Times layouts; `width` of them are best asked for together."""

    def __init__(self, pricing: Pricing, num_processes: int | None = None) -> None:
        super().__init__(num_processes, _begin, (pricing.cluster, pricing.machine, pricing.caps))
        self._pricing = pricing

    def folded_s(self, asked: Sequence[tuple[Job, float]], num_left: int) -> list[float]:
        """Seconds of steps (see `folded_step_s`); so many more may be asked for."""
        return self._priced(_folded_s, asked, num_left)

    def predictions(
        self, jobs: Sequence[Job], num_left: int
    ) -> list[tuple[Job, Prediction] | None]:
        """Steps simulated whole, with the kernels that compute them; None of what cannot be."""
        return self._priced(_predicted, [(job,) for job in jobs], num_left)

    def _priced(self, work: Any, asked: Sequence[tuple[Any, ...]], num_left: int) -> list[Any]:
        here, there = partial(work, self._pricing), partial(_in_worker, work)
        return list(self.each(here, asked, num_left, there))


def _cores() -> int:
    """Of this process; one in a process that is itself one of several."""
    if multiprocessing.parent_process() is not None:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin(cluster: Cluster, machine: Machine, caps: Caps | None) -> None:
    global _pricing
    ignore_interrupts()
    _pricing = Pricing(cluster, machine, caps)


def _in_worker(work: Any, *asked: Any) -> Any:
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
