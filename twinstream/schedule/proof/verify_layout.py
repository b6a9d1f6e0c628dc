"""Static rules: parts inside parents, slots aligned, within caps and in the right memory."""

from collections.abc import Iterator
from itertools import pairwise

from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import DISK_QUEUES, DISK_READ, DISK_WRITE, Copy, Feed, Fetch
from twinstream.schedule.proof.accesses import AccessMap, uses_of
from twinstream.schedule.proof.violations import (
    ArenaExceedsCap,
    BadPart,
    CarriedNotValid,
    DiskMisused,
    OperandInWrongMemory,
    SlotMisaligned,
    StreamMixed,
    TensorOutsideSlot,
    UnknownTier,
    Violation,
)
from twinstream.schedule.tensors import DISK, HOST, TIERS, Tier


def arena_bytes(schedule: RankSchedule, tier: Tier) -> int:
    """Extent of a tier's arena: the end of its last slot."""
    ends = [s.offset_bytes + s.size_bytes for s in schedule.slots if s.tier == tier]
    return max(ends, default=0)


def layout_violations(schedule: RankSchedule, access_map: AccessMap) -> list[Violation]:
    return [
        *_part_violations(access_map),
        *_slot_violations(schedule, access_map),
        *_tier_violations(access_map),
        *_disk_violations(schedule, access_map),
        *_stream_violations(schedule),
        *_fit_violations(schedule, access_map),
        *_memory_violations(schedule, access_map),
        *_carried_violations(schedule, access_map),
    ]


def _part_violations(access_map: AccessMap) -> Iterator[Violation]:
    for name, tensor in access_map.tensors.items():
        parts = access_map.parts_of(name)
        if tensor.parent is None and tensor.offset_bytes:
            text = f"'{name}' lies {tensor.offset_bytes} bytes into a parent, but names none"
            yield BadPart(text, tensor=name)
        if parts and tensor.parent is not None:
            yield BadPart(
                f"'{name}' is a part of '{tensor.parent}' and has parts itself", tensor=name
            )
        end = 0
        for part in parts:
            high = part.offset_bytes + part.size_bytes
            if part.offset_bytes < end or high > tensor.size_bytes:
                text = (
                    f"part '{part.tensor_id}' takes bytes {part.offset_bytes} to {high} of "
                    f"'{name}', which has {tensor.size_bytes} bytes, the first {end} of them taken "
                    "by parts before it"
                )
                yield BadPart(text, tensor=part.tensor_id)
            end = max(end, high)


def _slot_violations(schedule: RankSchedule, access_map: AccessMap) -> Iterator[Violation]:
    for slot in schedule.slots:
        if slot.offset_bytes % slot.tier.alignment_bytes:
            text = (
                f"slot '{slot.slot_id}' starts at byte {slot.offset_bytes} of {slot.tier}, "
                f"not a multiple of {slot.tier.alignment_bytes}"
            )
            yield SlotMisaligned(text, slot=slot.slot_id)
    for tier in access_map.tiers:
        limit = schedule.caps.arena_bytes(tier.kind)
        extent = arena_bytes(schedule, tier)
        if limit is not None and extent > limit:
            yield ArenaExceedsCap(
                f"the arena of {tier} takes {extent} bytes, {extent - limit} more than its "
                f"cap of {limit}"
            )


def _tier_violations(access_map: AccessMap) -> Iterator[Violation]:
    """Caps are those of one device, the host and a disk, and so is all that runs a schedule."""
    for tier in access_map.tiers:
        if tier not in TIERS:
            known = ", ".join(map(str, TIERS))
            yield UnknownTier(f"{tier} holds slots, which only {known} can yet")


def _disk_violations(schedule: RankSchedule, access_map: AccessMap) -> Iterator[Violation]:
    """A disk is read into host memory and written from there, on a queue each for threads."""
    queue_of, slots = {(DISK, HOST): DISK_READ, (HOST, DISK): DISK_WRITE}, access_map.slots
    for op in schedule.ops:
        on_disk = [use for use in uses_of(op) if access_map.slots[use[1]].tier == DISK]
        wanted = None
        if isinstance(op, Copy):
            wanted = queue_of.get((slots[op.source].tier, slots[op.destination].tier))
        if on_disk and wanted is None:
            what = "uses a disk, and does not copy between that and host memory"
        elif op.stream.queue != wanted and (wanted or op.stream.queue in DISK_QUEUES):
            where = "does not use a disk, but is" if wanted is None else "uses a disk, but is"
            should = "" if wanted is None else f", not on '{wanted}'"
            what = f"{where} on a queue '{op.stream.queue}'{should}"
        else:
            continue
        tensor, slot = on_disk[0][:2] if on_disk else (None, None)
        yield DiskMisused(f"op '{op.op_id}' {what}", (op.op_id,), tensor, slot)


def _stream_violations(schedule: RankSchedule) -> Iterator[Violation]:
    """The host carries out its ops in a thread, which keeps no order with a device's stream."""
    of_host, others = (
        {op.stream: op.op_id for op in schedule.ops if isinstance(op, Feed | Fetch) == by_host}
        for by_host in (True, False)
    )
    for stream, op_id in of_host.items():
        if (other := others.get(stream)) is not None:
            text = f"stream {stream} has op '{op_id}' of the host and op '{other}' of a device"
            yield StreamMixed(text, (op_id, other))


def _fit_violations(schedule: RankSchedule, access_map: AccessMap) -> Iterator[Violation]:
    used_by: dict[tuple[str, str, int | None], str] = {}
    for op in schedule.ops:
        for tensor, slot, num_parts, _, _ in uses_of(op):
            used_by.setdefault((tensor, slot, num_parts), op.op_id)
    for item in (*schedule.carried, *schedule.consumed):
        used_by.setdefault((item.tensor, item.slot, None), "")
    for (tensor, slot, num_parts), op_id in used_by.items():
        if why := access_map.fit_error(tensor, slot, num_parts):
            where, ops = (f"in op '{op_id}'", (op_id,)) if op_id else ("among what is carried", ())
            yield TensorOutsideSlot(f"{where} {why}", ops, tensor, slot)


def _memory_violations(schedule: RankSchedule, access_map: AccessMap) -> Iterator[Violation]:
    """A device's operands lie in a device's memory, the host's in host memory."""
    for op in schedule.ops:
        if op.kind == "compute":
            processor = schedule.calls[op.call].processor
        elif op.kind == "communicate":
            processor = "device"
        else:
            continue
        for operand in op.operands:
            tier = access_map.slots[operand.slot].tier
            if tier.kind != processor:
                text = (
                    f"op '{op.op_id}' runs on the {processor}, but its operand '{operand.name}' "
                    f"is in slot '{operand.slot}' of {tier}"
                )
                yield OperandInWrongMemory(text, (op.op_id,), operand.tensor, operand.slot)


def _carried_violations(schedule: RankSchedule, access_map: AccessMap) -> Iterator[Violation]:
    """Carried pairs are filled before the first pass, padding included: none may share a byte."""
    spans = []
    for item in (*schedule.carried, *schedule.consumed):
        start, end = access_map.address(item.tensor, item.slot, None)
        spans.append((str(access_map.slots[item.slot].tier), start, end, item.tensor, item.slot))
    for (tier, _, taken, other, holder), (at, start, end, tensor, slot) in pairwise(sorted(spans)):
        if at == tier and start < taken:
            text = (
                f"carried tensors '{other}' in slot '{holder}' and '{tensor}' in slot '{slot}' "
                f"share bytes {start} to {min(end, taken)} of {tier}"
            )
            yield CarriedNotValid(text, (), tensor, slot)
