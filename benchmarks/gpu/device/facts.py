"""What there is to know of a machine before anything is measured on it, in some seconds."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.jobs.campaign import Backend
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.sizes import gib

_PACKAGES = (
    "torch", "triton", "numpy", "scipy", "pydantic", "pydantic-core", "simpy", "highspy", "pytest",
    "nvidia-ml-py", "nvidia-cudnn-cu13", "nvidia-cublas", "flash-attn", "flash-attn-3",
    "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend", "transformers",
)  # fmt: skip
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_CGROUP = Path("/sys/fs/cgroup")


def facts_of(backend: Backend, pinned_bytes: int) -> dict[str, str]:
    """Facts by name, each in a line; pins so much host memory for the device, and gives it back.

    What cannot be found out is said in its place.
    """
    facts = {
        "machine": f"{platform.node()}, {platform.release()}, Python {platform.python_version()}",
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "host memory": _host_memory(),
        "cgroup": _files(_CGROUP, "memory.max", "memory.high", "memory.current", "cpu.max"),
        "huge pages": _files(_HUGE_PAGES, "enabled", "defrag", "shmem_enabled"),
        "packages": _versions(),
    }
    if backend == "cuda":
        facts |= {"device": _device(), "nvml": _nvml()}
        facts[f"pinning {gib(pinned_bytes)}"] = _told(lambda: _pinned(pinned_bytes))
    return facts


def driver_version() -> str:
    """Of NVIDIA's driver, or "unknown"."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.splitlines()[0].strip() if found.stdout else "unknown"


def _told(find: Callable[[], str]) -> str:
    try:
        return find()
    except (TwinstreamError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def _host_memory() -> str:
    from twinstream.executor.memory.host_limits import host_limits

    limits = host_limits()
    known = {
        "available": limits.available_bytes,
        "left in the cgroup": limits.cgroup_left_bytes,
        "may be locked": limits.memlock_bytes,
    }
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = [f"{what} {'no limit' if n is None else gib(n)}" for what, n in known.items()]
    return ", ".join([f"{gib(total)} in all", *parts])


def _files(folder: Path, *names: str) -> str:
    found = []
    for name in names:
        with contextlib.suppress(OSError):
            found.append(f"{name} {(folder / name).read_text(encoding='utf-8').strip()}")
    return "; ".join(found) or f"nothing in {folder}"


def _versions() -> str:
    found = []
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def _device() -> str:
    import torch

    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    return (
        f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, driver "
        f"{driver_version()}, CUDA {torch.version.cuda}, {free:,} of {total:,} bytes free "
        f"({gib(free)} of {gib(total)})"
    )


def _nvml() -> str:
    from twinstream.executor.run.device_state import cuda_reader

    reader = cuda_reader()
    state = reader.read()
    return reader.missing if state is None else state.model_dump_json(exclude={"num_readings"})


def _pinned(size_bytes: int) -> str:
    """As the host arena is: populated by several threads, then locked."""
    from twinstream.executor.memory.arena_memory import arena_pinning
    from twinstream.executor.memory.pinned import pinned_arena

    populated_s = 0.0
    start_s = time.perf_counter()

    def note(done_bytes: int, total_bytes: int) -> None:
        nonlocal populated_s
        if 2 * done_bytes <= total_bytes:
            populated_s = time.perf_counter() - start_s

    with pinned_arena(size_bytes, (), arena_pinning(note)) as memory:
        pinned_s = time.perf_counter() - start_s
        pieces = len(memory.pieces)
    released_s = time.perf_counter() - start_s - pinned_s
    return (
        f"{pinned_s:.2f} s ({size_bytes / pinned_s / 1e9:.1f} GB/s), of which {populated_s:.2f} s "
        f"to populate it; in {pieces} piece(s); given back in {released_s:.2f} s"
    )
