"""Memory over time: which bytes are alive, by tier and role, in a pass of a timeline."""

from pydantic import NonNegativeInt

from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import require
from twinstream.schedule.node import Node
from twinstream.schedule.proof.accesses import AccessMap
from twinstream.schedule.proof.memory_cells import GARBAGE, MemoryCell, MemoryCells
from twinstream.schedule.tensors import Role, Tier
from twinstream.schedule.timeline import PassSpans


class MemorySample(Node):
    """Bytes of a tier alive from `start_ns` on, by role."""

    start_ns: NonNegativeInt
    bytes_by_role: dict[Role, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_role.values())


def slot_bytes_by_role(schedule: RankSchedule) -> dict[str, int]:
    """Return the bytes of all slots by role of what kernels or exchanges first have in them."""
    roles = {tensor.tensor_id: tensor.role for tensor in schedule.tensors}
    held: dict[str, str] = {}
    for op in schedule.ops:
        if op.kind in ("compute", "communicate"):
            for operand in op.operands:
                held.setdefault(operand.slot, roles[operand.tensor])
    found: dict[str, int] = {}
    for slot in schedule.slots:
        role = held.get(slot.slot_id, "activation")
        found[role] = found.get(role, 0) + slot.size_bytes
    return found


def memory_over_time(schedule: RankSchedule, spans: PassSpans, tier: Tier) -> list[MemorySample]:
    """Live bytes of a tier through one pass, a sample at every change.

    Content is alive from the start of the op that makes it until the end of the last op that
    touches it before its bytes are written again; what is carried, through the boundary.
    """
    require("tier", tier, Tier)
    changes: dict[int, dict[Role, int]] = {}
    for role, size_bytes, start_ns, end_ns in _lifetimes(schedule, spans, tier):
        for moment, change in ((start_ns, size_bytes), (end_ns, -size_bytes)):
            by_role = changes.setdefault(moment, {})
            by_role[role] = by_role.get(role, 0) + change
    alive: dict[Role, int] = {}
    samples: list[MemorySample] = []
    for moment in sorted(changes):
        for role, change in changes[moment].items():
            alive[role] = alive.get(role, 0) + change
        kept = {role: size for role, size in alive.items() if size}
        samples.append(MemorySample(start_ns=moment, bytes_by_role=kept))
    return samples


class _Life:
    """Content in a byte range: its role, and from when to when it was touched."""

    def __init__(self, role: Role, size_bytes: int, start_ns: int) -> None:
        self.role, self.size_bytes = role, size_bytes
        self.start_ns = self.end_ns = start_ns


def _lifetimes(
    schedule: RankSchedule, spans: PassSpans, tier: Tier
) -> list[tuple[Role, int, int, int]]:
    access_map = AccessMap(schedule.tensors, schedule.slots)
    if tier not in access_map.tiers:
        return []
    wanted = access_map.tiers.index(tier)
    roles = [access_map.tensors[leaf].role for leaf in access_map.leaves]
    first_ns, last_ns = min(spans.start_ns), max(spans.end_ns)
    memory, lives = MemoryCells(), list[_Life]()
    carried: set[tuple[int, int]] = set()

    def begin(start: int, end: int, role: Role | None, now_ns: int) -> None:
        number = GARBAGE
        if role is not None:
            number = len(lives)
            lives.append(_Life(role, end - start, now_ns))
        memory.replace(MemoryCell(start, end, number, 0, 0, -1))

    for item in schedule.carried:
        number, ranges = access_map.ranges(item.tensor, item.slot, None)
        for start, end, leaf in ranges if number == wanted else ():
            carried.add((start, end))
            begin(start, end, roles[leaf] if leaf != GARBAGE else None, first_ns)
    for i, op in enumerate(schedule.ops):
        for access in access_map.of(op):
            if access.tier != wanted:
                continue
            if access.mode in ("write", "scratch"):
                role = roles[access.leaf] if access.leaf != GARBAGE else None
                begin(access.start, access.end, role, spans.start_ns[i])
            for cell in memory.overlapping(access.start, access.end):
                if cell.leaf != GARBAGE:
                    lives[cell.leaf].end_ns = max(lives[cell.leaf].end_ns, spans.end_ns[i])
    for cell in memory.cells():
        if cell.leaf != GARBAGE and (cell.start, cell.end) in carried:
            lives[cell.leaf].end_ns = last_ns
    return [(life.role, life.size_bytes, life.start_ns, life.end_ns) for life in lives]
