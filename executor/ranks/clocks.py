"""The offset of this process's clock from that of rank 0."""

from dataclasses import dataclass
from time import perf_counter_ns

import torch
import torch.distributed as dist

_ROUND_TRIPS = 16


@dataclass(frozen=True)
class ClockOffset:
    """The offset of rank 0's `perf_counter_ns` from this rank's, right within `error_ns`."""

    offset_ns: int
    error_ns: int


def clock_offset(rank: int, size: int) -> ClockOffset:
    """Measure the offset by round trips to rank 0, which says its time in between, rank after rank.

    The reading of rank 0 lies between the two of this rank; of the shortest round trip, in the
    middle of them, wrong by half the trip at most. All ranks must ask.
    """
    reading = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        for other in range(1, size):
            for _ in range(_ROUND_TRIPS):
                dist.recv(reading, other)
                reading[0] = perf_counter_ns()
                dist.send(reading, other)
        return ClockOffset(0, 0)
    trips = []
    for _ in range(_ROUND_TRIPS):
        sent_ns = perf_counter_ns()
        dist.send(reading, 0)
        dist.recv(reading, 0)
        back_ns = perf_counter_ns()
        trips.append((back_ns - sent_ns, int(reading) - (sent_ns + back_ns) // 2))
    trip_ns, offset_ns = min(trips)
    return ClockOffset(offset_ns, -(-trip_ns // 2))
