"""Static rule: waits point backwards, to other streams, at ops that exist."""

from twinstream.schedule.clocks import StreamOrder
from twinstream.schedule.document import Schedule
from twinstream.schedule.violations import BadWait, Violation


def wait_violations(schedule: Schedule, order: StreamOrder) -> list[Violation]:
    position = {op.op_id: i for i, op in enumerate(schedule.ops)}
    found: list[Violation] = []
    for at, op in enumerate(schedule.ops):
        for wait in op.waits:
            target = position.get(wait)
            if target is None:
                why = "which is not in the schedule"
            elif target >= at:
                why = "which is not issued before it"
            elif order.stream_of[target] == order.stream_of[at]:
                why = "which is on the same stream"
            else:
                continue
            found.append(BadWait(f"op '{op.op_id}' waits for '{wait}', {why}", (op.op_id, wait)))
        for wait in op.waits_previous:
            if wait not in position:
                found.append(
                    BadWait(
                        f"op '{op.op_id}' waits for '{wait}' of the pass before, which is not in "
                        "the schedule",
                        (op.op_id, wait),
                    )
                )
    return found
