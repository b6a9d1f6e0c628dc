"""Time calls on a device under sustained load: by CUDA events, or by the clock on a CPU."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from twinstream.executor.run.device_state import NO_READER, DeviceState, StateReader

_BATCHES = 5


@dataclass(frozen=True)
class Timing:
    """Mean time of a call, and the device's state while it was timed, where NVML tells."""

    time_ns: float
    state: DeviceState | None = None


@dataclass(frozen=True)
class DeviceTimer:
    """Repeats a call for about `budget_s`, in batches without a pause between their calls.

    On a GPU whose power limit binds, what counts is the rate it sustains: `load`, a call that
    keeps it busy, runs for `load_s` before each timing. Operands are to be larger than the caches.
    """

    device: torch.device
    budget_s: float = 0.06
    load: Callable[[], object] | None = None
    load_s: float = 0.0
    reader: StateReader = NO_READER

    def mean_ns(self, call: Callable[[], object]) -> float:
        """Return the mean time of a call in ns, timed as by `timed`."""
        return self.timed(call).time_ns

    def timed(self, call: Callable[[], object]) -> Timing:
        """Median over the batches of the mean time of one call, after the load and one more."""
        call()
        once_ns = self._batch_ns(call, 1)[0]
        repeats = max(1, round(self.budget_s * 1e9 / max(once_ns, 1.0) / _BATCHES))
        if self.load is not None:
            self.rates_ns(self.load, self.load_s)
            call()
        batches = [self._batch_ns(call, repeats, reads=i == _BATCHES - 1) for i in range(_BATCHES)]
        return Timing(statistics.median(ns for ns, _ in batches), batches[-1][1])

    def rates_ns(self, call: Callable[[], object], seconds: float) -> list[float]:
        """Keep the device busy with a call for so long; its mean times, batch by batch."""
        found: list[float] = []
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            found.append(self._batch_ns(call, 4)[0])
        return found

    def _batch_ns(
        self, call: Callable[[], object], repeats: int, *, reads: bool = False
    ) -> tuple[float, DeviceState | None]:
        """(mean ns of a call, the state read while the device was at it)"""
        if self.device.type != "cuda":
            start_ns = time.perf_counter_ns()
            for _ in range(repeats):
                call()
            return (time.perf_counter_ns() - start_ns) / repeats, self._state(reads=reads)
        stream = torch.cuda.current_stream(self.device)
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record(stream)
        for _ in range(repeats):
            call()
        end.record(stream)
        state = self._state(reads=reads)
        end.synchronize()
        return float(start.elapsed_time(end) * 1e6 / repeats), state

    def _state(self, *, reads: bool) -> DeviceState | None:
        return self.reader.read() if reads else None
