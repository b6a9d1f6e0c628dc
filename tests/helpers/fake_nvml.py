"""An NVML of the tests: what is used of the module `pynvml`."""

from collections.abc import Sequence
from typing import Any


class FakeNvml:
    """One device, in a state that tests set; calls named in `refuses` raise, as NVML's do."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """Any of NVML's errors."""

    def __init__(
        self,
        *,
        clock_mhz: int = 1980,
        milliwatts: int = 500_000,
        temperature_c: int = 50,
        reasons: int = 0,
        refuses: Sequence[str] = (),
    ) -> None:
        self.clock_mhz, self.reasons = clock_mhz, reasons
        self.uuid = ""
        self._refuses = refuses
        answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByUUID": self._named,
            "nvmlDeviceGetClockInfo": lambda handle, clock: self.clock_mhz,
            "nvmlDeviceGetPowerUsage": lambda handle: milliwatts,
            "nvmlDeviceGetTemperature": lambda handle, sensor: temperature_c,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: self.reasons,
        }
        for name, answer in answers.items():
            setattr(self, name, self._refused if name in refuses else answer)

    def _named(self, uuid: str) -> str:
        self.uuid = uuid
        return "handle"

    def _refused(self, *arguments: object) -> None:
        raise self.NVMLError("not supported")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)
