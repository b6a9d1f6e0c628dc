"""Start the ranks of a cluster's schedule as processes of this machine, watch them and end them."""

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic, sleep
from typing import Any, Literal, Self

from twinstream.executor.launch.failure import diagnose
from twinstream.executor.launch.hosts import OtherRanks
from twinstream.executor.launch.protocol import (
    BlockedOps,
    MakeInputs,
    Note,
    RankFailure,
    RunTask,
    TrainTask,
    WhatBlocks,
    recv,
    send,
)
from twinstream.executor.launch.worker import serve
from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks.gpus import require_gpus
from twinstream.executor.ranks.rank_run import RankOutcome
from twinstream.executor.ranks.world import Patience, StoreAddress, open_store
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.document import Schedule
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
    schedule: Schedule,
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
    require_safe(schedule)
    if options.backend == "cuda":
        require_gpus(schedule.mesh.size)
    with RankProcesses(schedule.mesh.size, patience, port) as processes:
        return processes.execute(schedule, make, options)


class RankProcesses:
    """Processes for so many ranks, for one run after the other; they end with this one.

    Args:
        others: the ranks after these, which were started by somebody else and have come.
        tell: takes a line of any rank about what slows it down, once.
    """

    def __init__(
        self,
        num_ranks: int,
        patience: Patience | None = None,
        port: int | None = None,
        start_method: StartMethod = "spawn",
        others: OtherRanks | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._tell, self._told = tell, set[str]()
        self.patience = patience or Patience()
        self._others = others
        self._store = open_store(port) if others is None else None
        self._num_runs = 0
        self._gone: set[int] = set()  # ranks whose pipe has ended
        self._ended: set[int] = set()  # ranks that are through with the run
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        context: WorkerContext | ForkedWorkerContext = WorkerContext()
        if start_method == "forkserver":  # all that takes seconds is imported once
            context = ForkedWorkerContext(serve.__module__)
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                made = context.Process(target=serve, args=(theirs, rank), daemon=True)
                with interrupts_held():
                    made.start()
                    self._processes.append(made)
                self._pipes.append(ours)
                theirs.close()
            self._pipes += [] if others is None else others.pipes
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        return len(self._pipes)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the ranks that were started here."""
        return [process.pid for process in self._processes if process.pid is not None]

    def execute(
        self, schedule: Schedule, make: MakeInputs, options: RunOptions
    ) -> list[RankOutcome]:
        """Run a schedule that has been proven safe, with a rank for each process.

        Raises:
            RanksError: says which rank ended the run, and why; all processes have been ended.
        """
        found: dict[int, RankOutcome] = {}
        self.begin(schedule, make, options)
        while len(found) < self.size:
            said = self.recv()
            assert said is not None, "it is waited for"
            rank, found[rank] = said
        return [found[rank] for rank in sorted(found)]

    def begin(self, schedule: Schedule, work: MakeInputs | TrainTask, options: RunOptions) -> None:
        """Start a run of a schedule that has been proven safe; what comes of it, `recv` says.

        Raises:
            ArgumentError: the schedule is of another number of ranks.
            GpusError: a rank would have none.
        """
        if schedule.mesh.size != self.size:
            raise ArgumentError(
                f"the schedule is of {schedule.mesh.size} ranks, and there are processes for "
                f"{self.size}"
            )
        if options.backend == "cuda":
            require_gpus(len(self._processes))
        self._num_runs += 1
        self._ended.clear()
        name = f"run{self._num_runs}"
        if self._others is not None:
            name, where = f"{self._others.name}/{name}", self._others.address
        else:
            assert self._store is not None, "ranks of this machine meet at a store of its own"
            where = StoreAddress(self._store.port)
        for rank in range(self.size):
            self.send(rank, RunTask(schedule, work, options, rank, name, where, self.patience))

    def send(self, rank: int, message: object) -> None:
        """Send a message to a rank. If its process is gone, `recv` reports that."""
        try:
            with contextlib.suppress(OSError):
                send(self._pipes[rank], message)
        except BaseException:  # what cannot be pickled, Ctrl-C
            self.close()
            raise

    def recv(self, timeout_s: float | None = None) -> tuple[int, Any] | None:
        """The next message of any rank that is not through; None where none comes in time.

        Raises:
            RanksError: says which rank ended the run, and why; all processes have been ended.
        """
        try:
            while True:
                running = set(range(self.size)) - self._ended
                said = next(self._messages(running, timeout_s), None)
                if said is None:
                    return None
                rank, message = said
                if message is None or isinstance(message, RankFailure):
                    raise self._explained(message)
                if isinstance(message, RankOutcome):
                    self._ended.add(rank)
                if isinstance(message, Note):
                    self._tell_once(message.text)
                elif not isinstance(message, BlockedOps):
                    return rank, message
        except BaseException:
            self.close()
            raise

    def _tell_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._tell(line)

    def kill(self) -> None:
        """End what runs at once; `close` waits until it has ended."""
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

    def _explained(self, first: RankFailure | None) -> Exception:
        """Asks all ranks what they wait for. `first` is None where a process died."""
        failures = [] if first is None else [first]
        blocked: dict[int, BlockedOps] = {}
        until = monotonic() + _ASKED_S
        while True:
            self._ask(failures, blocked, until)
            ended = dict.fromkeys(self._gone)
            dead: dict[int, int | None] = ended | {
                rank: process.exitcode
                for rank, process in enumerate(self._processes)
                if process.exitcode is not None
            }
            named = {peer for said in blocked.values() for one in said.now for peer in one.peers}
            named |= {peer for one in failures for peer in one.peers}
            if named >= set(dead) or monotonic() >= until:
                return diagnose(failures, blocked, dead)
            sleep(_ASK_AGAIN_S)  # those that are left may come to wait for it yet

    def _ask(
        self, failures: list[RankFailure], blocked: dict[int, BlockedOps], until: float
    ) -> None:
        """What all ranks wait for, added to what is known."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                send(pipe, WhatBlocks())
        silent = set(range(len(self._pipes)))
        while silent and (left := until - monotonic()) > 0:
            for rank, message in self._messages(silent, left):
                if isinstance(message, RankFailure):
                    failures.append(message)
                elif isinstance(message, BlockedOps):
                    blocked[rank] = message
                if message is None or isinstance(message, BlockedOps):
                    silent.discard(rank)

    def _messages(self, ranks: Collection[int], limit_s: float | None) -> Iterator[tuple[int, Any]]:
        """What these ranks say next; None of one whose process is gone."""
        pipes = {self._pipes[rank]: rank for rank in sorted(ranks)}
        ready: Sequence[Any] = wait(list(pipes), limit_s)
        for pipe in ready:
            try:
                yield pipes[pipe], recv(pipe)
            except (EOFError, OSError):
                rank = pipes[pipe]
                self._gone.add(rank)
                if rank < len(self._processes):
                    self._processes[rank].join(_ASKED_S)
                yield rank, None
