"""Brute force: is a schedule safe?

Written from the design page, section 2, and sharing no code with `verify`: the order of ops is a
transitive closure of explicit sets, and every byte has an explicit history and an explicit
content, (leaf tensor, byte of that leaf, version). Answers are names of violation classes; RACE
stands for the three classes about unordered accesses.
"""

from bisect import bisect_left
from itertools import combinations
from typing import NamedTuple

from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Communicate, Compute, Copy, Feed, Fetch, Op
from twinstream.schedule.tensors import Slot, Tensor

RACE = "race"
LAYOUT = {
    "BadPart", "SlotMisaligned", "ArenaExceedsCap", "TensorOutsideSlot", "BadWait",
    "OperandInWrongMemory", "UnknownTier", "StreamMixed", "DiskMisused",
}  # fmt: skip

Byte = tuple[str, int]
Content = tuple[str, int, int]
Wait = tuple[int, int, bool]  # position of the op, of the op it waits for, in the pass before


class Use(NamedTuple):
    """One operand of an op; mode `copy` writes a version that exists elsewhere."""

    tensor: str
    slot: str
    num_parts: int | None
    version: int
    mode: str


def uses_of(op: Op) -> list[Use]:
    """An op's operands, those that only read first."""
    match op:
        case Compute() | Communicate():
            found = [Use(o.tensor, o.slot, o.num_parts, o.version, o.mode) for o in op.operands]
        case Copy():
            found = [
                Use(op.tensor, op.source, op.num_parts, op.version, "read"),
                Use(op.tensor, op.destination, op.num_parts, op.version, "copy"),
            ]
        case Feed():
            found = [Use(op.tensor, op.slot, None, op.version, "write")]
        case Fetch():
            found = [Use(op.tensor, op.slot, None, op.version, "read")]
    return [u for u in found if u.mode == "read"] + [u for u in found if u.mode != "read"]


def parts_of(tensors: dict[str, Tensor], name: str) -> list[Tensor]:
    parts = [t for t in tensors.values() if t.parent == name]
    return sorted(parts, key=lambda part: part.offset_bytes)


def leaves_of(tensors: dict[str, Tensor], name: str, num_parts: int | None) -> list[Tensor]:
    return parts_of(tensors, name)[:num_parts] or [tensors[name]]


def span_of(tensors: dict[str, Tensor], name: str, num_parts: int | None) -> tuple[int, int]:
    """First and past-the-last byte within the root tensor."""
    if num_parts is not None:
        last = parts_of(tensors, name)[num_parts - 1]
        return 0, last.offset_bytes + last.size_bytes
    low = tensors[name].offset_bytes
    return low, low + tensors[name].size_bytes


class Arena:
    """The bytes of every tier that matter: all of them, or one for each stretch of like bytes.

    Per operand, `written` has its bytes, padding between parts included, and `held` the leaf and
    the byte of that leaf that each byte stands for; padding holds nothing.
    """

    def __init__(self, schedule: RankSchedule, *, every_byte: bool) -> None:
        self.tensors = {t.tensor_id: t for t in schedule.tensors}
        self.slots: dict[str, Slot] = {s.slot_id: s for s in schedule.slots}
        self.uses = [uses_of(op) for op in schedule.ops]
        self.carried = [Use(c.tensor, c.slot, None, 0, "write") for c in schedule.carried]
        self._every_byte = every_byte
        self._tiers = {s.slot_id: str(s.tier) for s in schedule.slots}
        distinct = {*self.carried, *(use for uses in self.uses for use in uses)}
        edges: dict[str, set[int]] = {}
        for use in distinct:
            for start, end, _ in [self._span(use), *self._leaf_spans(use)]:
                edges.setdefault(self._tiers[use.slot], set()).update((start, end))
        self._cuts = {tier: sorted(found) for tier, found in edges.items()}
        self.written = {use: self._bytes(use, *self._span(use)[:2]) for use in distinct}
        self.held = {
            use: {
                byte: (leaf, byte[1] - start)
                for start, end, leaf in self._leaf_spans(use)
                for byte in self._bytes(use, start, end)
            }
            for use in distinct
        }

    def leaves(self, use: Use) -> list[str]:
        return [leaf.tensor_id for leaf in leaves_of(self.tensors, use.tensor, use.num_parts)]

    def _base(self, use: Use) -> int:
        slot = self.slots[use.slot]
        return slot.offset_bytes - slot.origin_bytes

    def _span(self, use: Use) -> tuple[int, int, str]:
        low, high = span_of(self.tensors, use.tensor, use.num_parts)
        return self._base(use) + low, self._base(use) + high, use.tensor

    def _leaf_spans(self, use: Use) -> list[tuple[int, int, str]]:
        found = []
        for leaf in leaves_of(self.tensors, use.tensor, use.num_parts):
            start = self._base(use) + leaf.offset_bytes
            found.append((start, start + leaf.size_bytes, leaf.tensor_id))
        return found

    def _bytes(self, use: Use, start: int, end: int) -> set[Byte]:
        tier = self._tiers[use.slot]
        if self._every_byte:
            return {(tier, address) for address in range(start, end)}
        cuts = self._cuts[tier]
        return {(tier, cut) for cut in cuts[bisect_left(cuts, start) : bisect_left(cuts, end)]}


def problems(schedule: RankSchedule, *, num_passes: int = 2, every_byte: bool = False) -> set[str]:
    """Names of the rules that the schedule breaks; empty when it is safe."""
    if malformed := layout_problems(schedule):
        return malformed
    arena = Arena(schedule, every_byte=every_byte)
    found = content_problems(schedule, arena, num_passes)
    overlaps, pairs = conflicts(arena, num_passes)
    before = happens_before(schedule, waits_of(schedule), num_passes)
    if overlaps or any(first not in before[second] for first, second in pairs):
        found.add(RACE)
    return found


def layout_problems(schedule: RankSchedule) -> set[str]:
    tensors = {t.tensor_id: t for t in schedule.tensors}
    found: set[str] = set()
    for tensor in schedule.tensors:
        parts = parts_of(tensors, tensor.tensor_id)
        spans = [(p.offset_bytes, p.offset_bytes + p.size_bytes) for p in parts]
        if tensor.parent is None and tensor.offset_bytes:
            found.add("BadPart")
        if (parts and tensor.parent is not None) or any(e > tensor.size_bytes for _, e in spans):
            found.add("BadPart")
        if any(a[0] < b[1] and b[0] < a[1] for a, b in combinations(spans, 2)):
            found.add("BadPart")
    for slot in schedule.slots:
        if slot.offset_bytes % (4096 if slot.tier.kind == "disk" else 256):
            found.add("SlotMisaligned")
        if (slot.tier.kind, slot.tier.index) not in (("device", 0), ("host", 0), ("disk", 0)):
            found.add("UnknownTier")
        caps = {"device": schedule.caps.device_bytes, "host": schedule.caps.host_bytes}
        caps["disk"] = schedule.caps.disk_bytes or 0
        cap = caps.get(slot.tier.kind)
        if cap is not None and slot.offset_bytes + slot.size_bytes > cap:
            found.add("ArenaExceedsCap")
    return (
        found
        | _fit_problems(schedule, tensors)
        | _carried_problems(schedule, tensors)
        | _wait_problems(schedule)
        | _memory_problems(schedule)
        | _stream_problems(schedule)
        | _disk_problems(schedule)
    )


def _fit_problems(schedule: RankSchedule, tensors: dict[str, Tensor]) -> set[str]:
    slots = {s.slot_id: s for s in schedule.slots}
    uses = [use for op in schedule.ops for use in uses_of(op)]
    for use in uses + [Use(c.tensor, c.slot, None, 0, "write") for c in schedule.carried]:
        slot = slots[use.slot]
        if use.num_parts is not None and use.num_parts > len(parts_of(tensors, use.tensor)):
            return {"TensorOutsideSlot"}
        low, high = span_of(tensors, use.tensor, use.num_parts)
        if low < slot.origin_bytes or high > slot.origin_bytes + slot.size_bytes:
            return {"TensorOutsideSlot"}
    return set()


def _carried_problems(schedule: RankSchedule, tensors: dict[str, Tensor]) -> set[str]:
    """All carried pairs are filled before the first pass, so no two may share a byte."""
    slots = {s.slot_id: s for s in schedule.slots}
    taken: list[tuple[str, int, int]] = []
    for item in schedule.carried:
        slot, (low, high) = slots[item.slot], span_of(tensors, item.tensor, None)
        base = slot.offset_bytes - slot.origin_bytes
        taken.append((str(slot.tier), base + low, base + high))
    if any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a, b in combinations(taken, 2)):
        return {"CarriedNotValid"}
    return set()


def _memory_problems(schedule: RankSchedule) -> set[str]:
    tiers = {s.slot_id: s.tier.kind for s in schedule.slots}
    for op in schedule.ops:
        if isinstance(op, Compute | Communicate):
            of_call = isinstance(op, Compute)
            processor = schedule.calls[op.call].processor if of_call else "device"
            if any(tiers[operand.slot] != processor for operand in op.operands):
                return {"OperandInWrongMemory"}
    return set()


def _stream_problems(schedule: RankSchedule) -> set[str]:
    by_host = {str(op.stream) for op in schedule.ops if op.kind in ("feed", "fetch")}
    others = {str(op.stream) for op in schedule.ops if op.kind not in ("feed", "fetch")}
    return {"StreamMixed"} if by_host & others else set()


def _disk_problems(schedule: RankSchedule) -> set[str]:
    """A disk's slot is one end of copies from or to the host, on a queue each, and nothing else."""
    tiers = {s.slot_id: s.tier for s in schedule.slots}
    if all(str(tier) != "disk:0" for tier in tiers.values()):
        return set()
    for op in schedule.ops:
        on_disk = [use for use in uses_of(op) if str(tiers[use.slot]) == "disk:0"]
        way = (
            (str(tiers[op.source]), str(tiers[op.destination]))
            if isinstance(op, Copy)
            else ("", "")
        )
        is_read, is_written = way == ("disk:0", "host:0"), way == ("host:0", "disk:0")
        if on_disk and not (is_read or is_written):
            return {"DiskMisused"}
        if (is_read, is_written) != tuple(
            op.stream.queue == name for name in ("disk_read", "disk_write")
        ):
            return {"DiskMisused"}
    return set()


def _wait_problems(schedule: RankSchedule) -> set[str]:
    names = [op.op_id for op in schedule.ops]
    for position, op in enumerate(schedule.ops):
        others = [e.op_id for e in schedule.ops[:position] if e.stream != op.stream]
        if set(op.waits) - set(others) or set(op.waits_previous) - set(names):
            return {"BadWait"}
    return set()


def waits_of(schedule: RankSchedule) -> set[Wait]:
    position = {op.op_id: i for i, op in enumerate(schedule.ops)}
    return {
        (position[op.op_id], position[wait], previous)
        for op in schedule.ops
        for previous, waits in ((False, op.waits), (True, op.waits_previous))
        for wait in waits
    }


def happens_before(schedule: RankSchedule, waits: set[Wait], num_passes: int) -> list[set[int]]:
    """For every op of every pass (position + pass * ops): all that surely completed before it."""
    streams = [(op.stream.device, op.stream.queue) for op in schedule.ops]
    size = len(streams)
    waited: list[list[int]] = [[] for _ in streams]
    for second, first, previous in waits:
        waited[second].append(first - size if previous else first)
    before: list[set[int]] = []
    newest: dict[tuple[int, str], int] = {}
    for node in range(size * num_passes):
        position = node % size
        direct = {node - position + wait for wait in waited[position]}
        direct.add(newest.get(streams[position], -1))
        newest[streams[position]] = node
        direct = {n for n in direct if n >= 0}
        before.append(direct.union(*(before[n] for n in direct)))
    return before


def conflicts(arena: Arena, num_passes: int) -> tuple[bool, set[tuple[int, int]]]:
    """Whether an op conflicts with itself, and all pairs (issued earlier, later) that conflict."""
    history: dict[Byte, list[tuple[int, bool]]] = {}
    for number in range(num_passes):
        for position, uses in enumerate(arena.uses):
            node = number * len(arena.uses) + position
            for use in uses:
                reads = use.mode == "read"
                for byte in arena.held[use] if reads else arena.written[use]:
                    history.setdefault(byte, []).append((node, not reads))
    found: set[tuple[int, int]] = set()
    for accesses in set(map(tuple, history.values())):
        for (first, writes), (second, also_writes) in combinations(accesses, 2):
            if writes or also_writes:
                found.add((first, second))
    return any(a == b for a, b in found), {(a, b) for a, b in found if a != b}


def content_problems(schedule: RankSchedule, arena: Arena, num_passes: int) -> set[str]:
    """Interpret the passes in issue order, believing what each op declares to make."""
    found: set[str] = set()
    memory: dict[Byte, Content] = {}
    for use in arena.carried:
        memory |= _content(arena, use, 0)
    for _ in range(num_passes):
        latest = dict.fromkeys(arena.tensors, 0)
        for uses in arena.uses:
            for use in uses:
                found |= _interpret(arena, use, memory, latest)
        kept: dict[Byte, Content] = {}
        for use in arena.carried:
            for byte, (leaf, index) in arena.held[use].items():
                if memory.get(byte) != (leaf, index, latest[leaf]):
                    found.add("CarriedNotValid")
                else:
                    kept[byte] = (leaf, index, 0)
        memory = kept
    return found


def _content(arena: Arena, use: Use, version: int) -> dict[Byte, Content]:
    return {byte: (leaf, index, version) for byte, (leaf, index) in arena.held[use].items()}


def _interpret(
    arena: Arena, use: Use, memory: dict[Byte, Content], latest: dict[str, int]
) -> set[str]:
    found: set[str] = set()
    wanted = _content(arena, use, use.version)
    if use.mode in ("read", "update") and not wanted.items() <= memory.items():
        found.add("WrongContent")
    if use.mode == "read":
        return found
    for byte in arena.written[use]:
        memory.pop(byte, None)
    if use.mode == "scratch":
        return found
    made = use.version + (use.mode == "update")
    memory |= _content(arena, use, made)
    for leaf in arena.leaves(use) if use.mode != "copy" else []:
        exists = use.version == latest[leaf]
        newer = made > latest[leaf]
        if made < 1 or not (exists if use.mode == "update" else exists or newer):
            found.add("VersionOutOfOrder")
        latest[leaf] = max(latest[leaf], made)
    return found
