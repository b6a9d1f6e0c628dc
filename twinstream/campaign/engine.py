"""The jobs of a campaign, one after the other, as far as the time goes."""

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from twinstream.campaign import requests
from twinstream.campaign.budget import Budget
from twinstream.campaign.choosing import Tries, choose_kernels
from twinstream.campaign.device_side import datasheet_of
from twinstream.campaign.gpu_tests import run_gpu_tests
from twinstream.campaign.jobs import KERNELS, PROBE, TESTS, Cell, Peer, Plan, Size, Stage
from twinstream.campaign.measured_cell import cell_found, expected_s, runs_of
from twinstream.campaign.plans import PlannedCell, PlanPool, PlanRequest, Refused
from twinstream.campaign.results import (
    Found,
    KernelsFound,
    LinkRate,
    Outcome,
    PeerFound,
    ProbeFound,
    SampleRatio,
    SuiteFound,
)
from twinstream.campaign.store import Store
from twinstream.campaign.worker import Backend, JobFailed, JobRefused, JobTimeout, Worker
from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.schema import AttentionChoice, Machine
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.schedule.sizes import gib

_MOST_ATTEMPTS = 2
_TESTS_LIMIT_S = {"full": 180.0, "tiny": 60.0}
_PROBE_S = {"full": 120.0, "tiny": 8.0}
_CHOOSE_LIMIT_S = 400.0  # each try has a limit of its own
_CHOOSE_S = {"cpu": 5.0, "cuda": 60.0}
_HOST_MEMORY_LIMIT_S = 150.0
_PIN_S = 60.0  # of 100 GiB, where a new process has to do it again
_POLL_S = 0.2
_MOST_IDLE_S = 120.0  # without a plan: a process that was killed never gives its own
_NUM_TELLING = 4  # cells that come before any peer


@dataclass(frozen=True)
class Settings:
    """What a call of the campaign is to do."""

    backend: Backend
    size: Size
    stages: tuple[Stage, ...]
    host_bytes: int | None
    num_jobs: int
    tests: tuple[str, ...]
    vector: str
    attention: str
    only: tuple[str, ...] = ()


@dataclass
class Engine:
    """One call: every job that is not done yet, in order of value, while the budget allows.

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
    waiting: list[str] = field(default_factory=list)
    _host_bytes: int = field(default=0, init=False)
    _is_pinned: bool = field(default=False, init=False)

    def run(self) -> None:
        stages = self.settings.stages
        if "tests" in stages and self._is_open(TESTS):
            self.worker.close()  # tests look at the device's memory, and should be alone there
            self._attempt(TESTS, 20.0, _TESTS_LIMIT_S[self.settings.size], self._tests)
        if "probe" in stages:
            expected_s = _CHOOSE_S[self.settings.backend]
            self._attempt(KERNELS, expected_s, _CHOOSE_LIMIT_S, self._choose)
            expected_s = _PROBE_S[self.settings.size]
            if self._probed() is None and self._has_kernels():
                self._attempt(PROBE, expected_s, _limit_s(expected_s), self._probe)
        cells = [c for c in self.plan.cells if "cells" in stages and self._wanted(c.key)]
        if cells:
            self._cells(cells)
        if cells and self.peer_worker is not None:
            self.worker.close()  # peers find the whole machine
        for peer in self._open_peers():
            self._peer(peer)

    def _open_peers(self) -> list[Peer]:
        if "peers" not in self.settings.stages:
            return []
        return [peer for peer in self.plan.peers if self._wanted(peer.key)]

    def _cells(self, cells: list[Cell]) -> None:
        if not self._has_kernels():
            self.tell("no kernels are known to be right here: cells wait")
            self.waiting += [cell.key for cell in cells]
            return
        machine = self._machine()
        if machine is None:
            self.tell("no profile: cells wait for the probe")
            self.waiting += [cell.key for cell in cells]
            return
        fitting = [cell for cell in cells if self._fits(cell, machine)]
        if self.settings.backend == "cuda":
            self.worker.close()  # a fresh process takes of the device what any run's does
        with tempfile.TemporaryDirectory() as folder:
            recipe = Recipe(kernels=self._kernels())
            wanted = [PlanRequest(cell, machine, recipe, Path(folder)) for cell in fitting]
            with PlanPool(wanted, self.settings.num_jobs) as plans:
                self._take_host_memory()
                self._run_as_planned(fitting, plans, machine)

    def _run_as_planned(self, cells: list[Cell], plans: PlanPool, machine: Machine) -> None:
        """The first cell whose plan is ready, again and again; a peer meanwhile where none is."""
        left = list(cells)
        telling = self.plan.cells[:_NUM_TELLING]
        early = [peer for peer in self._open_peers() if peer.early]
        beside = [peer for peer in self._open_peers() if peer.kind != "fsdp_offload"]
        idle_from_s = self.budget.clock()
        while left and self.budget.allows(_POLL_S):
            ready = next((cell for cell in left if plans.is_ready(cell.key)), None)
            if early and not any(cell in left for cell in telling):
                self._peer_between(early.pop(0))
            elif ready is not None:
                left.remove(ready)
                self._cell(ready, plans.get(ready.key), machine)
            elif beside:
                self._peer_between(beside.pop(0))
            elif self.budget.clock() - idle_from_s > _MOST_IDLE_S:
                for cell in left:
                    self._fail(cell.key, f"no plan after {_MOST_IDLE_S:.0f} s of waiting for it")
                return
            else:
                time.sleep(_POLL_S)
                continue
            idle_from_s = self.budget.clock()
        self.waiting += [cell.key for cell in left]

    def _cell(self, cell: Cell, planned: PlannedCell | Refused, machine: Machine) -> None:
        if isinstance(planned, Refused):
            (self._fail if planned.broke else self._skip)(cell.key, planned.reason)
            return
        expected = expected_s(planned, self.settings.backend)
        if self._host_bytes and not self._is_pinned:
            expected += _PIN_S
        tokens_per_s = planned.workload.tokens_per_step / planned.predicted_step_s
        self.tell(f"{cell.key}: predicted {tokens_per_s:,.0f} tokens/s, planned in "
                  f"{planned.plan_s:.0f} s")  # fmt: skip

        def run(limit_s: float) -> Found:
            wanted = replace(runs_of(planned), host_bytes=self._host_bytes)
            self._is_pinned = False  # unless the process is still there afterwards
            try:
                ran = self.worker.ask(wanted, requests.RanSchedules, limit_s)
            except JobRefused as error:  # by this state of the machine: worth a second call
                raise JobFailed(str(error)) from None
            self._is_pinned = True
            found, timelines = cell_found(planned, ran, machine)
            self.store.add_timelines({cell.key: timelines})
            return found

        self._attempt(cell.key, expected, _limit_s(expected), run)

    def _peer_between(self, peer: Peer) -> None:
        """Of cells, which then find the device as it was."""
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

        self._attempt(peer.key, peer.expected_s, _limit_s(peer.expected_s), run)

    def _tests(self, limit_s: float) -> SuiteFound:
        done = run_gpu_tests(self.settings.tests, self.store.tests_report, limit_s)
        if done.found.failed or done.timed_out:
            self.store.log(done.printed[-200_000:])
        if done.timed_out:
            self.tell(f"tests were ended after {limit_s:.0f} s; those reached are counted")
        return done.found

    def _choose(self, limit_s: float) -> KernelsFound:
        settings, end_s = self.settings, self.budget.clock() + limit_s
        found = choose_kernels(
            Tries(self.worker, lambda: end_s - self.budget.clock()),
            settings.backend,
            settings.vector,
            settings.attention,
            small=settings.size == "tiny",
        )
        for note in found.notes:
            self.tell(note)
        return found

    def _probe(self, limit_s: float) -> ProbeFound:
        where, small = self.store.results.where, self.settings.size == "tiny"
        kernels = self._kernels()
        excess_bytes = found.excess_bytes if (found := self._chosen()) else 0
        wanted = requests.ProbeDevice(kernels, small, where.commit, where.date, excess_bytes)
        probed = self.worker.ask(wanted, requests.ProbedDevice, limit_s)
        machine = self._with_attention(probed.machine, kernels)
        save_machine(machine, self.store.profile)
        return ProbeFound(
            machine=machine.name,
            content_hash=machine.content_hash,
            kernels=kernels,
            links=tuple(
                LinkRate(direction=direction, size_bytes=size, gb_per_s=rate)
                for direction, size, rate in probed.links
            ),
            samples=tuple(
                SampleRatio(name=name, time_ns=time_ns, ratio=ratio)
                for name, time_ns, ratio in probed.samples
            ),
        )

    def _with_attention(self, machine: Machine, kernels: KernelChoice) -> Machine:
        """Naming the attention that was chosen, for plans that leave it open."""
        where = self.store.results.where
        kind: Literal["measured", "assumed"] = "measured"
        source = f"right and fastest on {where.device}, {where.date}, torch {where.torch}"
        if self._chosen() is None or self.settings.attention != "auto":
            kind, source = "assumed", "not compared with others"
        choice = AttentionChoice(name=kernels.attention, kind=kind, source=source)
        return machine.model_copy(update={"attention": choice})

    def _probed(self) -> Machine | None:
        """The profile of an earlier call, if it is whole."""
        outcome = self.store.results.outcomes.get(PROBE)
        if outcome is None or not isinstance(outcome.found, ProbeFound):
            return None
        with suppress(ProfileError):
            machine = load_machine(self.store.profile)
            if machine.content_hash == outcome.found.content_hash:
                return machine
        self.tell(f"{self.store.profile} is not the profile that was probed: probing again")
        self.store.forget(PROBE)
        return None

    def _machine(self) -> Machine | None:
        """The probed profile; without one the shipped profile of the device, and says so."""
        if (machine := self._probed()) is not None:
            return machine
        shipped = datasheet_of(self.store.results.where.device)
        if shipped is not None:
            self.tell(f"no probed profile: planning with the shipped '{shipped.name}'")
        return shipped

    def _kernels(self) -> KernelChoice:
        """Those chosen; where none were, what needs no compiling and every torch has."""
        if (found := self._chosen()) is not None:
            return found.kernels
        on_cuda = self.settings.backend == "cuda"
        return KernelChoice(attention="sdpa_flash" if on_cuda else "eager")

    def _chosen(self) -> KernelsFound | None:
        outcome = self.store.results.outcomes.get(KERNELS)
        found = outcome.found if outcome is not None else None
        return found if isinstance(found, KernelsFound) else None

    def _has_kernels(self) -> bool:
        """Whether some were chosen, or no choice was tried."""
        return self._chosen() is not None or KERNELS not in self.store.results.outcomes

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

    def _fits(self, cell: Cell, machine: Machine) -> bool:
        number = machine.device_memory_bytes
        if number is None or number.value is None or cell.device_bytes is None:
            return True
        if cell.device_bytes <= number.value:
            return True
        self._skip(cell.key, f"this device has {gib(number.value)}")
        return False

    def _wanted(self, key: str) -> bool:
        only = self.settings.only
        return self._is_open(key) and (not only or any(text in key for text in only))

    def _is_open(self, key: str) -> bool:
        results = self.store.results
        return not results.is_done(key) and results.attempts(key) < _MOST_ATTEMPTS

    def _attempt(
        self, key: str, expected_s: float, limit_s: float, job: Callable[[float], Found]
    ) -> None:
        """Do a job if it is open and there is time; its outcome is on the disk before the next."""
        if not self._is_open(key):
            return
        if not self.budget.allows(expected_s):
            self.waiting.append(key)
            return
        attempts = self.store.results.attempts(key)
        self.store.put(key, Outcome(status="started", attempts=attempts + 1))
        self.tell(f"{key} ... (about {expected_s:.0f} s, {self.budget.left_s:.0f} s left)")
        start_s = self.budget.clock()
        within_s = min(limit_s, self.budget.left_s)
        try:
            found = job(within_s)
        except JobRefused as error:
            outcome = Outcome(status="skipped", attempts=attempts + 1, reason=str(error))
        except JobTimeout as error:
            cut_off = within_s < limit_s  # by the end of the call, which is not the job's fault
            counted = attempts if cut_off else attempts + 1
            outcome = Outcome(status="failed", attempts=counted, reason=str(error))
        except JobFailed as error:
            self.store.log(f"{key}: {error}\n{error.details}")
            outcome = Outcome(status="failed", attempts=attempts + 1, reason=str(error))
        else:
            outcome = Outcome(status="done", attempts=attempts + 1, found=found)
        seconds = self.budget.clock() - start_s
        self.store.put(key, outcome.model_copy(update={"seconds": seconds}))
        self.tell(f"{key}: {outcome.status} in {seconds:.0f} s {outcome.reason}")

    def _skip(self, key: str, reason: str) -> None:
        self.store.put(key, Outcome(status="skipped", reason=reason))
        self.tell(f"{key}: skipped: {reason}")

    def _fail(self, key: str, reason: str) -> None:
        attempts = self.store.results.attempts(key) + 1
        self.store.put(key, Outcome(status="failed", attempts=attempts, reason=reason))
        self.store.log(f"{key}: {reason}")
        self.tell(f"{key}: failed: {reason}")


def _limit_s(expected_s: float) -> float:
    """When a job is taken for hung: far beyond what it should take, even on a busy machine."""
    return 2.0 * expected_s + 60.0
