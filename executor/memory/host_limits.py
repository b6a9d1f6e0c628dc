"""How much memory the host has left for an arena; this is asked before any of it is touched."""

import contextlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.sizes import gib, parse_bytes

_UNLIMITED_CGROUP = 1 << 62
AVAILABLE = "TWINSTREAM_AVAILABLE_MEMORY"
"""A variable with the size that is available, in place of what the system says."""
AVAILABLE_ADVICE = (
    f"where more can be had than the system says (a virtual machine may grow), set {AVAILABLE}=SIZE"
)


WORKING_BYTES = 160 * 2**20
"""What a run on a CPU takes beside its arenas and what its process had before: threads, what the C
library keeps, a piece of a save. Runs of 43 to 124 M parameters took 98 to 163 MiB."""

INTERPRETER_BYTES = 400 * 2**20
"""What a rank's process takes with torch loaded: 170 to 357 MiB (2 to 8 ranks, torch 2.13.0)."""


class HostMemoryError(TwinstreamError):
    """The host cannot give or pin the arena that the schedule needs."""


class AvailableMemoryError(HostMemoryError):
    """The system says that less is available; where memory grows as it is used it may be wrong."""


@dataclass(frozen=True)
class HostLimits:
    """Bytes the process may lock, may use, and that are available; None is no limit."""

    memlock_bytes: int | None
    cgroup_left_bytes: int | None
    available_bytes: int | None

    @property
    def free_bytes(self) -> int | None:
        """What the process may yet use; None where nothing says so."""
        known = (self.available_bytes, self.cgroup_left_bytes)
        return min((one for one in known if one is not None), default=None)


def host_limits(root: Path = Path("/")) -> HostLimits:
    """Read RLIMIT_MEMLOCK, the cgroup's limit and use, and MemAvailable or what is said instead.

    Raises:
        SizeError: what is said instead is no size.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostLimits(
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        cgroup_left_bytes=_cgroup_left_bytes(root),
        available_bytes=_available_bytes(root),
    )


def process_bytes() -> tuple[int | None, int]:
    """Resident memory of this process now, where Linux tells it, and at its peak so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return pages * resource.getpagesize(), peak
    return None, peak


def check_host_memory(size_bytes: int, limits: HostLimits) -> None:
    """Raise HostMemoryError when the arena cannot be had; nothing has been touched yet.

    AvailableMemoryError only where nothing but what is available speaks against it.
    """
    cgroup, available = limits.cgroup_left_bytes, limits.available_bytes
    if cgroup is not None and size_bytes > cgroup:
        raise HostMemoryError(
            f"the host arena needs {gib(size_bytes)}, but the cgroup's limit leaves "
            f"{gib(cgroup)}; raise the container's memory limit, or plan with a smaller --host-mem."
        )
    if available is not None and size_bytes > available:
        raise AvailableMemoryError(
            f"the host arena needs {gib(size_bytes)}, but available memory leaves "
            f"{gib(available)}; free memory, or plan with a smaller --host-mem; {AVAILABLE_ADVICE}."
        )


def _available_bytes(root: Path) -> int | None:
    if given := os.environ.get(AVAILABLE):
        return parse_bytes(given)
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroup_left_bytes(root: Path) -> int | None:
    """The least that the process's cgroup or one of those it lies in has left, v2 or v1."""
    mounted = root / "sys/fs/cgroup"
    for tree, own, limit_file, used_file in (
        (mounted, "", "memory.max", "memory.current"),
        (mounted / "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        left = [
            left_bytes
            for folder in _with_parents(tree, _own_cgroup(root, own))
            if (left_bytes := _left_bytes(folder, limit_file, used_file)) is not None
        ]
        if left:
            return min(left)
    return None


def _own_cgroup(root: Path, controller: str) -> str:
    """The process's path below the tree of a controller; v2 names none."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == controller:
                return path.strip("/")
    return ""


def _with_parents(tree: Path, path: str) -> list[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [tree.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _left_bytes(folder: Path, limit_file: str, used_file: str) -> int | None:
    """Limit minus current use; file cache can be reclaimed and is not counted."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((folder / limit_file).read_text())
        if limit < _UNLIMITED_CGROUP:
            used = int((folder / used_file).read_text())
            return limit - used + _file_cache_bytes(folder / "memory.stat")
    return None


def _file_cache_bytes(stat_file: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in stat_file.read_text().splitlines())
        return int(fields.get("file", fields.get("cache", 0)))
    return 0
