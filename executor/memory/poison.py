"""Where content dies: the op that is surely the last to touch it."""

from dataclasses import dataclass, field

from twinstream.schedule.document import RankSchedule
from twinstream.schedule.proof.accesses import AccessMap
from twinstream.schedule.proof.clocks import Clocks, StreamOrder, merge
from twinstream.schedule.proof.memory_cells import GARBAGE, MemoryCell, MemoryCells


@dataclass
class _Content:
    leaf: str
    slot: str
    ops: list[int] = field(default_factory=list)


def dying_content(schedule: RankSchedule) -> dict[str, list[tuple[str, str]]]:
    """Return, by op id, the (tensor, slot) whose content nobody needs once that op has completed.

    Content dies when its bytes are written next, or at the end of a pass that does not carry it.
    The last op to touch it may poison it if all others that touched it have surely completed
    before that op starts; the next writer waits for that op anyway. Content that a pass starts
    with is left alone: ops of the pass before may still read it.
    """
    return _Walk(schedule).run()


class _Walk:
    def __init__(self, schedule: RankSchedule) -> None:
        self._schedule = schedule
        self._map = AccessMap(schedule.tensors, schedule.slots)
        self._order = StreamOrder(schedule.ops)
        self._memory = [MemoryCells() for _ in self._map.tiers]
        self._contents: list[_Content] = []
        self._starts: list[list[int]] = []
        self._found: dict[str, list[tuple[str, str]]] = {}

    def run(self) -> dict[str, list[tuple[str, str]]]:
        clocks = Clocks(self._order)
        position = {op.op_id: i for i, op in enumerate(self._schedule.ops)}
        for at, op in enumerate(self._schedule.ops):
            clock = clocks.predecessor(at)
            for wait in op.waits:
                merge(clock, clocks.completed[position[wait]])
            self._starts.append(clock)
            for access in self._map.of(op):
                memory = self._memory[access.tier]
                cells = memory.overlapping(access.start, access.end)
                alive = [cell.leaf for cell in cells if cell.leaf != GARBAGE]
                if access.mode in ("read", "update"):  # an update goes on with what is there
                    for number in alive:
                        self._contents[number].ops.append(at)
                    continue
                for number in alive:
                    self._close(number)
                new = GARBAGE
                if access.leaf != GARBAGE:
                    new = len(self._contents)
                    self._contents.append(
                        _Content(self._map.leaves[access.leaf], access.slot, [at])
                    )
                memory.replace(MemoryCell(access.start, access.end, new, 0, 0, -1))
            clocks.complete(at, clock)
        self._close_at_the_end()
        return self._found

    def _close_at_the_end(self) -> None:
        kept = set()
        for item in self._schedule.carried:
            tier, ranges = self._map.ranges(item.tensor, item.slot, None)
            kept |= {(tier, start, end) for start, end, _ in ranges}
        for tier, memory in enumerate(self._memory):
            for cell in memory.cells():
                if cell.leaf != GARBAGE and (tier, cell.start, cell.end) not in kept:
                    self._close(cell.leaf)

    def _close(self, number: int) -> None:
        content = self._contents[number]
        last = content.ops[-1]
        start = self._starts[last]
        for other in content.ops[:-1]:
            stream = self._order.stream_of[other]
            before = self._order.index_of[other] < start[stream]
            if other != last and not before and stream != self._order.stream_of[last]:
                return
        op_id = self._schedule.ops[last].op_id
        self._found.setdefault(op_id, []).append((content.leaf, content.slot))
