"""One stage planned within its caps, and written out as ops again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinstream.clusters.offloading.blocks import Block, chain_of, few_blocks
from twinstream.clusters.offloading.errors import OffloadError, bytes_by_role
from twinstream.clusters.offloading.movable import Places, StageTimes, places_of
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.emit.emission import Emitted
from twinstream.planner.evaluator import Evaluator
from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.planner.search.one_chain import OneChain, plan_of_chain
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Communicate, Compute, Op
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, Slot

_SIMULATED_TASKS = 5000  # in all plans of a stage that are simulated
_MOST_ATTEMPTS = 8
_MOST_BLOCKS = 450  # of a stage: of larger ones layers are planned together
_WORKING_SET = 0.2  # of the device, that layers planned together may take


@dataclass(frozen=True)
class Within:
    """What a stage is planned for: the node's share of one GPU, its caps, and the evaluator."""

    machine: Machine
    caps: Caps
    evaluator: Evaluator


def planned(name: str, schedule: Schedule, times: StageTimes, within: Within) -> Schedule:
    """The stage's ops with copies between them, within the caps; its exchanges as they were.

    A stage that fits comes back as it is. Where nothing fits otherwise, what is exchanged gets its
    bytes from the planner, too.

    Raises:
        OffloadError: nothing was found that fits.
    """
    room = within.caps.arena_bytes("device")
    if room is None or arena_bytes(schedule, DEVICE) <= room:
        return schedule.model_copy(update={"caps": within.caps})
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in schedule.tensors}
    for tight in (False, True):
        places = places_of(schedule, times, within.machine, tight=tight)
        most_bytes = 0 if tight else round(_WORKING_SET * room)
        blocks = few_blocks(schedule.ops, places.placed, sizes, (_MOST_BLOCKS, most_bytes))
        chain = chain_of(schedule, blocks, places, times, within.machine)
        fixed_bytes = _fixed_bytes(schedule, places)
        source = OneChain(chain, within.machine, _less(within.caps, fixed_bytes))
        attempts = min(_MOST_ATTEMPTS, max(2, _SIMULATED_TASKS // len(blocks)))
        emitted = plan_of_chain(source, within.evaluator, attempts)
        if emitted is not None:
            return _written_out(schedule, blocks, places, emitted, within.caps)
    least_device, least_host = source.least_bytes()
    raise OffloadError(
        name, within.caps, bytes_by_role(schedule),
        None if least_device is None else round(least_device) + fixed_bytes,
        None if least_host is None else round(least_host),
    )  # fmt: skip


def _fixed_slots(schedule: Schedule, places: Places) -> list[Slot]:
    """Slots of what is not placed anew."""
    used = {
        operand.slot
        for op in schedule.ops
        if isinstance(op, Compute | Communicate)
        for operand in op.operands
        if operand.tensor not in places.placed
    }
    return [slot for slot in schedule.slots if slot.slot_id in used]


def _fixed_bytes(schedule: Schedule, places: Places) -> int:
    return sum(align_up(slot.size_bytes) for slot in _fixed_slots(schedule, places))


def _less(caps: Caps, fixed_bytes: int) -> Caps:
    if caps.device_bytes is None:
        return caps
    return caps.model_copy(update={"device_bytes": max(0, caps.device_bytes - fixed_bytes)})


def _written_out(
    schedule: Schedule, blocks: Sequence[Block], places: Places, emitted: Emitted, caps: Caps
) -> Schedule:
    """Blocks as their own ops again; behind the planner's slots those that stay as they were."""
    own = emitted.schedule
    end = max((s.offset_bytes + s.size_bytes for s in own.slots if s.tier == DEVICE), default=0)
    slots = list(own.slots)
    for slot in _fixed_slots(schedule, places):
        slots.append(slot.model_copy(update={"offset_bytes": align_up(end)}))
        end = align_up(end) + slot.size_bytes
    ops: list[Op] = []
    of_task = {f"block.{number}": block for number, block in enumerate(blocks)}
    for op in own.ops:
        if not isinstance(op, Compute):
            ops.append(op)
            continue
        block = of_task[op.task]
        at = {operand.tensor: operand.slot for operand in op.operands}
        ops += [_in_slots(one, at) for one in schedule.ops[block.begin : block.end]]
    carried = tuple(item for item in schedule.carried if item.tensor not in places.placed)
    found = tuple(slots)
    return schedule.model_copy(
        update={
            "ops": derive_waits(tuple(ops), schedule.tensors, found),
            "slots": found,
            "carried": (*own.carried, *carried),
            "caps": caps,
            "policy": "optimal",
        }
    )


def _in_slots(op: Op, slots: Mapping[str, str]) -> Op:
    """The op with its operands where the planner has them."""
    assert isinstance(op, Compute | Communicate)
    operands = tuple(
        operand.model_copy(update={"slot": slots[operand.tensor]})
        if operand.tensor in slots
        else operand
        for operand in op.operands
    )
    return op.model_copy(update={"operands": operands})
