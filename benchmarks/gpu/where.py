"""On which device results are found, and with what."""

from datetime import UTC, datetime
from typing import Literal

from benchmarks.gpu.requests import DescribeDevice, DeviceDescription
from benchmarks.gpu.results import Where
from benchmarks.gpu.worker import DeviceProcess

_DESCRIBE_LIMIT_S = 90.0


def where_is(
    worker: DeviceProcess, backend: Literal["cpu", "cuda"], command: str, commit: str = ""
) -> Where:
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
