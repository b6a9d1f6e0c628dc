"""Static rule: waits point backwards, to other streams, at ops that exist."""

from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Op
from twinstream.schedule.proof.clocks import StreamOrder
from twinstream.schedule.proof.violations import BadWait, Violation


class ResolvedWaits:
    """Per op, the positions of the ops it waits for, and what is wrong with its waits."""

    def __init__(self, schedule: Schedule, order: StreamOrder) -> None:
        self.violations: list[Violation] = []
        self.same_pass: list[tuple[int, ...]] = []
        self.previous_pass: list[tuple[int, ...]] = []
        position, stream_of = order.position, order.stream_of
        for at, op in enumerate(schedule.ops):
            targets = tuple([position.get(wait, -1) for wait in op.waits])
            for wait, target in zip(op.waits, targets, strict=True):
                if not 0 <= target < at or stream_of[target] == stream_of[at]:
                    self._add(op, wait, _why_not(target, at))
            previous = tuple([position.get(wait, -1) for wait in op.waits_previous])
            for wait, target in zip(op.waits_previous, previous, strict=True):
                if target < 0:
                    self._add(op, wait, " of the pass before, which is not in the schedule")
            self.same_pass.append(targets)
            self.previous_pass.append(previous)

    def _add(self, op: Op, wait: str, why: str) -> None:
        message = f"op '{op.op_id}' waits for '{wait}'{why}"
        self.violations.append(BadWait(message, (op.op_id, wait)))


def _why_not(target: int, at: int) -> str:
    if target < 0:
        return ", which is not in the schedule"
    return ", which is on the same stream" if target < at else ", which is not issued before it"
