"""Tasks written out as ops, and a chain written out with everything in slots of its own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.planner.pack.slot_pools import pooled_slots
from twinstream.schedule.chain import COMMUNICATE, Chain, Task
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import (
    CollectiveName,
    Communicate,
    Compute,
    KernelCall,
    Operand,
    Reduction,
    Stream,
    TaskOperand,
)
from twinstream.schedule.tensors import DEVICE, Carried, Slot
from twinstream.schedule.workload import MachineRef

COMPUTE = Stream(queue="compute")
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class _Exchange:
    """What all tasks of one call have in common."""

    stream: Stream
    collective: CollectiveName
    axes: tuple[str, ...]
    shift: int
    reduction: Reduction
    last_first: Literal[True] | None
    communicator: tuple[object, ...]


class TaskWriter:
    """Writes tasks as ops, in the order of the chain: exchanges of a communicator are counted.

    Args:
        chain: what the tasks are of.
        slots: by buffer (see `SlotPools`), of all that `op` is not told a slot of.
    """

    def __init__(self, chain: Chain, slots: Mapping[str, str]) -> None:
        self._calls, self._slots, self._several = chain.calls, slots, chain.pools.several
        self._roots = {t.tensor_id: t.parent for t in chain.tensors if t.parent is not None}
        self._operands: dict[int, Operand] = {}
        self._exchanges: dict[str, _Exchange | None] = {}
        self._counts: dict[tuple[object, ...], int] = {}

    def op(
        self, task: Task, given: Mapping[str, str] = _NOTHING, stream: Stream = COMPUTE
    ) -> Compute | Communicate:
        """The task as an op without waits; `given` has slots of its operands by tensor."""
        if given or self._roots or task.task_id in self._several:
            slots = [self._slot(task.task_id, one, given) for one in task.operands]
            found = [
                Operand.made_of(one, slot=slot)
                for one, slot in zip(task.operands, slots, strict=True)
            ]
        else:
            found = [self._operands.get(id(one)) or self._operand(one) for one in task.operands]
        operands = tuple(found)
        if task.call not in self._exchanges:
            self._exchanges[task.call] = _exchange(self._calls[task.call])
        said = self._exchanges[task.call]
        if said is None:
            return Compute.made(
                op_id=task.task_id, stream=stream, waits=(), waits_previous=(), kind="compute",
                task=task.task_id, call=task.call, operands=operands, label=task.label,
            )  # fmt: skip
        count = self._counts[said.communicator] = self._counts.get(said.communicator, -1) + 1
        return Communicate.made(
            op_id=task.task_id, stream=said.stream, waits=(), waits_previous=(),
            kind="communicate", collective=said.collective, axes=said.axes, shift=said.shift,
            sequence=count, operands=operands, reduction=said.reduction,
            last_first=said.last_first, label=task.label,
        )  # fmt: skip

    def _operand(self, operand: TaskOperand) -> Operand:
        """Tasks share the operands that they read again and again; so do their ops."""
        found = Operand.made_of(operand, slot=self._slots[operand.tensor])
        self._operands[id(operand)] = found
        return found

    def _slot(self, task_id: str, operand: TaskOperand, given: Mapping[str, str]) -> str:
        if operand.tensor in given:
            return given[operand.tensor]
        several = self._several.get(task_id, _NOTHING)
        tensor = self._roots.get(operand.tensor, operand.tensor)
        return self._slots[several.get(operand.name, tensor)]


def resident_schedule(chain: Chain, machine: MachineRef, caps: Caps) -> RankSchedule:
    """The chain with all tensors on the device, and with all waits that this implies.

    Those of its pools are in their slots in turn, and every other one is in a slot of its own.
    """
    own = own_slots(chain, (t.tensor_id for t in chain.tensors if t.parent is None))
    slots = behind_one_another(own.values(), 0)
    writer = TaskWriter(chain, {name: slot.slot_id for name, slot in own.items()})
    ops = derive_waits(tuple([writer.op(task) for task in chain.tasks]), chain.tensors, slots)
    return RankSchedule.model_construct(
        schema_version=1, tensors=chain.tensors, slots=slots, calls=kernel_calls(chain), ops=ops,
        carried=tuple([Carried(tensor=name, slot=own[name].slot_id) for name in chain.persistent]),
        caps=caps, workload=chain.workload, model=chain.model, recipe=chain.recipe,
        model_flops=chain.model_flops, machine=machine, policy="resident", bound=None, consumed=(),
    )  # fmt: skip


def own_slots(chain: Chain, tensors: Iterable[str]) -> dict[str, Slot]:
    """By buffer: slots of pools, and slots of their own of those of `tensors` that have no pool."""
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    own = {
        name: Slot(slot_id=name, tier=DEVICE, offset_bytes=0, size_bytes=sizes[name])
        for name in tensors
        if name not in chain.pools.pools
    }
    return own | pooled_slots(chain)


def behind_one_another(slots: Iterable[Slot], end: int) -> tuple[Slot, ...]:
    """Each of the slots once, the first one at that byte or the next aligned one."""
    found: dict[str, Slot] = {}
    for slot in slots:
        if slot.slot_id not in found:
            start = align_up(end)
            found[slot.slot_id] = slot.model_copy(update={"offset_bytes": start})
            end = start + slot.size_bytes
    return tuple(found.values())


def kernel_calls(chain: Chain) -> dict[str, KernelCall]:
    """The calls that are of kernels."""
    return {name: call for name, call in chain.calls.items() if call.kernel != COMMUNICATE}


def _exchange(call: KernelCall) -> _Exchange | None:
    """What a call says to other ranks; None if it is of a kernel."""
    if call.kernel != COMMUNICATE:
        return None
    said: Mapping[str, Any] = call.attributes
    collective, stream = said["collective"], Stream(queue=said["queue"])
    axes, shift = tuple(said["axes"].split()), said.get("shift", 0)
    communicator = (axes, shift, collective) if shift else (axes, stream.queue)
    reduction, last_first = said.get("reduction", "library"), said.get("last_first")
    return _Exchange(stream, collective, axes, shift, reduction, last_first, communicator)
