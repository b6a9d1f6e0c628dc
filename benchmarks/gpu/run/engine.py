"""The jobs of a campaign, one after the other, as far as the time goes."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path

from benchmarks.gpu.cells.fitting import fitting_cell
from benchmarks.gpu.cells.measured_cell import (
    cell_found,
    expected_s,
    runs_of,
    whole_found,
    whole_run_of,
)
from benchmarks.gpu.cells.plans import PlannedCell, PlanPool, PlanRequest, Refused, Short
from benchmarks.gpu.device import requests
from benchmarks.gpu.device.worker import Worker
from benchmarks.gpu.jobs.campaign import (
    CHECK,
    FACTS,
    KERNELS,
    PROBE,
    SMOKE,
    TESTS,
    TRAIN,
    Cell,
    Peer,
    Plan,
    WholeStep,
)
from benchmarks.gpu.jobs.results import CheckFound, FactsFound, Found, PeerFound
from benchmarks.gpu.jobs.store import Store
from benchmarks.gpu.report.page import check_lines
from benchmarks.gpu.run import expected
from benchmarks.gpu.run.attempts import Attempts
from benchmarks.gpu.run.budget import Budget
from benchmarks.gpu.run.gpu_tests import tested
from benchmarks.gpu.run.known_device import KnownDevice
from benchmarks.gpu.run.settings import Settings
from benchmarks.gpu.run.train_job import trained
from twinstream.executor.probe.process import JobFailed, JobRefused
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.sizes import gib

_FACTS_LIMIT_S, _FACTS_PINNED_BYTES = 45.0, 8 * 2**30
_CHOOSE_LIMIT_S = 600.0  # each try has a limit of its own
_HOST_MEMORY_LIMIT_S = 150.0
_POLL_S = 0.2
_MOST_IDLE_S = 120.0  # without a plan: a process that was killed never gives its own
_TESTS_S = 20.0  # the least that is worth starting them


@dataclass
class Engine:
    """One process's jobs: every one that is not done yet, in order of value, in the time there is.

    Peers have a process of their own where one is given: the cells' goes on holding the host
    arena, and what a peer loads onto the device is not counted as a cell's.
    """

    settings: Settings
    plan: Plan
    store: Store
    worker: Worker
    budget: Budget
    tell: Callable[[str], None]
    peer_worker: Worker | None = None
    _host_bytes: int = field(default=0, init=False)
    _is_pinned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.attempts = Attempts(self.store, self.budget, self.tell)
        self.known = KnownDevice(self.settings, self.store, self.worker, self.budget, self.tell)

    @property
    def waiting(self) -> list[str]:
        """Jobs for which there was no time."""
        return self.attempts.waiting

    def run(self) -> None:
        stages, settings = self.settings.stages, self.settings
        if "facts" in stages:
            self.attempts.attempt(FACTS, 5.0, _FACTS_LIMIT_S, self._facts)
        if "check" in stages:
            self.attempts.attempt(CHECK, expected.CHECK_S, _limit_s(expected.CHECK_S), self._check)
        if "smoke" in stages and settings.smoke:
            self._suite(SMOKE, settings.smoke, settings.smoke_s)
        if "probe" in stages:
            expected_s = expected.CHOOSE_S[settings.backend]
            self.attempts.attempt(KERNELS, expected_s, _CHOOSE_LIMIT_S, self.known.choose)
            expected_s = self.known.probe_expected_s()
            if self.known.probed() is None and self.known.has_kernels():
                self.attempts.attempt(PROBE, expected_s, _limit_s(expected_s), self.known.probe)
        if "train" in stages:
            expected_s = expected.train_s(is_tiny=settings.is_tiny)
            job = partial(trained, "tiny" if settings.is_tiny else "full", settings.backend)
            self._alone(TRAIN, expected_s, _limit_s(expected_s), job)
        self._cells_and_peers()
        if "tests" in stages and settings.tests:
            self._suite(TESTS, settings.tests, self.budget.left_s)

    def _facts(self, limit_s: float) -> Found:
        wanted = requests.NoteFacts(_FACTS_PINNED_BYTES)
        found = FactsFound(facts=self.worker.ask(wanted, requests.Facts, limit_s).facts)
        for name, fact in found.facts.items():
            self.tell(f"{name}: {fact}")
        return found

    def _check(self, limit_s: float) -> CheckFound:
        found = self.worker.ask(requests.CheckDevice(), CheckFound, limit_s)
        for line in check_lines(found):
            self.tell(line)
        return found

    def _suite(self, key: str, tests: tuple[str, ...], limit_s: float) -> None:
        job = partial(tested, self.store, key, tests)
        self._alone(key, min(_TESTS_S, limit_s), limit_s, job)

    def _alone(
        self, key: str, expected_s: float, limit_s: float, job: Callable[[float], Found]
    ) -> None:
        """What looks at the device's memory, or takes all of it, is alone there."""
        if not self.attempts.is_open(key):
            return
        for worker in (self.worker, self.peer_worker):
            if worker is not None:
                worker.close()
        self._is_pinned = False
        self.attempts.attempt(key, expected_s, limit_s, job)

    def _cells_and_peers(self) -> None:
        jobs = [
            job
            for job in self.plan.asked(self.settings.only)
            if ("peers" if isinstance(job, Peer) else "cells") in self.settings.stages
            and self.attempts.is_open(job.key)
        ]
        measured = [job for job in jobs if not isinstance(job, Peer)]
        machine = self._planning_machine(measured) if measured else None
        if machine is None:
            for job in jobs:
                if isinstance(job, Peer):
                    self._peer(job)
            return
        if self.settings.backend == "cuda":
            self.worker.close()  # a fresh process takes of the device what any run's does
        with tempfile.TemporaryDirectory() as folder:
            requested = self._requested(measured, machine, Path(folder))
            with PlanPool(requested, self.settings.num_jobs) as plans:
                self._take_host_memory()
                self._run_as_planned(jobs, plans, machine)

    def _planning_machine(self, measured: list[Cell | WholeStep]) -> Machine | None:
        """The profile that cells are planned with; None, and why, where there is none."""
        machine = self.known.machine() if self.known.has_kernels() else None
        if machine is None:
            known = self.known.has_kernels()
            why = "no profile: cells wait for the probe"
            self.tell(why if known else "no kernels are known to be right here: cells wait")
            self.attempts.waiting += [job.key for job in measured]
        return machine

    def _requested(
        self, measured: list[Cell | WholeStep], machine: Machine, folder: Path
    ) -> list[PlanRequest]:
        """A plan for each cell that can be run here, in order; the others are skipped."""
        found: dict[str, PlanRequest] = {}
        for job in measured:
            cell = job.cell if isinstance(job, WholeStep) else job
            fitting, kernels = fitting_cell(cell, machine), self.known.kernels_of(cell)
            if isinstance(fitting, str):
                self.attempts.skip(job.key, fitting)
            elif isinstance(kernels, str):
                self.attempts.skip(job.key, kernels)
            else:
                if fitting is not cell and cell.key not in found:
                    self.tell(f"{cell.key}: planned for {gib(fitting.device_bytes or 0)}")
                found[cell.key] = PlanRequest(fitting, machine, cell.recipe(kernels), folder)
        return list(found.values())

    def _run_as_planned(
        self, jobs: list[Cell | WholeStep | Peer], plans: PlanPool, machine: Machine
    ) -> None:
        """Up to the next peer, the first whose plan is ready, again and again; then that peer."""
        left = [job for job in jobs if self.attempts.is_open(job.key)]
        idle_from_s = self.budget.clock()
        while left and self.budget.allows(_POLL_S):
            if isinstance(peer := left[0], Peer):
                self._peer_between(peer, left[1:])
                del left[0]
                idle_from_s = self.budget.clock()
                continue
            before_peers = takewhile(lambda job: not isinstance(job, Peer), left)
            ready = next((job for job in before_peers if plans.is_ready(_cell_key(job))), None)
            if ready is not None:
                left.remove(ready)
                self._measured(ready, plans.get(_cell_key(ready)), machine)
                idle_from_s = self.budget.clock()
            elif self.budget.clock() - idle_from_s > _MOST_IDLE_S:
                job = left.pop(0)
                reason = f"no plan after {_MOST_IDLE_S:.0f} s of waiting for it"
                self.attempts.fail(job.key, reason)
            else:
                time.sleep(_POLL_S)
        self.attempts.waiting += [job.key for job in left]

    def _measured(
        self, job: Cell | WholeStep | Peer, planned: PlannedCell | Refused, machine: Machine
    ) -> None:
        if isinstance(planned, Refused):
            give_up = self.attempts.fail if planned.broke else self.attempts.skip
            give_up(job.key, planned.reason)
            return
        if isinstance(job, WholeStep):
            assert planned.whole is not None, "the cell says that it has one"
            runs = whole_run_of(planned.whole)
            self._run_schedules(job.key, runs, (planned.whole,), whole_found)
            return
        tokens_per_s = planned.workload.tokens_per_step / planned.predicted_step_s
        self.tell(f"{job.key}: predicted {tokens_per_s:,.0f} tokens/s, planned in "
                  f"{planned.plan_s:.0f} s")  # fmt: skip

        def found_of(ran: requests.RanSchedules) -> Found:
            found, timelines = cell_found(planned, ran, machine)
            self.store.add_timelines({job.key: timelines})
            return found

        self._run_schedules(job.key, runs_of(planned), planned.shorts, found_of)

    def _run_schedules(
        self,
        key: str,
        runs: requests.RunSchedules,
        parts: tuple[Short, ...],
        found_of: Callable[[requests.RanSchedules], Found],
    ) -> None:
        seconds = expected_s(runs, parts, self.settings.backend)
        if self._host_bytes and not self._is_pinned:
            seconds += expected.PIN_S

        def run(limit_s: float) -> Found:
            wanted = replace(runs, host_bytes=self._host_bytes)
            self._is_pinned = False  # unless the process is still there afterwards
            try:
                ran = self.worker.ask(wanted, requests.RanSchedules, limit_s)
            except JobRefused as error:  # by this state of the machine: worth a second call
                raise JobFailed(str(error)) from None
            self._is_pinned = True
            return found_of(ran)

        self.attempts.attempt(key, seconds, _limit_s(seconds), run)

    def _peer_between(self, peer: Peer, left: list[Cell | WholeStep | Peer]) -> None:
        """Of cells, which then find the device as it was; after them it has the whole machine."""
        if self.peer_worker is not None and not any(not isinstance(job, Peer) for job in left):
            self.worker.close()
            self._is_pinned = False
        self._peer(peer)
        if self.peer_worker is not None:
            self.peer_worker.close()

    def _peer(self, peer: Peer) -> None:
        worker = self.peer_worker or self.worker

        def run(limit_s: float) -> Found:
            ran = worker.ask(requests.RunPeer(peer), requests.RanPeer, limit_s)
            micro_batches = peer.tokens_per_step / peer.micro_batch_tokens
            return PeerFound(
                tokens_per_step=peer.tokens_per_step,
                step_s=micro_batches * ran.micro_batch_s + ran.update_s,
                micro_batch_s=ran.micro_batch_s,
                update_s=ran.update_s,
                loss=ran.loss,
                device_used_bytes=ran.device_used_bytes,
            )

        self.attempts.attempt(peer.key, peer.expected_s, _limit_s(peer.expected_s), run)

    def _take_host_memory(self) -> None:
        """While plans are made; where so much cannot be had, cells ask for what they need."""
        size_bytes = self.settings.host_bytes
        if size_bytes is None or self.settings.backend == "cpu":
            return
        limit_s = min(_HOST_MEMORY_LIMIT_S, self.budget.left_s)
        self._host_bytes = size_bytes
        try:
            taken = self.worker.ask(requests.TakeHostMemory(size_bytes), requests.Taken, limit_s)
            self.tell(
                f"{gib(size_bytes)} of host memory pinned in {taken.seconds:.0f} s {taken.note}"
            )
            self._is_pinned = True
        except (JobRefused, JobFailed) as error:
            if isinstance(error, JobRefused):
                self._host_bytes = 0  # cells take what they need
            self.tell(f"{gib(size_bytes)} of host memory: {error}")
            self.store.log(getattr(error, "details", "") or str(error))


def _cell_key(job: Cell | WholeStep | Peer) -> str:
    return job.cell.key if isinstance(job, WholeStep) else job.key


def _limit_s(expected_s: float) -> float:
    """When a job is taken for hung: far beyond what it should take, even on a busy machine."""
    return 2.0 * expected_s + 60.0
