"""Derive the waits that a choice of slots and issue order implies."""

from twinstream.schedule.ops import Op
from twinstream.schedule.proof.accesses import Access, AccessMap
from twinstream.schedule.proof.clocks import Clocks, StreamOrder, merge
from twinstream.schedule.proof.memory_cells import GARBAGE, MemoryCell, MemoryCells
from twinstream.schedule.tensors import Slot, Tensor


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
        op.model_copy(update={"waits": waits, "waits_previous": previous})
        for op, (waits, previous) in zip(ops, walk.next_pass(), strict=True)
    )


class _Walk:
    """Two passes: what an op needs of its own pass shows in the first, the rest in the second.

    Once bytes have been written in a pass, who touches exactly these depends on nothing before it.
    Accesses of which that cannot be said are `exposed`, and looked at again in the next pass.
    """

    def __init__(self, ops: tuple[Op, ...], access_map: AccessMap) -> None:
        self.ops = ops
        self.order = StreamOrder(ops)
        self.clocks = Clocks(self.order)
        self.memory = [MemoryCells() for _ in access_map.tiers]
        self.accesses = [access_map.of(op) for op in ops]
        self.needed: list[dict[int, int]] = []
        self.exposed: list[list[Access]] = []

    def first_pass(self) -> None:
        """What is done when, and what ops need of this pass."""
        for position in range(len(self.ops)):
            clock = self.clocks.predecessor(position)
            exposed: list[Access] = []
            needed = self._needed(position, clock, self.accesses[position], exposed)
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
            found.append(self._chosen(needed, clock))
            self.clocks.complete(position, clock)
        return found

    def _needed(
        self, position: int, clock: list[int], accesses: list[Access], exposed: list[Access]
    ) -> dict[int, int]:
        """By stream, the last op that conflicts and may not be done yet; the op goes on record.

        `exposed` gets the accesses that are.
        """
        stream, index = self.order.stream_of[position], self.clocks.index(position)
        needed: dict[int, int] = {}
        for access in accesses:
            memory = self.memory[access.tier]
            found = memory.overlapping(access.start, access.end)
            if not _written(found, access):
                exposed.append(access)
            for cell in found:
                _need(needed, cell.writer_stream, cell.writer_index)
            if access.mode == "read":
                _record_read(memory, found, access, stream, index)
                continue
            for cell in found:
                for reader_stream, reader_index in cell.readers.items():
                    _need(needed, reader_stream, reader_index)
            memory.replace(MemoryCell(access.start, access.end, GARBAGE, 0, stream, index))
        return {s: i for s, i in needed.items() if s != stream and i >= clock[s]}

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


def _written(found: list[MemoryCell], access: Access) -> bool:
    """Whether exactly these bytes were written, and nothing has cut them since."""
    if len(found) != 1 or found[0].writer_index < 0:
        return False
    return (found[0].start, found[0].end) == (access.start, access.end)


def _record_read(
    memory: MemoryCells, found: list[MemoryCell], access: Access, stream: int, index: int
) -> None:
    position = access.start
    for cell in [*found, MemoryCell(access.end, access.end, GARBAGE, 0, stream, -1)]:
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
