"""A process of its own for the device, so that what breaks there breaks no more than one job.

After an illegal access every further CUDA call of a process fails; a lost event makes it wait for
ever. Either way the process is killed, and the next job gets a fresh one.
"""

import os
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Generic, Self, TypeVar

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.worker_processes import WorkerContext, ignore_interrupts

_StateT = TypeVar("_StateT")
_AnswerT = TypeVar("_AnswerT")


class JobRefused(TwinstreamError):
    """The job cannot be done here, for a reason that a second try would not change."""


class JobFailed(TwinstreamError):
    """The job broke; `details` is what to read to find out why."""

    def __init__(self, reason: str, details: str = "") -> None:
        self.details = details
        super().__init__(reason)


class JobTimeout(JobFailed):
    """The job was ended because it took too long."""


@dataclass(frozen=True)
class _Broken:
    """An error that is no answer: refused with a reason, or a bug with its traceback."""

    refused: bool
    reason: str
    details: str


class DeviceProcess(Generic[_StateT]):
    """Does jobs in a process that is started for the first, and anew after one that broke.

    Jobs are called with what `begin` made in that process; both must pickle. The process ends with
    this one, even if it is killed.
    """

    def __init__(self, begin: Callable[[], _StateT]) -> None:
        self._begin = begin
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def do(self, job: Callable[[_StateT], _AnswerT], limit_s: float) -> _AnswerT:
        """Run a job in the process and return its result.

        Raises:
            JobRefused: it raised a TwinstreamError.
            JobFailed: it broke, or its process did.
            JobTimeout: it took longer than `limit_s`.
        """
        answer = self._answer(job, limit_s)
        if not isinstance(answer, _Broken):
            return answer
        if answer.refused:
            raise JobRefused(answer.reason)
        self.close()
        raise JobFailed(answer.reason, answer.details)

    def close(self) -> None:
        """Give back the device and all memory; the next job gets another process."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None

    def _answer(self, job: Callable[[_StateT], _AnswerT], limit_s: float) -> _AnswerT | _Broken:
        pipe = self._started()
        try:
            pipe.send(job)
            if not pipe.poll(limit_s):
                self.close()
                raise JobTimeout(f"not done after {limit_s:.0f} s; its process was ended")
            answer: _AnswerT | _Broken = pipe.recv()
        except (EOFError, OSError):
            assert self._process is not None
            self._process.join(timeout=5.0)
            code = self._process.exitcode
            self.close()
            raise JobFailed(f"the device's process died (exit code {code})") from None
        return answer

    def _started(self) -> Connection:
        if self._pipe is None or self._process is None or not self._process.is_alive():
            self.close()
            context = WorkerContext()
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._begin), daemon=True)
            self._process.start()
            theirs.close()
        return self._pipe


def _serve(pipe: Connection, begin: Callable[[], _StateT]) -> None:
    """Do jobs until nobody waits for them: where the other end is closed, in the middle of one."""
    jobs: queue.SimpleQueue[Callable[[_StateT], object]] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                jobs.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(0)

    ignore_interrupts()
    threading.Thread(target=read, daemon=True).start()
    state = begin()
    while True:
        pipe.send(answer_of(jobs.get(), state))


def answer_of(job: Callable[[_StateT], _AnswerT], state: _StateT) -> _AnswerT | _Broken:
    """Return what the job returns, or why it returns nothing."""
    try:
        return job(state)
    except TwinstreamError as error:
        return _Broken(True, str(error), "")
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
        return _Broken(False, reason, traceback.format_exc(limit=-12))
