"""Start the ranks of a cluster's schedule as processes of this machine."""

import contextlib
import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic, sleep
from typing import Any, Literal, Self

from twinstream.executor.launch.told import ASK, Job, MakeInputs, Trouble, Waits
from twinstream.executor.launch.verdict import verdict
from twinstream.executor.launch.worker import serve
from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks.gpus import require_gpus
from twinstream.executor.ranks.rank_run import RankOutcome
from twinstream.executor.ranks.world import Patience, open_store
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.verify_cluster import require_safe_cluster
from twinstream.schedule.errors import ArgumentError
from twinstream.schedule.worker_processes import (
    ForkedWorkerContext,
    WorkerContext,
    interrupts_held,
)

_ASKED_S = 2.0  # how long a rank may take to say what it waits for
_ASK_AGAIN_S = 0.2
StartMethod = Literal["spawn", "forkserver"]


def execute_ranks(
    schedule: ClusterSchedule,
    make: MakeInputs,
    options: RunOptions,
    patience: Patience | None = None,
    port: int | None = None,
) -> list[RankOutcome]:
    """Prove the schedule safe and run every rank in a process of its own; by rank what it ends
    with.

    Whatever goes wrong, no process is left when this returns or raises: at once where a rank dies
    or refuses, and after `patience.timeout_s` where one hangs.

    Args:
        make: of each rank's part what it begins with; called in its process, so it must pickle.
        port: of the store where ranks meet; by default one that is free.

    Raises:
        UnsafeSchedule: the proof fails; no process has been started.
        GpusError: a rank would have none; no process has been started.
        RendezvousError: the port is taken.
        RanksError: says which rank ended the run, why, and where it is known in which op.
    """
    require_safe_cluster(schedule)
    _require_devices(schedule, options)
    with RankProcesses(schedule.mesh.size, patience, port) as processes:
        return processes.execute(schedule, make, options)


class RankProcesses:
    """Processes for so many ranks, for one run after the other; they end with this one."""

    def __init__(
        self,
        num_ranks: int,
        patience: Patience | None = None,
        port: int | None = None,
        start_method: StartMethod = "spawn",
    ) -> None:
        self.patience = patience or Patience()
        self._store = open_store(port)
        self._num_runs = 0
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        context: WorkerContext | ForkedWorkerContext = WorkerContext()
        if start_method == "forkserver":  # all that takes seconds is imported once
            context = ForkedWorkerContext()
            context.set_forkserver_preload([serve.__module__])
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                made = context.Process(target=serve, args=(theirs, rank), daemon=True)
                with interrupts_held():
                    made.start()
                    self._processes.append(made)
                self._pipes.append(ours)
                theirs.close()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the ranks' processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def execute(
        self, schedule: ClusterSchedule, make: MakeInputs, options: RunOptions
    ) -> list[RankOutcome]:
        """Run a schedule that has been proven safe, with a rank for each process.

        Raises:
            RanksError: says which rank ended the run, and why; all processes have been ended.
        """
        if schedule.mesh.size != len(self._processes):
            raise ArgumentError(
                f"the schedule is of {schedule.mesh.size} ranks, and there are processes for "
                f"{len(self._processes)}"
            )
        _require_devices(schedule, options)
        self._num_runs += 1
        try:
            for rank, pipe in enumerate(self._pipes):
                job = Job(
                    schedule, make, options, rank, f"run{self._num_runs}", self._store.port,
                    self.patience,
                )  # fmt: skip
                with contextlib.suppress(OSError):  # who has died is found out below
                    pipe.send_bytes(pickle.dumps(job))
            return self._outcomes()
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        """End what runs: whoever waits for outcomes, in another thread, is told that it ended."""
        for process in self._processes:
            if process.pid is not None and process.exitcode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()

    def close(self) -> None:
        """End all processes, and whatever they have started."""
        self.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _outcomes(self) -> list[RankOutcome]:
        found: dict[int, RankOutcome] = {}
        while len(found) < len(self._pipes):
            for rank, message in self._messages(set(range(len(self._pipes))) - set(found), None):
                if isinstance(message, RankOutcome):
                    found[rank] = message
                elif not isinstance(message, Waits):
                    raise self._explained(message)
        return [found[rank] for rank in sorted(found)]

    def _explained(self, first: Trouble | None) -> Exception:
        """Asks all ranks what they wait for. `first` is None where a process died."""
        troubles = [] if first is None else [first]
        waits: dict[int, Waits] = {}
        until = monotonic() + _ASKED_S
        while True:
            self._ask(troubles, waits, until)
            dead = {
                rank: process.exitcode
                for rank, process in enumerate(self._processes)
                if process.exitcode is not None
            }
            named = {peer for said in waits.values() for one in said.now for peer in one.peers}
            named |= {peer for one in troubles for peer in one.peers}
            if named >= set(dead) or monotonic() >= until:
                return verdict(troubles, waits, dead)
            sleep(_ASK_AGAIN_S)  # those that are left may come to wait for it yet

    def _ask(self, troubles: list[Trouble], waits: dict[int, Waits], until: float) -> None:
        """What all ranks wait for, added to what is known."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(ASK.encode())
        silent = set(range(len(self._pipes)))
        while silent and (left := until - monotonic()) > 0:
            for rank, message in self._messages(silent, left):
                if isinstance(message, Trouble):
                    troubles.append(message)
                    continue
                if isinstance(message, Waits):
                    waits[rank] = message
                silent.discard(rank)

    def _messages(
        self, ranks: set[int], limit_s: float | None
    ) -> Iterator[tuple[int, RankOutcome | Trouble | Waits | None]]:
        """What these ranks say next; None of one whose process is gone."""
        pipes = {self._pipes[rank]: rank for rank in sorted(ranks)}
        ready: Sequence[Any] = wait(list(pipes), limit_s)
        for pipe in ready:
            try:
                yield pipes[pipe], pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                self._processes[pipes[pipe]].join(_ASKED_S)
                yield pipes[pipe], None


def _require_devices(schedule: ClusterSchedule, options: RunOptions) -> None:
    if options.backend == "cuda":
        require_gpus(schedule.mesh.size)
