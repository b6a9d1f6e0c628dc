"""The content of each byte range of one tier: who wrote it, and who has read it since."""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

GARBAGE = -1


@dataclass(slots=True)
class MemoryCell:
    """A byte range with one history: content (leaf index, version), writer, and readers.

    Writer and readers are (stream, index of the op on that stream); of the readers on a stream
    only the latest is kept, since a stream runs in order. Writer index -1 is the initial fill.
    """

    start: int
    end: int
    leaf: int
    version: int
    writer_stream: int
    writer_index: int
    readers: dict[int, int] = field(default_factory=dict)


class MemoryCells:
    """Disjoint cells of one tier, ordered by address."""

    def __init__(self) -> None:
        self._by_start: dict[int, MemoryCell] = {}
        self._starts: list[int] = []

    def exactly(self, start: int, end: int) -> MemoryCell | None:
        """The cell of exactly these bytes, if nothing else has cut or covered it."""
        cell = self._by_start.get(start)
        return cell if cell is not None and cell.end == end else None

    def overlapping(self, start: int, end: int) -> list[MemoryCell]:
        """Every cell that shares a byte with [start, end)."""
        cell = self._by_start.get(start)
        if cell is not None and cell.end == end:
            return [cell]
        low = max(0, bisect_right(self._starts, start) - 1)
        high = bisect_left(self._starts, end)
        cells = [self._by_start[s] for s in self._starts[low:high]]
        return [c for c in cells if c.end > start]

    def replace(self, new: MemoryCell) -> None:
        """Put a new history over its bytes; cells it cuts keep theirs as garbage."""
        start, end = new.start, new.end
        if self.exactly(start, end) is not None:
            self._by_start[start] = new
            return
        for cell in self.overlapping(start, end):
            self._remove(cell)
            if cell.start < start:
                self._insert(_fragment(cell, cell.start, start))
            if cell.end > end:
                self._insert(_fragment(cell, end, cell.end))
        self._insert(new)

    def carve(self, start: int, end: int) -> MemoryCell:
        """One new cell of exactly these bytes, to be filled in by the caller."""
        new = MemoryCell(start, end, GARBAGE, 0, 0, -1)
        self.replace(new)
        return new

    def cells(self) -> list[MemoryCell]:
        return list(self._by_start.values())

    def _remove(self, cell: MemoryCell) -> None:
        del self._by_start[cell.start]
        del self._starts[bisect_left(self._starts, cell.start)]

    def _insert(self, cell: MemoryCell) -> None:
        self._by_start[cell.start] = cell
        insort(self._starts, cell.start)


def _fragment(cell: MemoryCell, start: int, end: int) -> MemoryCell:
    # half a tensor is no content, but its writer and readers still have to be over before a write
    return MemoryCell(
        start, end, GARBAGE, 0, cell.writer_stream, cell.writer_index, dict(cell.readers)
    )
