"""The device memory that the process takes, by the driver's own figure, against the caps."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from twinstream.schedule.document import Caps
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.sizes import gib
from twinstream.schedule.timeline import DeviceMemory

_CUBLAS_WORKSPACES = ":4096:8"
"""KiB of a workspace, and how many: 32 MiB, what NVIDIA recommends for Hopper.

cuBLAS API reference, cublasSetWorkspace. With a fixed workspace its results are reproducible.
"""
_SAME_BY_DEFAULT = (9, 0)
"""The compute capability of GPUs on which torch takes 32 MiB unless told otherwise."""
_CUBLASLT_WORKSPACE_KIB = 32 * 1024
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Its name in newer versions of torch, and the older one, which they still read."""


CONTEXT_BYTES = 640 * 2**20
"""The most that a CUDA context and the first modules take: about 0.5 GiB on H100 (CUDA 12 and 13).

What is in use beyond it before this process has allocated anything belongs to others."""
_NVML = "libnvidia-ml.so.1"


class DeviceMemoryError(TwinstreamError):
    """Context and libraries take more device memory than the schedule's caps leave them."""


class DeviceFailedError(TwinstreamError):
    """The device is lost to this process (an Xid, an ECC error, an access out of bounds)."""


def check_device_memory(arena_bytes: int, free_bytes: int, total_bytes: int) -> None:
    """Raise DeviceMemoryError when the device arena cannot be had; nothing has been touched yet."""
    if arena_bytes > free_bytes:
        raise DeviceMemoryError(
            f"the device arena needs {gib(arena_bytes)}, but the driver has {gib(free_bytes)} of "
            f"{gib(total_bytes)} free: end what else runs on the device, or plan with a smaller "
            "--device-mem."
        )


def fix_library_workspaces() -> None:
    """Fix the size of the matmul libraries' workspaces, unless the user has done so.

    torch 2.11 and older parse CUBLAS_WORKSPACE_CONFIG with std::regex at every product, 58 us of
    the host each, so it is set only where torch's default is another size. And a product of bf16
    is summed in float32 where cuBLAS splits it over blocks, too, and rounded once.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if torch.cuda.get_device_capability() != _SAME_BY_DEFAULT:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACES)
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", str(_CUBLASLT_WORKSPACE_KIB))


def expand_segments() -> bool:
    """Have torch's allocator grow its segments, so that they do not fragment; whether it does.

    To be called before the first allocation. It stays as it was where the user has configured the
    allocator, and where this torch or driver cannot do it in a private pool: some versions of
    torch refuse that, and without NVML 2.14 ends the process.
    """
    if any(name in os.environ for name in _ALLOCATOR_VARIABLES) or not _has_nvml():
        return False
    configure = torch._C._accelerator_setAllocatorSettings
    try:
        configure("expandable_segments:True")
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            torch.empty(1, device="cuda")
    except (RuntimeError, ValueError):
        with contextlib.suppress(RuntimeError, ValueError):
            configure("expandable_segments:False")
        return False
    return True


def _has_nvml() -> bool:
    try:
        ctypes.CDLL(_NVML)
    except OSError:
        return False
    return True


def release_device() -> None:
    """Give the driver back what torch's allocator holds for nobody, workspaces of cuBLAS included.

    No graph may be left: it would go on to use them.
    """
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@dataclass(frozen=True)
class MemoryReading:
    """Bytes in use on the device by the driver's figure, and held by torch's allocator."""

    used_bytes: int
    reserved_bytes: int


def read_device_memory() -> MemoryReading:
    """Read the memory of the current CUDA device."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return MemoryReading(total_bytes - free_bytes, torch.cuda.memory_reserved())


class DeviceMeter:
    """Takes readings along a run. Nothing is given back during one, so the last is the largest."""

    def __init__(
        self,
        caps: Caps,
        arena_bytes: int,
        read: Callable[[], MemoryReading],
        *,
        refuses_excess: bool = True,
    ) -> None:
        self._caps = caps
        self._refuses_excess = refuses_excess
        self._arena_bytes = arena_bytes
        self._read = read
        self._first = read()
        held_bytes = max(arena_bytes, self._first.reserved_bytes)
        self._others_bytes = max(0, self._first.used_bytes - held_bytes - CONTEXT_BYTES)
        self._warm: MemoryReading | None = None
        self._peak_bytes = self._first.used_bytes
        self._libraries_bytes = 0
        self._temporary_bytes: dict[str, int] = {}

    def warm(self, temporary_bytes: Mapping[str, int]) -> bool:
        """Every kernel has run: what libraries take is known, call by call.

        Returns whether the process takes more than the cap of the schedule.

        Raises:
            DeviceMemoryError: it does, and excess is refused; nothing has been trained yet.
        """
        self._temporary_bytes = dict(temporary_bytes)
        self._warm = self._take()
        report = self.report()
        if report.excess_bytes and self._refuses_excess:
            raise DeviceMemoryError(_over(report))
        return report.excess_bytes > 0

    def is_over(self) -> bool:
        """Whether the process takes more than the cap right now; if so that is given back."""
        before = self._peak_bytes, self._libraries_bytes
        over = self.report().excess_bytes > 0
        if over:
            self._peak_bytes, self._libraries_bytes = before
        return over

    def report(self) -> DeviceMemory:
        """Up to now."""
        latest = self._take()
        reserve_bytes = self._caps.outside_arena_bytes if self._caps.device_reserve_bytes else 0
        return DeviceMemory(
            arena_bytes=self._arena_bytes,
            cap_bytes=self._caps.device_bytes,
            reserve_bytes=reserve_bytes,
            before_bytes=max(0, self._first.used_bytes - self._arena_bytes),
            warm_bytes=(self._warm or latest).used_bytes,
            peak_bytes=self._peak_bytes,
            others_bytes=self._others_bytes,
            libraries_bytes=self._libraries_bytes,
            temporary_bytes=self._temporary_bytes,
            declared_bytes=self._caps.library_bytes,
        )

    def _take(self) -> MemoryReading:
        reading = self._read()
        self._peak_bytes = max(self._peak_bytes, reading.used_bytes)
        self._libraries_bytes = max(
            self._libraries_bytes, reading.reserved_bytes - self._arena_bytes
        )
        return reading


def _over(memory: DeviceMemory) -> str:
    own = memory.peak_bytes - memory.others_bytes
    beside = own - memory.arena_bytes
    assert memory.cap_bytes is not None
    return (
        f"this process has {gib(own)} of the device in use with every kernel warm, "
        f"{gib(memory.excess_bytes)} more than the cap of {gib(memory.cap_bytes)}: "
        f"{gib(memory.arena_bytes)} are the arena and {gib(beside)} context and libraries "
        f"({gib(memory.libraries_bytes)} workspaces and temporaries; beside it others have "
        f"{gib(memory.others_bytes)}), for which the plan reserves "
        f"{gib(memory.reserve_bytes)}. Raise device_reserve_bytes in the machine's profile to "
        f"{beside} and plan again, or give --device-mem {gib(memory.excess_bytes)} more."
    )
