"""Why the compute stream was idle: for every gap the op, tensor and resource waited for."""

from collections.abc import Iterable

from pydantic import NonNegativeInt

from twinstream.schedule.document import Schedule
from twinstream.schedule.node import Node
from twinstream.schedule.ops import Communicate, Compute, Op, Stream
from twinstream.schedule.timeline import Timeline


class IdleInterval(Node):
    """A gap on a stream before op `before`.

    `waited_for` is the op that ended last of those it waits for; `tensor` what that op moved or
    made (the first it writes; None without operands); `resource` its queue. All three are None when
    the op's waits were over before the gap began: the rest is latency of waiting and launching.
    """

    start_ns: NonNegativeInt
    end_ns: NonNegativeInt
    before: str
    waited_for: str | None
    tensor: str | None
    resource: str | None


def idle_intervals(
    schedule: Schedule, timeline: Timeline, stream: Stream | None = None
) -> list[IdleInterval]:
    """Gaps of a stream (by default `compute` of device 0) in the timeline's last pass, in order.

    The gap between the passes counts when the timeline has the pass before, too.
    """
    chosen = stream or Stream(queue="compute")
    ops = {op.op_id: op for op in schedule.ops}
    position = {op.op_id: i for i, op in enumerate(schedule.ops)}
    last = timeline.passes[-1]
    before = timeline.passes[-2] if len(timeline.passes) > 1 else None
    mine = [i for i, op in enumerate(schedule.ops) if op.stream == chosen]
    free_ns = before.end_ns[mine[-1]] if before is not None and mine else None
    found: list[IdleInterval] = []
    for i in mine:
        start_ns = last.start_ns[i]
        if free_ns is not None and start_ns > free_ns:
            op = schedule.ops[i]
            ends = [(last.end_ns[position[wait]], wait) for wait in op.waits]
            if before is not None:
                ends += [(before.end_ns[position[wait]], wait) for wait in op.waits_previous]
            found.append(_interval(free_ns, start_ns, op, ends, ops))
        free_ns = last.end_ns[i]
    return found


def idle_by_cause(intervals: Iterable[IdleInterval]) -> dict[str, int]:
    """Idle ns by resource waited for; `latency` where no op was."""
    total: dict[str, int] = {}
    for interval in intervals:
        cause = interval.resource or "latency"
        total[cause] = total.get(cause, 0) + interval.end_ns - interval.start_ns
    return total


def _interval(
    start_ns: int, end_ns: int, op: Op, ends: list[tuple[int, str]], ops: dict[str, Op]
) -> IdleInterval:
    latest_ns, name = max(ends, default=(0, ""))
    cause = ops[name] if latest_ns > start_ns else None
    return IdleInterval(
        start_ns=start_ns,
        end_ns=end_ns,
        before=op.op_id,
        waited_for=cause.op_id if cause else None,
        tensor=_tensor(cause) if cause else None,
        resource=cause.stream.queue if cause else None,
    )


def _tensor(op: Op) -> str | None:
    if not isinstance(op, Compute | Communicate):
        return op.tensor
    made = [o.tensor for o in op.operands if o.mode in ("write", "update")]
    used = [*made, *(o.tensor for o in op.operands)]
    return used[0] if used else None
