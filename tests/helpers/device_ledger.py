"""What a run takes of a device's memory, on an account of the tests in the driver's place.

It has the slabs that are alive, or dead and still cached; CUDA's context; other processes; and 32
MiB of workspace for every stream that has multiplied, which torch keeps. Kernels run on the CPU.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.fake_cudart import FakeCudart
from tests.helpers.fake_gpu import FakeGpu, FakeStream, Moment
from twinstream.executor.memory import arena_memory, device_memory
from twinstream.executor.run import cuda_run

GIB = 2**30
CONTEXT_BYTES = 550 * 2**20
WORKSPACE_BYTES = 32 * 2**20
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


class DeviceLedger:
    """A device's account.

    Attributes:
        most_slabs_bytes: of slabs at a time.
    """

    def __init__(self, total_bytes: int = 80 * GIB, others_bytes: int = 0) -> None:
        self._total_bytes, self._others_bytes = total_bytes, others_bytes
        self._alive_bytes = self._cached_bytes = self.most_slabs_bytes = 0
        self.multiplied: set[FakeStream] = set()

    @property
    def reserved_bytes(self) -> int:
        """What torch's allocator holds."""
        workspaces = len(self.multiplied) * WORKSPACE_BYTES
        return self._alive_bytes + self._cached_bytes + workspaces

    @property
    def in_use(self) -> int:
        """By all."""
        return CONTEXT_BYTES + self._others_bytes + self.reserved_bytes

    def mem_get_info(self) -> tuple[int, int]:
        return self._total_bytes - self.in_use, self._total_bytes

    def slab(self, size_bytes: int) -> torch.Tensor:
        """In place of `device_slab`."""
        assert size_bytes <= self.mem_get_info()[0], "out of memory"
        made = torch.zeros(size_bytes, dtype=torch.uint8)
        self._alive_bytes += size_bytes
        self.most_slabs_bytes = max(self.most_slabs_bytes, self._alive_bytes + self._cached_bytes)
        weakref.finalize(made.untyped_storage(), self._freed, size_bytes)
        return made

    def empty_cache(self) -> None:
        self._cached_bytes = 0

    def _freed(self, size_bytes: int) -> None:
        self._alive_bytes -= size_bytes
        self._cached_bytes += size_bytes


class _LedgerGpu(FakeGpu):
    """What is enqueued runs at once; its streams are new, as torch's pool gives them."""

    def __init__(self, ledger: DeviceLedger) -> None:
        super().__init__()
        self._ledger = ledger

    def put_record(self, stream: FakeStream) -> Moment:
        self.now_ns += 1000  # no op of it takes time by itself
        return super().put_record(stream)

    @contextmanager
    def libraries_pool(self) -> Iterator[None]:
        with _Products(self, self._ledger):
            yield


class _Products(TorchDispatchMode):
    def __init__(self, gpu: FakeGpu, ledger: DeviceLedger) -> None:
        super().__init__()
        self._gpu, self._ledger = gpu, ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.name().split("::")[1].split(".")[0] in _PRODUCTS:
            assert self._gpu.current is not None
            self._ledger.multiplied.add(self._gpu.current)
        return func(*args, **(kwargs or {}))


def on_ledger(monkeypatch: pytest.MonkeyPatch, ledger: DeviceLedger) -> DeviceLedger:
    """From now on runs on CUDA take their memory from this account."""
    pci = SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    cudart = FakeCudart()
    replaced = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "current_stream": lambda: None,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None,
        "cudart": lambda: cudart,
        "get_device_properties": lambda: pci,
        "get_device_capability": lambda: (9, 0),
        "get_device_name": lambda: "NVIDIA H100 80GB HBM3",
        "mem_get_info": ledger.mem_get_info,
        "memory_reserved": lambda: ledger.reserved_bytes,
        "empty_cache": ledger.empty_cache,
    }
    for name, call in replaced.items():
        monkeypatch.setattr(torch.cuda, name, call)
    clear = ledger.multiplied.clear
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    monkeypatch.setattr(arena_memory, "device_slab", ledger.slab)
    monkeypatch.setattr(device_memory, "expand_segments", lambda: False)
    monkeypatch.setattr(cuda_run, "TorchGpu", lambda: _LedgerGpu(ledger))
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.setenv(name, "as the user wants")
    return ledger
