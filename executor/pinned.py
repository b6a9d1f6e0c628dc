"""The pinned host arena: one anonymous mapping, registered with the driver.

torch's own pinned allocator rounds to powers of two; at hundreds of GiB that is not affordable.
"""

import contextlib
import mmap
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from twinstream.schedule.errors import TwinstreamError

_UNLIMITED_CGROUP = 1 << 62


class HostMemoryError(TwinstreamError):
    """The host cannot give or pin the arena that the schedule needs."""


@dataclass(frozen=True)
class HostLimits:
    """Bytes the process may lock, may use, and that are available; None is no limit."""

    memlock_bytes: int | None
    cgroup_left_bytes: int | None
    available_bytes: int | None


def host_limits(root: Path = Path("/")) -> HostLimits:
    """Read RLIMIT_MEMLOCK, the cgroup's limit and use, and MemAvailable."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostLimits(
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        cgroup_left_bytes=_cgroup_left_bytes(root),
        available_bytes=_available_bytes(root),
    )


def check_host_memory(size_bytes: int, limits: HostLimits, *, pinned: bool) -> None:
    """Raise HostMemoryError when the arena cannot be had; nothing has been touched yet."""
    checks = [
        ("available memory", limits.available_bytes, "free memory or lower --host-mem"),
        ("the cgroup's limit", limits.cgroup_left_bytes, "raise the container's memory limit"),
    ]
    if pinned:
        checks.insert(0, ("RLIMIT_MEMLOCK", limits.memlock_bytes, "run `ulimit -l unlimited`"))
    for what, limit, remedy in checks:
        if limit is not None and size_bytes > limit:
            raise HostMemoryError(
                f"the host arena needs {size_bytes / 2**30:.2f} GiB"
                f"{' of pinned memory' if pinned else ''}, but {what} leaves "
                f"{limit / 2**30:.2f} GiB; {remedy}, or plan with a smaller --host-mem."
            )


class PinnedArena:
    """Host memory of exactly the size asked for, page-locked for the device while open."""

    def __init__(self, size_bytes: int) -> None:
        check_host_memory(size_bytes, host_limits(), pinned=True)
        self._mapping = mmap.mmap(-1, max(size_bytes, mmap.PAGESIZE))
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)[:size_bytes]
        self.bytes.fill_(0)  # populate the pages before they are locked
        self._registered = False
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = cudart.cudaHostRegister(self.bytes.data_ptr(), len(self._mapping), 0)
        if int(error) != 0:
            raise HostMemoryError(
                f"the driver cannot pin {size_bytes / 2**30:.2f} GiB of host memory "
                f"(cudaHostRegister: error {int(error)}); raise `ulimit -l` or lower --host-mem."
            )
        self._registered = True

    def close(self) -> None:
        """Unpin; the memory itself goes with the last view of it."""
        if self._registered:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(self.bytes.data_ptr())
            self._registered = False


def _available_bytes(root: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroup_left_bytes(root: Path) -> int | None:
    """Limit minus current use, cgroup v2 or v1; file cache can be reclaimed and is not counted."""
    for limit_file, used_file, stat_file in (
        ("memory.max", "memory.current", "memory.stat"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
        ),
    ):
        folder = root / "sys/fs/cgroup"
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / limit_file).read_text())
            if limit >= _UNLIMITED_CGROUP:
                return None
            used = int((folder / used_file).read_text())
            return limit - used + _file_cache_bytes(folder / stat_file)
    return None


def _file_cache_bytes(stat_file: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in stat_file.read_text().splitlines())
        return int(fields.get("file", fields.get("cache", 0)))
    return 0
