"""Slots from pools: tensors that follow one another share a slot."""

from bisect import insort
from operator import itemgetter

from twinstream.schedule.chain import Chain
from twinstream.schedule.tensors import DEVICE, Slot


def pooled_slots(chain: Chain) -> dict[str, Slot]:
    """Return by buffer the slot that it has from its first use to its last.

    The slot that has been free longest is taken, and only where as many others are free as the pool
    keeps spare: what was in those may still be on its way. Offsets are all 0.
    """
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    roots = {tensor.tensor_id: tensor.parent or tensor.tensor_id for tensor in chain.tensors}
    used: dict[str, tuple[str, int, int]] = {}  # by buffer: tensor, first and last task
    for position, task in enumerate(chain.tasks):
        several = chain.pools.several.get(task.task_id)
        for operand in task.operands:
            tensor = roots[operand.tensor]
            buffer = several.get(operand.name, tensor) if several else tensor
            if buffer in chain.pools.pools:
                first = used[buffer][1] if buffer in used else position
                used[buffer] = tensor, first, position
    found: dict[str, Slot] = {}
    free: dict[str, list[tuple[int, Slot]]] = {}  # by pool, sorted by since when
    counts: dict[str, int] = {}
    for buffer, (tensor, first, last) in used.items():
        pool, spare = chain.pools.pools[buffer]
        slots = free.setdefault(pool, [])
        if len(slots) > spare and slots[spare][0] < first:
            slot = slots.pop(0)[1]
        else:
            number = counts[pool] = counts.get(pool, -1) + 1
            slot = Slot(
                slot_id=f"{pool}.{number}", tier=DEVICE, offset_bytes=0, size_bytes=sizes[tensor]
            )
        found[buffer] = slot
        insort(slots, (last, slot), key=itemgetter(0))
    return found
