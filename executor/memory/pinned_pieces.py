"""Where the pinned arena may be cut, so that no copy crosses the end of a piece."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Communicate, Compute, Copy
from twinstream.schedule.proof.accesses import AccessMap
from twinstream.schedule.sizes import gib
from twinstream.schedule.tensors import HOST

MAX_PIECE_BYTES = 64 * 2**30
ALIGNMENT_BYTES = HOST.alignment_bytes


class NoBoundaryError(TwinstreamError):
    """The host arena cannot be pinned in pieces of the size that the driver takes."""


@dataclass(frozen=True, order=True)
class HostRange:
    """Bytes of the host arena that something uses in one go, and the slot they lie in."""

    start: int
    end: int
    slot: str


def host_ranges(schedule: RankSchedule) -> list[HostRange]:
    """Return the ranges of the host arena that copies, the host and carried state use, sorted."""
    access_map = AccessMap(schedule.tensors, schedule.slots)
    uses: set[tuple[str, str, int | None]] = {(c.tensor, c.slot, None) for c in schedule.carried}
    for op in schedule.ops:
        if isinstance(op, Copy):
            uses |= {(op.tensor, slot, op.num_parts) for slot in (op.source, op.destination)}
        elif isinstance(op, Compute | Communicate):
            uses |= {(o.tensor, o.slot, o.num_parts) for o in op.operands}
        else:
            uses.add((op.tensor, op.slot, None))
    return sorted(
        HostRange(*access_map.address(tensor, slot, num_parts), slot)
        for tensor, slot, num_parts in uses
        if access_map.slots[slot].tier == HOST
    )


def piece_ends(
    size_bytes: int, ranges: Sequence[HostRange], max_bytes: int = MAX_PIECE_BYTES
) -> list[int]:
    """Ends of as few pieces as can be, each at most `max_bytes`, that no range reaches over.

    The last is `size_bytes`, the others are multiples of the alignment. Every piece is as long as
    it can be, which makes them fewest.

    Raises:
        NoBoundaryError: more than `max_bytes` hang together.
    """
    blocks = _blocks(sorted(ranges))
    ends: list[int] = []
    start = 0
    while size_bytes - start > max_bytes:
        cut = (start + max_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        for block in blocks:
            if block.start < cut < block.end:
                cut = block.start
                break
        if cut <= start:
            raise _no_boundary(block, max_bytes)
        ends.append(cut)
        start = cut
    return [*ends, size_bytes]


@dataclass
class _Block:
    """Ranges that hang together, from the first's start to the last end, rounded outwards."""

    start: int
    end: int
    first_slot: str
    last_slot: str


def _blocks(ranges: Sequence[HostRange]) -> list[_Block]:
    blocks: list[_Block] = []
    for found in ranges:
        start = found.start // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        end = -(-found.end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if blocks and start < blocks[-1].end:
            blocks[-1].end = max(blocks[-1].end, end)
            blocks[-1].last_slot = found.slot
        else:
            blocks.append(_Block(start, end, found.slot, found.slot))
    return blocks


def _no_boundary(block: _Block, max_bytes: int) -> NoBoundaryError:
    return NoBoundaryError(
        f"the host arena cannot be pinned: the driver is given pieces of at most {gib(max_bytes)}, "
        f"and host slots '{block.first_slot}' to '{block.last_slot}' hang together over "
        f"{gib(block.end - block.start)}; plan with another --host-mem, or fewer tokens a round"
    )
