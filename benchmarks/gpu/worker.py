"""A process of its own for the device, so that what breaks there breaks no more than one job.

After an illegal access every further CUDA call of a process fails; a lost event makes it wait for
ever. Either way the process is killed, and the next job gets a fresh one.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal, Protocol, Self, TypeVar

from benchmarks.gpu.requests import Answer, Request
from twinstream.schedule.errors import TwinstreamError
from twinstream.sweep.workers import end_with_parent

Backend = Literal["cpu", "cuda"]
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


class Worker(Protocol):
    """Whoever carries out requests on the device."""

    def ask(self, request: Request, kind: type[_AnswerT], limit_s: float) -> _AnswerT:
        """The answer, of the kind that belongs to the request.

        Raises:
            JobRefused: it cannot be done here.
            JobFailed: it broke, or took longer than `limit_s`.
        """

    def close(self) -> None:
        """Give back the device and all memory."""


@dataclass(frozen=True)
class _Broken:
    """An error that is no answer: refused with a reason, or a bug with its traceback."""

    refused: bool
    reason: str
    details: str


class DeviceProcess:
    """Starts a process when it is first asked, and a new one after a job that broke."""

    def __init__(
        self, backend: Backend, main: Callable[[Connection, Backend], None] | None = None
    ) -> None:
        """`main` is what the process runs, by default `serve`."""
        self._backend = backend
        self._main = main or serve
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, request: Request, kind: type[_AnswerT], limit_s: float) -> _AnswerT:
        answer = self._ask(request, limit_s)
        if isinstance(answer, _Broken):
            if answer.refused:
                raise JobRefused(answer.reason)
            self._kill()
            raise JobFailed(answer.reason, answer.details)
        assert isinstance(answer, kind)
        return answer

    def close(self) -> None:
        if self._pipe is not None and self._process is not None and self._process.is_alive():
            self._pipe.send(None)
            self._process.join(timeout=20.0)
        self._kill()

    def _ask(self, request: Request, limit_s: float) -> Answer | _Broken:
        pipe = self._started()
        try:
            pipe.send(request)
            if not pipe.poll(limit_s):
                self._kill()
                raise JobTimeout(f"not done after {limit_s:.0f} s; its process was ended")
            answer: Answer | _Broken = pipe.recv()
        except (EOFError, OSError):
            code = self._exit_code()
            self._kill()
            raise JobFailed(f"the device's process died ({code})") from None
        return answer

    def _started(self) -> Connection:
        if self._pipe is None or self._process is None or not self._process.is_alive():
            self._kill()
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(
                target=self._main, args=(theirs, self._backend), daemon=True
            )
            self._process.start()
            theirs.close()
        return self._pipe

    def _exit_code(self) -> str:
        assert self._process is not None
        self._process.join(timeout=5.0)
        code = self._process.exitcode
        return "exit code unknown" if code is None else f"exit code {code}"

    def _kill(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def serve(pipe: Connection, backend: Backend) -> None:
    """Answer requests until there are no more; the process's main function."""
    from benchmarks.gpu.device_side import DeviceSide

    end_with_parent()
    side = DeviceSide(backend)
    try:
        while (request := pipe.recv()) is not None:
            pipe.send(answer_to(side.answer, request))
    except (EOFError, KeyboardInterrupt):
        pass
    finally:
        side.close()
        os._exit(0)  # threads of a run that broke may wait for ever


class _Answers(Protocol):
    def __call__(self, request: Request) -> Answer: ...


def answer_to(answers: _Answers, request: Request) -> Answer | _Broken:
    """The answer, or why there is none."""
    try:
        return answers(request)
    except TwinstreamError as error:
        return _Broken(True, str(error), "")
    except Exception as error:
        text = traceback.format_exc(limit=-12)
        return _Broken(False, f"{type(error).__name__}: {_first_line(error)}", text)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""
