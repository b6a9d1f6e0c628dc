"""The fake device of this process: what was asked of it, and failures on demand."""

import ctypes
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from twinstream.executor.backends.cuda import CudaBackend
from twinstream.executor.memory import arena_memory
from twinstream.executor.run import cuda_run

ILLEGAL_ADDRESS = 700
TOTAL_BYTES = round(79.18 * 2**30)
ALLOCATIONS = ("cudaMalloc", "cuMemCreate", "cudaHostAlloc", "cudaHostRegister")
SYNCHRONISATIONS = ("cudaDeviceSynchronize", "cudaStreamSynchronize")
PAGEABLE = ("copies H2D pageable", "copies D2H pageable")


@dataclass(frozen=True)
class Report:
    """What is left of every kind, calls that break CUDA's rules, and calls by phase."""

    left: dict[str, int]
    violations: dict[str, int]
    counts: dict[str, dict[str, int]]

    def during(self, *phases: str) -> Counter[str]:
        """Calls in the phases whose names begin so."""
        found: Counter[str] = Counter()
        for phase, counts in self.counts.items():
            if phase.startswith(phases):
                found.update(counts)
        return found


class FakeDevice:
    def __init__(self) -> None:
        self._runtime = ctypes.CDLL("libcudart.so.13")
        self._runtime.fake_cuda_report.restype = ctypes.c_char_p
        self._runtime.fake_cuda_in_use.restype = ctypes.c_size_t

    def begin(self) -> None:
        """Forget what was counted."""
        self._runtime.fake_cuda_begin()

    def phase(self, name: str) -> None:
        self._runtime.fake_cuda_phase(name.encode())

    def report(self) -> Report:
        found = json.loads(self._runtime.fake_cuda_report())
        return Report(found["left"], found["violations"], found["counts"])

    def in_use(self) -> int:
        """Bytes, by the driver's figure."""
        return int(self._runtime.fake_cuda_in_use())

    def memory(self, total_bytes: int, others_bytes: int = 0) -> None:
        """From now on it has so much, of which other processes take some."""
        self._runtime.fake_cuda_memory(ctypes.c_size_t(total_bytes), ctypes.c_size_t(others_bytes))

    def late(self, seed: int | None) -> None:
        """Streams do nothing until somebody waits for them, then in an order of this seed."""
        self._runtime.fake_cuda_set_late(seed is not None, ctypes.c_uint64(seed or 1))

    def fail(self, error: int = ILLEGAL_ADDRESS) -> None:
        """Every call fails from now on, as after an Xid."""
        self._runtime.fake_cuda_fail_device(error)

    def fail_allocation(self, after: int) -> None:
        self._runtime.fake_cuda_fail_allocation(ctypes.c_long(after))

    def recover(self) -> None:
        """As it was."""
        self.fail(0)
        self.fail_allocation(-1)
        self.memory(TOTAL_BYTES)
        self.late(None)
        self.phase("start")

    def name_phases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`warm-up`, `captures`, `pass 3`, `rest`; what is done at a rest, before and after."""

        def during(owner: Any, name: str, phase: str) -> None:
            real: Callable[..., Any] = getattr(owner, name)

            def call(*arguments: Any, **options: Any) -> Any:
                self.phase(phase)
                try:
                    return real(*arguments, **options)
                finally:
                    self.phase(f"after {phase}")

            monkeypatch.setattr(owner, name, call)

        during(cuda_run, "warm_up", "warm-up")
        during(cuda_run, "_graphs", "captures")
        during(CudaBackend, "finish", "finish")
        during(CudaBackend, "synchronize", "rest")
        begin_pass = CudaBackend.begin_pass

        def named(backend: CudaBackend, number: int, *, timed: bool) -> None:
            self.phase(f"pass {number}")
            begin_pass(backend, number, timed=timed)

        monkeypatch.setattr(CudaBackend, "begin_pass", named)
        opened = arena_memory.check_device_memory

        def noted(arena_bytes: int, free_bytes: int, total_bytes: int) -> None:
            self.free_bytes.append(free_bytes)
            opened(arena_bytes, free_bytes, total_bytes)

        self.free_bytes: list[int] = []
        monkeypatch.setattr(arena_memory, "check_device_memory", noted)
