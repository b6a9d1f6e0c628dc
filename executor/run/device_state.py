"""A GPU's clock, power and temperature, and why it is throttled: read through NVML.

A time is only worth what the clock was at which it was taken. Readings cost a few milliseconds of
the host and nothing of the device.
"""

import importlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from twinstream.schedule.node import Node

if TYPE_CHECKING:
    import torch

_POLL_S = 0.1
# Bits of nvmlDeviceGetCurrentClocksEventReasons in nvml.h; an idle GPU (bit 0) is not held back.
_REASONS = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal",
    0x040: "hardware thermal",
    0x080: "power brake",
    0x100: "display clocks",
}


class DeviceState(Node):
    """Means over `num_readings`, of the temperature the highest; None is what NVML does not tell.

    `held_back` has every reason for which the clock was lowered in any of them.
    """

    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    held_back: tuple[str, ...] = ()
    num_readings: int = 1


@dataclass(frozen=True)
class StateReader:
    """Reads a device's state; without NVML it reads nothing, and `missing` says why."""

    nvml: Any = None
    handle: Any = None
    missing: str = ""

    def read(self) -> DeviceState | None:
        """The state now."""
        if self.nvml is None:
            return None
        reasons = self._query("nvmlDeviceGetCurrentClocksEventReasons")
        milliwatts = self._query("nvmlDeviceGetPowerUsage")
        return DeviceState(
            sm_clock_mhz=self._query("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            temperature_c=self._query("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
            held_back=tuple(name for bit, name in _REASONS.items() if int(reasons or 0) & bit),
        )

    def _query(self, call: str, constant: str | None = None) -> float | None:
        """What NVML answers; None where this device or version has no answer."""
        function = getattr(self.nvml, call, None)
        if function is None:
            return None
        arguments = () if constant is None else (getattr(self.nvml, constant),)
        try:
            return float(function(self.handle, *arguments))
        except self.nvml.NVMLError:
            return None


def state_reader(uuid: str, nvml: Any = None) -> StateReader:
    """Return the reader of the device of this UUID ("GPU-..."); `nvml` is the module, by default
    `pynvml`.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            return StateReader(missing="nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
        return StateReader(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        return StateReader(missing=f"NVML: {error}")


def cuda_reader(device: "torch.device | None" = None) -> StateReader:
    """Return the reader of a CUDA device, by default the current one."""
    import torch  # readings are told where there is none

    return state_reader(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def mean_state(readings: Sequence[DeviceState]) -> DeviceState | None:
    """Return the mean of several readings; None where there are none."""
    if not readings:
        return None
    reasons = dict.fromkeys(reason for reading in readings for reason in reading.held_back)
    return DeviceState(
        sm_clock_mhz=_mean([r.sm_clock_mhz for r in readings]),
        power_w=_mean([r.power_w for r in readings]),
        temperature_c=max((r.temperature_c for r in readings if r.temperature_c), default=None),
        held_back=tuple(reasons),
        num_readings=sum(reading.num_readings for reading in readings),
    )


NO_READER = StateReader()


class StateWatch:
    """While open, reads the state again and again in a thread of its own."""

    def __init__(self, reader: StateReader, poll_s: float = _POLL_S) -> None:
        self._reader, self._poll_s = reader, poll_s
        self._readings: list[tuple[int, DeviceState]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="twinstream-nvml", daemon=True)

    def __enter__(self) -> Self:
        if self._reader.nvml is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def between(self, ends_ns: Sequence[int]) -> list[DeviceState | None]:
        """The mean state from each of these times (`perf_counter_ns`) to the next."""
        found = []
        for start_ns, end_ns in pairwise(ends_ns):
            inside = [state for at_ns, state in self._readings if start_ns <= at_ns < end_ns]
            found.append(mean_state(inside))
        return found

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_s):
            state = self._reader.read()
            if state is not None:
                self._readings.append((perf_counter_ns(), state))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
