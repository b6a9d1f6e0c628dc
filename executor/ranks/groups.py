"""Process groups: one for every channel of a cluster's schedule that a rank is a member of.

A group of its own for each (axes, queue) and for each pair and shift of messages means that what
is on different streams never waits for the other's turn in a communicator.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from twinstream.executor.ranks.gpus import connect_group
from twinstream.schedule.cluster.projecting import Channel, all_channels
from twinstream.schedule.document import Schedule


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
