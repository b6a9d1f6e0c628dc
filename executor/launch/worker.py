"""A rank's process: does one run after the other until nobody wants more."""

import os
import pickle
import queue
import signal
import threading
import traceback
from multiprocessing.connection import Connection

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from twinstream.executor.launch.told import ASK, Job, Trouble, Waits
from twinstream.executor.ranks.device_waiting import waiting_on
from twinstream.executor.ranks.errors import CommunicationError
from twinstream.executor.ranks.rank_run import RankOutcome, RankRun
from twinstream.executor.ranks.waiting import Waiting
from twinstream.executor.ranks.world import World, device_of, in_groups, reach_store
from twinstream.schedule.errors import TwinstreamError


class _Worker:
    """The pipe is read in a thread of its own, which answers while a run is stuck."""

    def __init__(self, pipe: Connection, rank: int) -> None:
        self.rank = rank
        self._pipe = pipe
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._waiting = Waiting()
        threading.Thread(target=self._read, daemon=True).start()

    def serve(self) -> None:
        while True:
            answer = self._answer(self._jobs.get())
            if answer is not None:
                self._tell(answer)

    def _answer(self, received: bytes) -> RankOutcome | Trouble | None:
        """None where it has been told already."""
        try:
            job: Job = pickle.loads(received)
            device = device_of(job.options.backend, self.rank)
            self._waiting = waiting_on(device, job.patience.timeout_s, self._tell_failure)
            return _run(job, device, self._waiting)
        except CommunicationError as error:
            self._waiting.failed(error)
            return None
        except TwinstreamError as error:
            return Trouble(self.rank, "told", str(error))
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            return Trouble(self.rank, "bug", text, details=traceback.format_exc(limit=-12))

    def _tell_failure(self, error: CommunicationError) -> None:
        kind = "told" if error.cause == "failed" else error.cause
        self._tell(Trouble(self.rank, kind, str(error), error.op_id, error.peers))

    def _tell(self, what: object) -> None:
        with self._lock:
            self._pipe.send_bytes(pickle.dumps(what))

    def _read(self) -> None:
        """Ends the process, and what it started, where the other end of the pipe is gone."""
        try:
            while True:
                received = self._pipe.recv_bytes()
                if received == ASK.encode():
                    now = tuple(self._waiting.now.copy().values())
                    self._tell(Waits(self.rank, now))
                else:
                    self._jobs.put(received)
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)


def serve(pipe: Connection, rank: int) -> None:
    """In a process group of its own, which Ctrl-C does not reach."""
    os.setsid()
    _Worker(pipe, rank).serve()


def _run(job: Job, device: torch.device, waiting: Waiting) -> RankOutcome:
    store = PrefixStore(job.name, reach_store(job.port, job.patience))
    world = World(job.rank, job.schedule.mesh.size, store, job.patience, device)
    with in_groups(world) as met:
        run = RankRun(job.schedule, met, waiting)
        return run.execute(job.make(run.part), job.options)
