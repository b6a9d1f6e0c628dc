"""A schedule compiled for replay: what the dispatch loop does for every op, resolved once."""

from collections.abc import Callable
from dataclasses import dataclass

from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import DISK_QUEUES, HOST_COMPUTE, Compute, Feed, Fetch, Op, Stream
from twinstream.schedule.proof.needed_waits import needed_waits

_OF_HOST = (HOST_COMPUTE, *DISK_QUEUES)  # queues
Work = Callable[[int], None]
"""What an op does when its turn comes; it is told the number of the pass."""


@dataclass(frozen=True, slots=True)
class Launch:
    """An op as the dispatch loop needs it.

    `stream` is an index into the program's streams. `waits` and `waits_previous` are positions
    of ops, only those that nothing else implies. `records`: some op waits for this one.
    """

    position: int
    op: Op
    stream: int
    waits: tuple[int, ...]
    waits_previous: tuple[int, ...]
    records: bool

    @property
    def on_host(self) -> bool:
        """Whether the host carries it out, and not the device."""
        return isinstance(self.op, Feed | Fetch) or self.op.stream.queue in _OF_HOST

    @property
    def kernel_call(self) -> str | None:
        """The call that the device computes; None of any other op."""
        return None if self.on_host or not isinstance(self.op, Compute) else self.op.call


@dataclass(frozen=True)
class Program:
    """The ops of one pass in issue order, on numbered streams."""

    streams: tuple[Stream, ...]
    launches: tuple[Launch, ...]

    @property
    def host_streams(self) -> frozenset[int]:
        """Streams whose ops the host carries out."""
        return frozenset(launch.stream for launch in self.launches if launch.on_host)

    def awaited_by_host(self) -> frozenset[int]:
        """Positions of the ops that the host waits for."""
        return frozenset(
            wait
            for launch in self.launches
            if launch.on_host
            for wait in (*launch.waits, *launch.waits_previous)
        )

    def last_compute(self) -> int:
        """Position of the device's last compute op: where it ends, the pass is said to end.

        Without one it is the last op.
        """
        computes = [found.position for found in self.launches if found.kernel_call is not None]
        return max(computes, default=len(self.launches) - 1)


def compile_program(schedule: RankSchedule) -> Program:
    """Number streams and ops, and keep only the waits that say something.

    The schedule's waits must be sound, as `verify` proves.
    """
    needed = needed_waits(schedule)
    streams: dict[int, Stream] = {}
    launches = []
    for position, op in enumerate(schedule.ops):
        stream = needed.order.stream_of[position]
        streams.setdefault(stream, op.stream)
        launches.append(
            Launch(
                position=position,
                op=op,
                stream=stream,
                waits=needed.same_pass[position],
                waits_previous=needed.previous[position],
                records=position in needed.awaited,
            )
        )
    return Program(tuple(streams[i] for i in range(len(streams))), tuple(launches))
