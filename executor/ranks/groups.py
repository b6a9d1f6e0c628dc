"""Process groups: one for every channel of a cluster's schedule that a rank is a member of.

A group of its own for each (axes, queue) and for each pair and shift of messages means that what
is on different streams never waits for the other's turn in a communicator.

On GPUs a rank's device arena may be a window of its groups (`rank_pool`): memory of NCCL that
collectives read and write on every rank directly. Not yet run on a GPU.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from twinstream.executor.program.options import DevicePool
from twinstream.executor.ranks.errors import GpusError
from twinstream.executor.ranks.gpus import connect_group
from twinstream.schedule.cluster.projecting import Channel, all_channels, class_name_of
from twinstream.schedule.document import Schedule

SYMMETRIC = "TWINSTREAM_SYMMETRIC_MEMORY"
"""A variable that is 1 where GPUs of a node are all linked by NVLink and arenas are to be windows.
"""


@dataclass(frozen=True)
class ChannelGroup:
    """The ranks of a channel, and this rank's place among them; one alone has no process group."""

    members: tuple[int, ...]
    place: int
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.members)


def open_groups(
    schedule: Schedule, rank: int, device: torch.device, timeout: timedelta
) -> Mapping[Channel, ChannelGroup]:
    """Make the groups of one rank. All ranks must call it: all make all groups in one order.

    On GPUs each group has exchanged something once when this returns.
    """
    backend = "nccl" if device.type == "cuda" else None
    found = {}
    for channel in all_channels(schedule):
        made = None
        if len(channel.members) > 1:
            made = dist.new_group(sorted(channel.members), timeout=timeout, backend=backend)
        if rank not in channel.members:
            continue
        found[channel] = ChannelGroup(channel.members, channel.members.index(rank), made)
        if made is not None and backend is not None:
            is_message = channel.communicator.shift != 0
            connect_group(made, channel.members, device, is_message=is_message)
    return found


def rank_pool(
    schedule: Schedule, groups: Mapping[Channel, ChannelGroup], device: torch.device
) -> DevicePool:
    """Where this rank's device arena is allocated."""
    if os.environ.get(SYMMETRIC) != "1" or device.type != "cuda":
        return DevicePool()
    return SymmetricPool(device, _symmetric(schedule, groups))


def _symmetric(
    schedule: Schedule, groups: Mapping[Channel, ChannelGroup]
) -> Iterator[ChannelGroup]:
    """Groups of collectives whose members have one arena: slots lie at the same offsets."""
    for channel, group in groups.items():
        classes = {class_name_of(schedule, rank) for rank in group.members}
        if channel.communicator.shift == 0 and len(classes) == 1:
            yield group


class SymmetricPool(DevicePool):
    """A pool of NCCL's allocator, whose memory is a window of all these groups.

    All ranks of a group must allocate as much, and at the same time.

    Args:
        groups: in the same order on all their members, and connected.

    Raises:
        GpusError: NCCL or the node cannot do it.
    """

    def __init__(self, device: torch.device, groups: Iterable[ChannelGroup]) -> None:
        self._backends: list[Any] = [
            group.process_group._get_backend(device)
            for group in groups
            if group.process_group is not None
        ]
        self._pool: Any = None

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        if not self._backends:
            yield
            return
        self._pool = torch.cuda.MemPool(self._backends[0].mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            yield
        try:
            for backend in self._backends:
                backend.register_mem_pool(self._pool, symm=True)
        except (RuntimeError, TypeError, AttributeError) as error:
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise GpusError(
                f"{SYMMETRIC}=1, and NCCL cannot register the device arena ({said}): it needs "
                "NCCL 2.27 and NVLink between all GPUs of a group. Unset it"
            ) from error

    def release(self) -> None:
        if self._pool is not None:
            for backend in self._backends:
                backend.deregister_mem_pool(self._pool)
            self._pool = None
