"""Static rules: parts inside parents, slots aligned, within caps and in the right memory."""

from itertools import pairwise

from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Feed, Fetch
from twinstream.schedule.proof.accesses import AccessMap
from twinstream.schedule.proof.violations import (
    ArenaExceedsCap,
    BadPart,
    CarriedNotValid,
    OperandInWrongMemory,
    SlotMisaligned,
    StreamMixed,
    TensorOutsideSlot,
    UnknownTier,
    Violation,
)
from twinstream.schedule.tensors import DEVICE, HOST, Tier


def arena_bytes(schedule: Schedule, tier: Tier) -> int:
    """Extent of a tier's arena: the end of its last slot."""
    ends = [s.offset_bytes + s.size_bytes for s in schedule.slots if s.tier == tier]
    return max(ends, default=0)


def layout_violations(schedule: Schedule, access_map: AccessMap) -> list[Violation]:
    return [
        *_part_violations(access_map),
        *_slot_violations(schedule, access_map),
        *_tier_violations(access_map),
        *_stream_violations(schedule),
        *_fit_violations(schedule, access_map),
        *_memory_violations(schedule, access_map),
        *_carried_violations(schedule, access_map),
    ]


def _part_violations(access_map: AccessMap) -> list[Violation]:
    found: list[Violation] = []
    for tensor in access_map.tensors.values():
        parts = access_map.parts_of(tensor.tensor_id)
        if tensor.parent is None and tensor.offset_bytes:
            found.append(
                BadPart(
                    f"'{tensor.tensor_id}' lies {tensor.offset_bytes} bytes into a parent, but "
                    "names none",
                    tensor=tensor.tensor_id,
                )
            )
        if parts and tensor.parent is not None:
            found.append(
                BadPart(
                    f"'{tensor.tensor_id}' is a part of '{tensor.parent}' and has parts itself",
                    tensor=tensor.tensor_id,
                )
            )
        end = 0
        for part in parts:
            high = part.offset_bytes + part.size_bytes
            if part.offset_bytes < end or high > tensor.size_bytes:
                found.append(
                    BadPart(
                        f"part '{part.tensor_id}' takes bytes {part.offset_bytes} to {high} of "
                        f"'{tensor.tensor_id}', which has {tensor.size_bytes} bytes, the first "
                        f"{end} of them taken by parts before it",
                        tensor=part.tensor_id,
                    )
                )
            end = max(end, high)
    return found


def _slot_violations(schedule: Schedule, access_map: AccessMap) -> list[Violation]:
    found: list[Violation] = []
    for slot in schedule.slots:
        if slot.offset_bytes % slot.tier.alignment_bytes:
            found.append(
                SlotMisaligned(
                    f"slot '{slot.slot_id}' starts at byte {slot.offset_bytes} of {slot.tier}, "
                    f"not a multiple of {slot.tier.alignment_bytes}",
                    slot=slot.slot_id,
                )
            )
    for tier in access_map.tiers:
        limit = schedule.caps.arena_bytes(tier.kind)
        extent = arena_bytes(schedule, tier)
        if limit is not None and extent > limit:
            found.append(
                ArenaExceedsCap(
                    f"the arena of {tier} takes {extent} bytes, {extent - limit} more than its "
                    f"cap of {limit}"
                )
            )
    return found


def _tier_violations(access_map: AccessMap) -> list[Violation]:
    """Caps are those of one device and the host, and so is all that runs a schedule."""
    return [
        UnknownTier(f"{tier} holds slots, which only {DEVICE} and {HOST} can yet")
        for tier in access_map.tiers
        if tier not in (DEVICE, HOST)
    ]


def _stream_violations(schedule: Schedule) -> list[Violation]:
    """The host carries out its ops in a thread, which keeps no order with a device's stream."""
    of_host, others = (
        {op.stream: op.op_id for op in schedule.ops if isinstance(op, Feed | Fetch) == by_host}
        for by_host in (True, False)
    )
    return [
        StreamMixed(
            f"stream {stream} has op '{op_id}' of the host and op '{others[stream]}' of a device",
            (op_id, others[stream]),
        )
        for stream, op_id in of_host.items()
        if stream in others
    ]


def _fit_violations(schedule: Schedule, access_map: AccessMap) -> list[Violation]:
    used_by: dict[tuple[str, str, int | None], str] = {}
    for op in schedule.ops:
        if op.kind == "compute":
            for operand in op.operands:
                used_by.setdefault((operand.tensor, operand.slot, operand.num_parts), op.op_id)
        elif op.kind == "copy":
            used_by.setdefault((op.tensor, op.source, op.num_parts), op.op_id)
            used_by.setdefault((op.tensor, op.destination, op.num_parts), op.op_id)
        else:
            used_by.setdefault((op.tensor, op.slot, None), op.op_id)
    for item in schedule.carried:
        used_by.setdefault((item.tensor, item.slot, None), "")
    found: list[Violation] = []
    for (tensor, slot, num_parts), op_id in used_by.items():
        if why := access_map.fit_error(tensor, slot, num_parts):
            where, ops = (f"in op '{op_id}'", (op_id,)) if op_id else ("among what is carried", ())
            found.append(TensorOutsideSlot(f"{where} {why}", ops, tensor, slot))
    return found


def _memory_violations(schedule: Schedule, access_map: AccessMap) -> list[Violation]:
    """A device's operands lie in a device's memory, the host's in host memory."""
    found: list[Violation] = []
    memory = {name: slot.tier.kind for name, slot in access_map.slots.items()}
    for op in schedule.ops:
        if op.kind != "compute":
            continue
        processor = schedule.calls[op.call].processor
        for operand in op.operands:
            if memory[operand.slot] != processor:
                found.append(
                    OperandInWrongMemory(
                        f"op '{op.op_id}' runs on the {processor}, but its operand "
                        f"'{operand.name}' is in slot '{operand.slot}' of "
                        f"{access_map.slots[operand.slot].tier}",
                        (op.op_id,),
                        operand.tensor,
                        operand.slot,
                    )
                )
    return found


def _carried_violations(schedule: Schedule, access_map: AccessMap) -> list[Violation]:
    """Carried pairs are filled before the first pass, padding included: none may share a byte."""
    spans = []
    for item in schedule.carried:
        start, end = access_map.address(item.tensor, item.slot, None)
        spans.append((str(access_map.slots[item.slot].tier), start, end, item.tensor, item.slot))
    found: list[Violation] = []
    for (tier, _, taken, other, holder), (at, start, end, tensor, slot) in pairwise(sorted(spans)):
        if at == tier and start < taken:
            found.append(
                CarriedNotValid(
                    f"carried tensors '{other}' in slot '{holder}' and '{tensor}' in slot "
                    f"'{slot}' share bytes {start} to {min(end, taken)} of {tier}",
                    (),
                    tensor,
                    slot,
                )
            )
    return found
