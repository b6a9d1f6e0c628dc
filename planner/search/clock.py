"""The times at which tasks ran in a simulated plan."""

from twinstream.planner.lifetimes.residencies import TaskClock
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.timeline import PassSpans


def simulated_clock(schedule: RankSchedule, spans: PassSpans, pass_ns: float) -> TaskClock:
    """Return a clock in which each task lasts from its start to the start of the next one."""
    starts_ns = [
        start
        for op, start in zip(schedule.ops, spans.start_ns, strict=True)
        if isinstance(op, Compute)
    ]
    ends_ns = [*starts_ns[1:], starts_ns[0] + pass_ns]
    return TaskClock([end - start for start, end in zip(starts_ns, ends_ns, strict=True)])
