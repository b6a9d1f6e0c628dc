"""Process groups: one for every channel of a cluster's schedule that a rank is a member of.

A group of its own for each (axes, queue) and for each pair and shift of messages means that what
is on different streams never waits for the other's turn in a communicator.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.projecting import Channel, all_channels


@dataclass(frozen=True)
class Group:
    """Who takes part, and this rank's place among them. Who is alone has no `process_group`."""

    members: tuple[int, ...]
    place: int
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.members)


def open_groups(schedule: ClusterSchedule, rank: int, timeout_s: float) -> Mapping[Channel, Group]:
    """Those of one rank. All ranks must call it: groups are made one after the other by all."""
    found = {}
    for channel in all_channels(schedule):
        made = None
        if len(channel.members) > 1:
            made = dist.new_group(sorted(channel.members), timeout=timedelta(seconds=timeout_s))
        if rank in channel.members:
            found[channel] = Group(channel.members, channel.members.index(rank), made)
    return found
