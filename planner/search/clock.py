"""The times at which tasks ran in a simulated plan."""

from twinstream.planner.lifetimes.residencies import TaskClock
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import HOST_COMPUTE, Compute
from twinstream.schedule.timeline import PassSpans


def simulated_clock(schedule: RankSchedule, spans: PassSpans, pass_ns: float) -> TaskClock:
    """Return a clock in which each task lasts from its start to the start of the next one; what
    the host computes beside the device takes no time."""
    started = [
        (start, op.stream.queue == HOST_COMPUTE)
        for op, start in zip(schedule.ops, spans.start_ns, strict=True)
        if isinstance(op, Compute)
    ]
    first_ns = next(start for start, on_host in started if not on_host)
    next_ns, lengths_ns = first_ns + pass_ns, list[float]()
    for start, on_host in reversed(started):
        lengths_ns.append(0.0 if on_host else next_ns - start)
        next_ns = next_ns if on_host else start
    return TaskClock(lengths_ns[::-1])
