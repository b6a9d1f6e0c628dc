"""Processes that work beside the caller's: they never run the caller's script again."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import (
    ForkServerContext,
    ForkServerProcess,
    SpawnContext,
    SpawnProcess,
)
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from twinstream.schedule.errors import TwinstreamError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_STARTING = threading.Lock()  # `sys.modules` is the whole process's


@contextmanager
def _unknown_main() -> Iterator[None]:
    """A process started inside does not import the caller's `__main__`.

    `multiprocessing` does, so that functions of a script can be sent; a script without
    `if __name__ == "__main__":` would begin anew in each process.
    """
    with _STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class _EndsWithParent(BaseProcess):
    def run(self) -> None:
        _end_with_parent()
        super().run()


class WorkerProcess(_EndsWithParent, SpawnProcess):
    """A fresh interpreter, which has no `__main__` of the caller, and ends with it."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        with _unknown_main():
            return SpawnProcess._Popen(process_obj)


class _ForkedWorker(_EndsWithParent, ForkServerProcess):
    """The same, from a server that has imported what takes long."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        with _unknown_main():
            return ForkServerProcess._Popen(process_obj)


class WorkerContext(SpawnContext):
    """Starts interpreters; what they are given must be of modules, not of a script."""

    Process = WorkerProcess


class ForkedWorkerContext(ForkServerContext):
    """Forks a server that has imported what takes long: the modules that were named first.

    There is one server for each process; its environment is of when it was started.
    """

    Process = _ForkedWorker

    def __init__(self, *modules: str) -> None:
        super().__init__()
        self.set_forkserver_preload(list(modules))


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, which this one sees afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # where it is started it lets interrupts through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Ctrl-C is for the process that started this one, which ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_with_parent() -> None:
    """A process whose parent was killed would wait for work for ever."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        if os.getpgrp() == os.getpid():  # what it has started ends with it
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _nothing() -> None:
    """What a process needs that only works."""


class WorkerDied(TwinstreamError):
    """A process ended before it had done its work; `exitcode` is its own."""

    def __init__(self, exitcode: int | None = None) -> None:
        self.exitcode = exitcode
        super().__init__(
            f"a process died (code {exitcode}), probably because memory ran out; what is done is "
            "kept: run it again with fewer --jobs to continue"
        )


class Workers(Generic[_Item, _Result]):
    """Processes that do one piece of work after the other; they end with this one, even killed.

    Args:
        work: a module's function of an item, and of what `begin` made in the process.
        items: what there is to do.
        num_jobs: processes at most.
        begin: a module's function, called once in each process.

    Raises:
        WorkerDied: here or in `ready`: a process died.
    """

    def __init__(
        self, work: Callable[[_Item, Any], _Result], items: Sequence[_Item], num_jobs: int,
        begin: Callable[[], Any] = _nothing,
    ) -> None:  # fmt: skip
        context = ForkedWorkerContext(work.__module__)
        self._left = list(reversed(items))
        self._at_work: dict[Connection, tuple[_Item, BaseProcess]] = {}
        self.processes: list[BaseProcess] = []
        try:
            with interrupts_held():
                for _ in range(min(max(1, num_jobs), len(items))):
                    ours, theirs = context.Pipe()
                    process: BaseProcess = context.Process(
                        target=_serve, args=(theirs, work, begin), daemon=True
                    )
                    self.processes.append(process)
                    process.start()
                    theirs.close()
                    self._at_work[ours] = self._left.pop(), process
            for pipe, (item, begun) in self._at_work.items():
                self._send(pipe, item, begun)
        except BaseException:
            self.end()
            raise

    @property
    def busy(self) -> bool:
        """Whether anything is left to wait for."""
        return bool(self._at_work)

    def ready(self, timeout_s: float | None = None) -> Iterator[tuple[_Item, _Result | Exception]]:
        """(item, what the work returned or raised), waiting so long for one; None: until one is.

        A process that has no more work ends.
        """
        for ours in cast("list[Connection]", wait(list(self._at_work), timeout_s)):
            item, process = self._at_work.pop(ours)
            try:
                outcome = ours.recv()
            except (EOFError, ConnectionResetError):
                process.join()
                raise WorkerDied(process.exitcode) from None
            if self._left:
                self._at_work[ours] = self._left.pop(), process
                self._send(ours, self._at_work[ours][0], process)
            else:
                ours.close()
            yield item, outcome

    def end(self) -> None:
        """End what is at work still."""
        for _, process in self._at_work.values():
            process.terminate()
        for process in self.processes:
            if process.pid is not None:
                process.join()
        for ours in self._at_work:
            ours.close()
        self._at_work, self._left = {}, []

    @staticmethod
    def _send(ours: Connection, item: _Item, process: BaseProcess) -> None:
        try:
            ours.send(item)
        except (BrokenPipeError, ConnectionResetError):
            process.join()
            raise WorkerDied(process.exitcode) from None


def in_processes(
    work: Callable[[_Item, Any], _Result], items: Sequence[_Item], num_jobs: int,
    begin: Callable[[], Any] = _nothing,
) -> Iterator[tuple[_Item, _Result | Exception]]:  # fmt: skip
    """(item, what the work returns or raises) as they come; arguments as of `Workers`.

    Raises:
        WorkerDied: a process died.
    """
    workers = Workers(work, items, num_jobs, begin)
    try:
        while workers.busy:
            yield from workers.ready()
    finally:
        workers.end()


def _serve(
    theirs: Connection, work: Callable[[Any, Any], object], begin: Callable[[], object]
) -> None:
    """Do one piece of work after the other, as they are sent, until there is no more."""
    state = begin()
    while True:
        try:
            item = theirs.recv()
        except EOFError:
            return
        try:
            outcome = work(item, state)
        except Exception as error:
            outcome = error
        theirs.send(outcome)
