"""A rank's process: does one run after the other until nobody wants more."""

import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from twinstream.executor.launch.protocol import (
    BlockedOps,
    Note,
    RankFailure,
    RunTask,
    TrainTask,
    WhatBlocks,
    recv,
    send,
)
from twinstream.executor.launch.training_rank import TrainingRank
from twinstream.executor.ranks.device_waiting import waiting_on
from twinstream.executor.ranks.errors import CommunicationError
from twinstream.executor.ranks.rank_run import RankOutcome, RankRun
from twinstream.executor.ranks.waiting import Waiting
from twinstream.executor.ranks.world import World, device_of, in_groups, reach_store
from twinstream.schedule.errors import TwinstreamError


class _Worker:
    """The pipe is read in a thread of its own, which answers while a run is stuck."""

    def __init__(
        self, pipe: Connection, rank: int, local_rank: int, end: Callable[[bool], None]
    ) -> None:
        self.rank, self._local_rank, self._end = rank, local_rank, end
        self._is_at_rest = True
        self._pipe = pipe
        self._lock = threading.Lock()
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting = Waiting()
        threading.Thread(target=self._read, daemon=True).start()

    def serve(self) -> None:
        while True:
            answer = self._run()
            if answer is not None:
                self.send(answer)

    def send(self, message: object) -> None:
        with self._lock:
            send(self._pipe, message)

    def recv(self) -> Any:
        message = self._received.get()
        if isinstance(message, Exception):
            raise message
        return message

    def _run(self) -> RankOutcome | RankFailure | None:
        """The next run, and what came of it; None where the failure has been sent already."""
        try:
            self._is_at_rest = True
            task: RunTask = self.recv()
            self._is_at_rest = False
            device = device_of(task.options.backend, self._local_rank)
            self._waiting = waiting_on(device, task.patience.timeout_s, self._send_failure)
            store = PrefixStore(task.name, reach_store(task.store, task.patience))
            world = World(task.rank, task.schedule.mesh.size, store, task.patience, device)
            with in_groups(world) as met:
                run = RankRun(task.schedule, met, self._waiting)
                work = task.work
                options = replace(task.options, tell=self._tell, on_error=self._op_failed)
                if isinstance(work, TrainTask):
                    inputs = TrainingRank(work, run.part, self).inputs()
                    options = replace(options, disk=work.disk[task.rank] if work.disk else None)
                else:
                    inputs = work(run.part)
                return run.execute(inputs, options)
        except CommunicationError as error:
            self._waiting.failed(error)
            return None
        except Exception as error:
            return self._failure(error)

    def _failure(self, error: Exception) -> RankFailure:
        """What the error that is being handled says."""
        if isinstance(error, TwinstreamError):
            return RankFailure(self.rank, "refused", str(error))
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return RankFailure(self.rank, "bug", text, details=traceback.format_exc(limit=-12))

    def _op_failed(self, error: Exception) -> None:
        """Say at once what ended an op; of one that met others `_waiting` does."""
        if not isinstance(error, CommunicationError):
            self.send(self._failure(error))

    def _tell(self, line: str) -> None:
        self.send(Note(line))

    def _send_failure(self, error: CommunicationError) -> None:
        kind = "refused" if error.cause == "failed" else error.cause
        self.send(RankFailure(self.rank, kind, str(error), error.op_id, error.peers))

    def _read(self) -> None:
        """Ends the process where the other end of the pipe is gone."""
        while True:
            try:
                message = recv(self._pipe)
            except (EOFError, OSError):
                self._end(self._is_at_rest)
                return
            except Exception as error:  # what was sent cannot be made here: raised by the run
                message = error
            if isinstance(message, WhatBlocks):
                self.send(BlockedOps(self.rank, tuple(self._waiting.now.copy().values())))
            else:
                self._received.put(message)


def serve(pipe: Connection, rank: int) -> None:
    """Run a rank in a process group of its own, which Ctrl-C does not reach."""
    os.setsid()
    _Worker(pipe, rank, rank, lambda _: os.killpg(0, signal.SIGKILL)).serve()


def serve_host(pipe: Connection, rank: int, local_rank: int) -> None:
    """Be a rank of another machine's training; the process ends with it, without an error if that
    was through."""
    _Worker(pipe, rank, local_rank, lambda is_at_rest: os._exit(0 if is_at_rest else 1)).serve()
