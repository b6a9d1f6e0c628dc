"""Processes that work beside the caller's: they never run the caller's script again."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import (
    ForkServerContext,
    ForkServerProcess,
    SpawnContext,
    SpawnProcess,
)
from types import ModuleType
from typing import Any

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


class WorkerProcess(SpawnProcess):
    """A fresh interpreter, which has no `__main__` of the caller."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        with _unknown_main():
            return SpawnProcess._Popen(process_obj)


class _ForkedWorker(ForkServerProcess):
    """The same, from a server that has imported what takes long."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        with _unknown_main():
            return ForkServerProcess._Popen(process_obj)


class WorkerContext(SpawnContext):
    """Starts interpreters; what they are given must be of modules, not of a script."""

    Process = WorkerProcess


class ForkedWorkerContext(ForkServerContext):
    """Forks a server that has imported what takes long."""

    Process = _ForkedWorker


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


def end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
