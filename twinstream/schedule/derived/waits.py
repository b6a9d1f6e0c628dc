"""Derive the waits that a choice of slots and issue order implies."""

from twinstream.schedule.ops import Op
from twinstream.schedule.proof.accesses import AccessMap, uses_of
from twinstream.schedule.proof.clocks import Clocks, StreamOrder, merge
from twinstream.schedule.proof.memory_cells import GARBAGE, MemoryCell, MemoryCells
from twinstream.schedule.tensors import Slot, Tensor

_Range = tuple[int, int, int]  # tier, first and past-the-last byte
_Access = tuple[int, bool]  # number of a range, and whether it is only read


def derive_waits(
    ops: tuple[Op, ...], tensors: tuple[Tensor, ...], slots: tuple[Slot, ...]
) -> tuple[Op, ...]:
    """Return the ops with exactly the waits that order conflicting accesses, none redundant.

    Two accesses to the same bytes, one of them a write, must run in issue order. Within the body
    that gives `waits`, across the boundary `waits_previous`. A wait is left out when the stream
    predecessor or another wait implies it. Ops keep their order, slots and streams; waits they
    came with are replaced.
    """
    walk = _Walk(ops, AccessMap(tensors, slots))
    walk.first_pass()
    return tuple(
        [
            type(op).made_of(op, waits=waits, waits_previous=previous)
            for op, (waits, previous) in zip(ops, walk.next_pass(), strict=True)
        ]
    )


class _Walk:
    """Two passes: what an op needs of its own pass shows in the first, the rest in the second.

    Once bytes have been written in a pass, who touches exactly these depends on nothing before it.
    Accesses of which that cannot be said are `exposed`, and looked at again in the next pass.
    Bytes that all ops use as one range have a cell of their own; others are cut as they are used.
    """

    def __init__(self, ops: tuple[Op, ...], access_map: AccessMap) -> None:
        self.ops = ops
        self.order = StreamOrder(ops)
        self.clocks = Clocks(self.order)
        self.memory = [MemoryCells() for _ in access_map.tiers]
        self.ranges: list[_Range] = []
        self.accesses = self._accesses(access_map)
        self.own = _own_cells(self.ranges)
        self.needed: list[dict[int, int]] = []
        self.exposed: list[list[_Access]] = []

    def first_pass(self) -> None:
        """What is done when, and what ops need of this pass."""
        for position, accesses in enumerate(self.accesses):
            clock = self.clocks.predecessor(position)
            exposed: list[_Access] = []
            needed = self._needed(position, clock, accesses, exposed)
            self.needed.append(needed)
            self.exposed.append(exposed)
            for stream, index in needed.items():
                merge(clock, self._completion(stream, index))
            self.clocks.complete(position, clock)

    def next_pass(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """The waits of every op: on this pass, and on the one before."""
        self.clocks.next_pass()
        length, found = self.order.length, []
        for position, exposed in enumerate(self.exposed):
            clock = self.clocks.predecessor(position)
            needed = self._needed(position, clock, exposed, []) if exposed else {}
            for stream, index in self.needed[position].items():
                if (now := index + length[stream]) >= clock[stream]:
                    _need(needed, stream, now)
            found.append(self._chosen(needed, clock) if needed else ((), ()))
            self.clocks.complete(position, clock)
        return found

    def _accesses(self, access_map: AccessMap) -> list[list[_Access]]:
        """Of every op, reads first, so that a write over an op's own operand shows."""
        numbers: dict[_Range, int] = {}
        known: dict[tuple[str, str, int | None, bool], list[_Access]] = {}
        found = []
        for op in self.ops:
            reads: list[_Access] = []
            writes: list[_Access] = []
            for tensor, slot, num_parts, _, mode in uses_of(op):
                is_read = mode == "read"
                key = tensor, slot, num_parts, is_read
                accesses = known.get(key)
                if accesses is None:
                    tier, ranges = access_map.ranges(tensor, slot, num_parts)
                    accesses = known[key] = [
                        (numbers.setdefault((tier, start, end), len(numbers)), is_read)
                        for start, end, leaf in ranges
                        if leaf != GARBAGE or not is_read
                    ]
                if is_read:
                    reads += accesses
                else:
                    writes += accesses
            found.append(reads + writes)
        self.ranges = list(numbers)
        return found

    def _needed(
        self, position: int, clock: list[int], accesses: list[_Access], exposed: list[_Access]
    ) -> dict[int, int]:
        """By stream, the last op that conflicts and may not be done yet; the op goes on record.

        `exposed` gets the accesses that are.
        """
        stream, index = self.order.stream_of[position], self.clocks.index(position)
        needed: dict[int, int] = {}
        for access in accesses:
            number, is_read = access
            cell = self.own[number]
            if cell is None:
                self._cut(access, (stream, index), needed, exposed)
                continue
            if cell.writer_index < 0:
                exposed.append(access)
            elif cell.writer_index > needed.get(cell.writer_stream, -1):
                needed[cell.writer_stream] = cell.writer_index
            if is_read:
                cell.readers[stream] = index
                continue
            for reader_stream, reader_index in cell.readers.items():
                if reader_index > needed.get(reader_stream, -1):
                    needed[reader_stream] = reader_index
            cell.writer_stream, cell.writer_index, cell.readers = stream, index, {}
        if not needed:
            return needed
        return {s: i for s, i in needed.items() if s != stream and i >= clock[s]}

    def _cut(
        self, access: _Access, user: tuple[int, int], needed: dict[int, int],
        exposed: list[_Access],
    ) -> None:  # fmt: skip
        """The same of bytes that are also used in other ranges."""
        number, is_read = access
        tier, start, end = self.ranges[number]
        memory = self.memory[tier]
        found = memory.overlapping(start, end)
        if not _written(found, start, end):
            exposed.append(access)
        for cell in found:
            _need(needed, cell.writer_stream, cell.writer_index)
        if is_read:
            _record_read(memory, found, (start, end), user)
            return
        for cell in found:
            for reader_stream, reader_index in cell.readers.items():
                _need(needed, reader_stream, reader_index)
        memory.replace(MemoryCell(start, end, GARBAGE, 0, *user))

    def _chosen(
        self, needed: dict[int, int], clock: list[int]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Drop what another wait implies; take over what the kept ones know."""
        known = {stream: self._completion(stream, index) for stream, index in needed.items()}
        kept = [
            stream
            for stream, index in needed.items()
            if not any(other != stream and known[other][stream] > index for other in needed)
        ]
        waits: list[str] = []
        previous: list[str] = []
        for stream in sorted(kept):
            merge(clock, known[stream])
            position, from_previous = self._locate(stream, needed[stream])
            (previous if from_previous else waits).append(self.ops[position].op_id)
        return tuple(waits), tuple(previous)

    def _locate(self, stream: int, index: int) -> tuple[int, bool]:
        length = self.order.length[stream]
        current_pass = bool(self.clocks.completed_previous)
        position = self.order.positions_on[stream][index % length]
        return position, current_pass and index < length

    def _completion(self, stream: int, index: int) -> list[int]:
        position, from_previous = self._locate(stream, index)
        clocks = self.clocks.completed_previous if from_previous else self.clocks.completed
        return clocks[position]


def _own_cells(ranges: list[_Range]) -> list[MemoryCell | None]:
    """A cell for each range that no other one overlaps."""
    found: list[MemoryCell | None] = [None] * len(ranges)
    ends: dict[int, int] = {}  # by tier, past the last byte of all ranges so far
    last = -1
    for number in sorted(range(len(ranges)), key=ranges.__getitem__):
        tier, start, end = ranges[number]
        if start >= ends.get(tier, 0):
            found[number] = MemoryCell(start, end, GARBAGE, 0, 0, -1)
        else:
            found[last] = None
        ends[tier] = max(end, ends.get(tier, 0))
        last = number
    return found


def _written(found: list[MemoryCell], start: int, end: int) -> bool:
    """Whether exactly these bytes were written, and nothing has cut them since."""
    if len(found) != 1 or found[0].writer_index < 0:
        return False
    return (found[0].start, found[0].end) == (start, end)


def _record_read(
    memory: MemoryCells, found: list[MemoryCell], read: tuple[int, int], user: tuple[int, int]
) -> None:
    (position, end), (stream, index) = read, user
    for cell in [*found, MemoryCell(end, end, GARBAGE, 0, stream, -1)]:
        if position < cell.start:  # the initial fill, read before anything is written there
            unwritten = MemoryCell(position, cell.start, GARBAGE, 0, stream, -1)
            memory.replace(unwritten)
            unwritten.readers[stream] = index
        position = cell.end
    for cell in found:
        cell.readers[stream] = index


def _need(needed: dict[int, int], stream: int, index: int) -> None:
    if index > needed.get(stream, -1):
        needed[stream] = index
