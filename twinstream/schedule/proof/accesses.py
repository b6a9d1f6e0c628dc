"""The accesses of each op: byte ranges of tiers, by leaf tensor."""

from typing import NamedTuple

from twinstream.schedule.ops import Mode, Op
from twinstream.schedule.proof.memory_cells import GARBAGE
from twinstream.schedule.tensors import Slot, Tensor

Range = tuple[int, int, int]
Use = tuple[str, str, int | None, int, Mode]  # tensor, slot, first parts, version


class Access(NamedTuple):
    """One op's use of one leaf (a tensor without parts) in one slot.

    `leaf` is GARBAGE for bytes that lie between a parent's parts and are written along.
    `version` is what is read (read, update) or made (write).
    """

    tier: int
    start: int
    end: int
    leaf: int
    version: int
    mode: Mode
    tensor: str
    slot: str


class AccessMap:
    """Resolves (tensor, slot) to byte ranges of leaves; leaves and tiers are numbered.

    Resolution does not check that a tensor fits its slot: `fit_error` tells.
    """

    def __init__(self, tensors: tuple[Tensor, ...], slots: tuple[Slot, ...]) -> None:
        self.tensors = {t.tensor_id: t for t in tensors}
        self.slots = {s.slot_id: s for s in slots}
        self.tiers = sorted({s.tier for s in slots}, key=str)
        self.leaves: list[str] = []
        self._tier_index = {tier: i for i, tier in enumerate(self.tiers)}
        self._parts: dict[str, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.parent is not None:
                self._parts.setdefault(tensor.parent, []).append(tensor)
        for parts in self._parts.values():
            parts.sort(key=lambda part: part.offset_bytes)
        self.leaves = [t.tensor_id for t in tensors if t.tensor_id not in self._parts]
        self._leaf_index = {name: i for i, name in enumerate(self.leaves)}
        self._ranges: dict[tuple[str, str, int | None], tuple[int, tuple[Range, ...]]] = {}

    def parts_of(self, tensor: str) -> list[Tensor]:
        return self._parts.get(tensor, [])

    def extent(self, tensor: str, num_parts: int | None) -> tuple[int, int]:
        """First and past-the-last byte of a tensor (or its first parts) within its root."""
        whole = self.tensors[tensor]
        if num_parts is None:
            return whole.offset_bytes, whole.offset_bytes + whole.size_bytes
        last = self._parts[tensor][num_parts - 1]
        return 0, last.offset_bytes + last.size_bytes

    def address(self, tensor: str, slot: str, num_parts: int | None) -> tuple[int, int]:
        """First and past-the-last byte in the slot's arena."""
        low, high = self.extent(tensor, num_parts)
        base = self.slots[slot].offset_bytes - self.slots[slot].origin_bytes
        return base + low, base + high

    def fit_error(self, tensor: str, slot: str, num_parts: int | None) -> str | None:
        """Why the tensor does not lie inside the slot; None when it does."""
        count = len(self.parts_of(tensor))
        if num_parts is not None and num_parts > count:
            return f"'{tensor}' has {count} parts, {num_parts} are named"
        low, high = self.extent(tensor, num_parts)
        holder = self.slots[slot]
        held = (holder.origin_bytes, holder.origin_bytes + holder.size_bytes)
        if low < held[0] or high > held[1]:
            return (
                f"'{tensor}' takes bytes {low} to {high} of its root, "
                f"slot '{slot}' holds bytes {held[0]} to {held[1]}"
            )
        return None

    def ranges(
        self, tensor: str, slot: str, num_parts: int | None
    ) -> tuple[int, tuple[Range, ...]]:
        """(tier, ((start, end, leaf), ...)), gaps between parts included as GARBAGE."""
        key = (tensor, slot, num_parts)
        found = self._ranges.get(key)
        if found is None:
            found = self._ranges[key] = self._resolve(tensor, slot, num_parts)
        return found

    def of(self, op: Op) -> list[Access]:
        """Reads first, so that a write over an op's own operand shows."""
        reads: list[Access] = []
        others: list[Access] = []
        for tensor, slot, num_parts, version, mode in uses_of(op):
            tier, ranges = self.ranges(tensor, slot, num_parts)
            found = reads if mode == "read" else others
            for start, end, leaf in ranges:
                if leaf != GARBAGE:
                    found.append(Access(tier, start, end, leaf, version, mode, tensor, slot))
                elif mode != "read":
                    found.append(Access(tier, start, end, leaf, version, "scratch", tensor, slot))
        return reads + others

    def _resolve(
        self, tensor: str, slot: str, num_parts: int | None
    ) -> tuple[int, tuple[Range, ...]]:
        tier = self._tier_index[self.slots[slot].tier]
        start, end = self.address(tensor, slot, num_parts)
        parts = self.parts_of(tensor)[:num_parts]
        if not parts:
            return tier, ((start, end, self._leaf_index[tensor]),)
        found: list[Range] = []
        position = start
        for part in parts:
            low = start + part.offset_bytes
            if low > position:
                found.append((position, low, GARBAGE))
            position = low + part.size_bytes
            found.append((low, position, self._leaf_index[part.tensor_id]))
        if position < end:
            found.append((position, end, GARBAGE))
        return tier, tuple(found)


def uses_of(op: Op) -> list[Use]:
    """Return what the op uses, in the order of operands; of a copy what it reads, then writes."""
    if op.kind == "compute" or op.kind == "communicate":
        return [(o.tensor, o.slot, o.num_parts, o.version, o.mode) for o in op.operands]
    if op.kind == "copy":
        return [
            (op.tensor, op.source, op.num_parts, op.version, "read"),
            (op.tensor, op.destination, op.num_parts, op.version, "write"),
        ]
    return [(op.tensor, op.slot, None, op.version, "write" if op.kind == "feed" else "read")]
