"""One arena per tier: slab and pinned memory on CUDA, two host arenas on the CPU."""

import contextlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from twinstream.executor.memory.arenas import ArenaMemory, Arenas, DeviceArena
from twinstream.executor.memory.device_memory import (
    DeviceFailedError,
    DeviceMemoryError,
    check_device_memory,
    release_device,
)
from twinstream.executor.memory.disk_arena import DiskArena
from twinstream.executor.memory.host_limits import check_host_memory, host_limits
from twinstream.executor.memory.numa import cpus_near
from twinstream.executor.memory.pinned import Pinning, pinned_arena
from twinstream.executor.memory.pinned_pieces import host_ranges
from twinstream.executor.program.options import Progress, RunOptions
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.sizes import gib
from twinstream.schedule.tensors import DEVICE, DISK, HOST, Tier


@contextlib.contextmanager
def arena_memory(schedule: RankSchedule, options: RunOptions) -> Iterator[dict[Tier, ArenaMemory]]:
    """The memory of every tier that a schedule uses, exactly as large as planned, while open.

    Once closed, the device's memory is the driver's again.

    Raises:
        HostMemoryError: it does not fit this machine's memory; nothing has been touched.
        DeviceMemoryError: it does not fit the device's free memory; nothing has been touched.
        NoBoundaryError: the host arena cannot be pinned in pieces.
        DeviceFailedError: the device failed while it was open.
        TwinstreamError: something is at home on a disk, and no file has it.
    """
    if all(slot.tier != DISK for slot in schedule.slots):
        with _in_memory(schedule, options) as memory:
            yield memory
        return
    files = None if options.disk is None else replace(options.disk, tell=options.tell)
    with (
        closing(DiskArena(schedule, files)) as disk,
        _in_memory(schedule, options) as memory,
    ):
        yield memory | {DISK: disk}


@contextlib.contextmanager
def _in_memory(schedule: RankSchedule, options: RunOptions) -> Iterator[dict[Tier, ArenaMemory]]:
    """The memory of the device and the host."""
    sizes = Arenas.sizes(schedule)
    if options.backend == "cpu":
        check_host_memory(sum(sizes.values()), host_limits())
        yield {tier: torch.empty(size, dtype=torch.uint8) for tier, size in sizes.items()}
        return
    check_device_memory(sizes[DEVICE], *torch.cuda.mem_get_info())
    host_bytes, pinning = sizes.get(HOST, 0), arena_pinning(options.on_pinned)
    check_host_memory(host_bytes, host_limits())
    with pinned_arena(host_bytes, host_ranges(schedule), pinning) as pinned:
        arena = DeviceArena(device_slab(sizes[DEVICE]))
        memory: dict[Tier, ArenaMemory] = {DEVICE: arena, HOST: pinned}
        try:
            yield memory
            torch.cuda.synchronize()
        except torch.AcceleratorError as error:
            if arena.gpu is not None:
                arena.gpu.abandon()
            raise DeviceFailedError(_failed(error)) from error
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what is raised says why
                torch.cuda.synchronize()
            raise
        memory.clear()
        del arena
        release_device()


def arena_pinning(on_progress: Progress | None = None) -> Pinning:
    """How to pin for this process's GPU: memory near it."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return Pinning(cudart, cpus_near(_pci_address()), on_progress=on_progress)


def device_slab(size_bytes: int) -> torch.Tensor:
    """The device arena, zeroed.

    Raises:
        DeviceMemoryError: there is less memory than the driver said.
    """
    try:
        return torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"the device arena of {gib(size_bytes)} cannot be had, though the driver had said that "
            f"so much was free: {str(error).splitlines()[0]} End what else runs on the device, or "
            "plan with a smaller --device-mem."
        ) from error


def _failed(error: Exception) -> str:
    said = (str(error) or type(error).__name__).splitlines()[0]
    return (
        f"the GPU has failed and runs nothing more in this process ({said}): look for an Xid in "
        "`dmesg` and for ECC errors in `nvidia-smi -q`."
    )


def _pci_address() -> str:
    """As sysfs spells it."""
    found: Any = torch.cuda.get_device_properties()
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
