"""The device's process: what breaks there breaks one job."""

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks.gpu import requests
from benchmarks.gpu.worker import (
    Backend,
    DeviceProcess,
    JobFailed,
    JobRefused,
    JobTimeout,
    answer_to,
)
from twinstream.schedule.errors import TwinstreamError


def obey(pipe: Connection, backend: Backend) -> None:
    """A process that does what the size of the memory asked for says."""
    while (request := pipe.recv()) is not None:
        pipe.send(answer_to(_obeyed, request))


def _obeyed(request: requests.Request) -> requests.Answer:
    assert isinstance(request, requests.TakeHostMemory)
    match request.size_bytes:
        case 0:
            os._exit(9)
        case 1:
            time.sleep(60.0)
        case 2:
            raise TwinstreamError("so much there is not")
        case 3:
            raise RuntimeError("an illegal access\nwas encountered")
    return requests.Taken(float(os.getpid()))


def ask(worker: DeviceProcess, size_bytes: int, limit_s: float = 30.0) -> float:
    return worker.ask(requests.TakeHostMemory(size_bytes), requests.Taken, limit_s).seconds


def test_a_process_answers_until_it_breaks_and_then_another_does():
    with DeviceProcess("cpu", obey) as worker:
        first = ask(worker, 7)
        with pytest.raises(JobRefused, match="so much there is not"):
            ask(worker, 2)
        assert ask(worker, 7) == first
        with pytest.raises(JobFailed, match=r"RuntimeError: an illegal access$") as caught:
            ask(worker, 3)
        assert "_obeyed" in caught.value.details
        second = ask(worker, 7)
        assert second != first
        with pytest.raises(JobFailed, match=r"process died \(exit code 9\)"):
            ask(worker, 0)
        with pytest.raises(JobTimeout, match="not done after 0 s"):
            ask(worker, 1, limit_s=0.3)
        assert ask(worker, 7) not in (first, second)
        last = int(ask(worker, 7))
    assert not Path(f"/proc/{last}").exists()
