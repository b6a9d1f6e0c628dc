"""Time calls on a device under sustained load: by CUDA events, or by the clock on a CPU."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_BATCHES = 5


@dataclass(frozen=True)
class DeviceTimer:
    """Repeats a call for about `budget_s`, in batches without a pause between their calls.

    On a GPU whose power limit binds, what counts is the rate it sustains: the calls before these
    have loaded it, and these keep it loaded. Operands are to be larger than the caches.
    """

    device: torch.device
    budget_s: float = 0.06

    def mean_ns(self, call: Callable[[], object]) -> float:
        """Median over the batches of the mean time of one call, after one untimed call."""
        call()
        once_ns = self._batch_ns(call, 1)
        repeats = max(1, round(self.budget_s * 1e9 / max(once_ns, 1.0) / _BATCHES))
        return statistics.median(self._batch_ns(call, repeats) for _ in range(_BATCHES))

    def load(self, call: Callable[[], object], seconds: float) -> None:
        """Keep the device busy with a call for so long, untimed."""
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            self._batch_ns(call, 4)

    def _batch_ns(self, call: Callable[[], object], repeats: int) -> float:
        if self.device.type != "cuda":
            start_ns = time.perf_counter_ns()
            for _ in range(repeats):
                call()
            return (time.perf_counter_ns() - start_ns) / repeats
        stream = torch.cuda.current_stream(self.device)
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record(stream)
        for _ in range(repeats):
            call()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end) * 1e6 / repeats)
