"""A chain whose tasks are planned several as one, and its plan written out task by task.

The planner sees a task for each run of tasks that find all they use on the device. What it is not
to place, nor to move, it does not see at all: that has slots of its own for the whole step.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from twinstream.planner.emit.task_ops import (
    TaskWriter,
    behind_one_another,
    kernel_calls,
    own_slots,
)
from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute, Op
from twinstream.schedule.tensors import DEVICE, Carried, Slot


@dataclass(frozen=True)
class MergedChain:
    """A chain as the planner sees it, and what each of its tasks stands for.

    Attributes:
        whole: the chain, with pools of slots for what of it is exchanged.
        planned: what the planner is given in its place.
        members: by task or recompute of `planned`, the tasks of `whole` that it stands for.
        apart: root tensors of `whole` that are not in `planned`.
    """

    whole: Chain
    planned: Chain
    members: Mapping[str, Sequence[Task]]
    apart: Sequence[str]

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """Those of what is apart, by buffer."""
        return own_slots(self.whole, self.apart)

    @property
    def apart_bytes(self) -> int:
        """What they take of the device."""
        slots = {slot.slot_id: slot for slot in self.slots.values()}
        return sum(align_up(slot.size_bytes) for slot in slots.values())

    def left_of(self, caps: Caps) -> Caps:
        """What of the caps is the planner's."""
        if caps.device_bytes is None:
            return caps
        left = max(0, caps.device_bytes - self.apart_bytes)
        return caps.model_copy(update={"device_bytes": left})

    def written_out(self, plan: RankSchedule, caps: Caps) -> RankSchedule:
        """The plan of `planned` with all tasks of `whole`, exchanges on their own queues."""
        whole, own = self.whole, self.slots
        ends = (s.offset_bytes + s.size_bytes for s in plan.slots if s.tier == DEVICE)
        slots = (*plan.slots, *behind_one_another(own.values(), max(ends, default=0)))
        writer = TaskWriter(whole, {name: slot.slot_id for name, slot in own.items()})
        ops: list[Op] = []
        for op in plan.ops:
            if isinstance(op, Compute):
                given = {operand.tensor: operand.slot for operand in op.operands}
                ops += [writer.op(task, given, op.stream) for task in self.members[op.task]]
            else:
                ops.append(op)
        used = {op.call for op in ops if isinstance(op, Compute)}
        carried = [
            Carried(tensor=name, slot=own[name].slot_id) for name in whole.persistent if name in own
        ]
        return plan.model_copy(
            update={
                "tensors": whole.tensors,
                "slots": slots,
                "calls": {n: call for n, call in kernel_calls(whole).items() if n in used},
                "ops": derive_waits(tuple(ops), whole.tensors, slots),
                "carried": (*plan.carried, *carried),
                "caps": caps,
                "workload": whole.workload,
            }
        )


def without_tensors(chain: Chain, apart: Container[str], tasks: Container[str]) -> Chain:
    """The chain without root tensors, and of its tasks only those."""
    gone = {t.tensor_id for t in chain.tensors if (t.parent or t.tensor_id) in apart}

    def lean(task: Task) -> Task:
        kept = tuple([one for one in task.operands if one.tensor not in gone])
        return task.model_copy(update={"operands": kept})

    return chain.model_copy(
        update={
            "tensors": tuple([t for t in chain.tensors if t.tensor_id not in gone]),
            "tasks": tuple([lean(task) for task in chain.tasks if task.task_id in tasks]),
            "recomputes": tuple(
                again.model_copy(update={"task": lean(again.task)}) for again in chain.recomputes
            ),
        }
    )
