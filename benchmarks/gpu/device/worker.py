"""The device's process, as the campaign asks it; what breaks there breaks no more than one job."""

from datetime import UTC, datetime
from functools import partial
from operator import methodcaller
from typing import Protocol, Self, TypeVar

from benchmarks.gpu.device.device_side import DeviceSide
from benchmarks.gpu.device.requests import DescribeDevice, DeviceDescription, Request
from benchmarks.gpu.jobs.campaign import Backend
from benchmarks.gpu.jobs.results import Where
from twinstream.executor.probe.process import DeviceProcess

_AnswerT = TypeVar("_AnswerT")
_DESCRIBE_LIMIT_S = 90.0


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


class DeviceWorker:
    """A worker in a process of its own, started when it is first asked."""

    def __init__(self, backend: Backend) -> None:
        self._process = DeviceProcess(partial(DeviceSide, backend))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, request: Request, kind: type[_AnswerT], limit_s: float) -> _AnswerT:
        answer = self._process.do(methodcaller("answer", request), limit_s)
        assert isinstance(answer, kind)
        return answer

    def close(self) -> None:
        self._process.close()


def where_is(worker: Worker, backend: Backend, command: str, commit: str) -> Where:
    """The worker's device, today."""
    device = worker.ask(DescribeDevice(), DeviceDescription, _DESCRIBE_LIMIT_S)
    return Where(
        backend=backend,
        device=device.name,
        driver=device.driver,
        torch=device.torch,
        commit=commit,
        date=datetime.now(UTC).date().isoformat(),
        command=command,
    )
