"""Prove a schedule safe: right content at every access, no race, within the caps.

One walk over two consecutive passes in issue order. Content is interpreted in that order; it is
what every execution finds, because the walk also proves by vector clocks that any two accesses
to the same bytes, one of them a write, are ordered. Two passes suffice: an op of pass p precedes
itself in pass p + 1 on its stream, so what is ordered against the next pass is ordered against
all later ones. Linear in the number of accesses (and their byte-range look-ups, logarithmic).
"""

from twinstream.schedule.accesses import Access, AccessMap
from twinstream.schedule.clocks import Clocks, StreamOrder, merge
from twinstream.schedule.document import Schedule
from twinstream.schedule.memory_cells import GARBAGE, Cell, MemoryCells
from twinstream.schedule.ops import Copy, Op
from twinstream.schedule.verify_layout import layout_violations
from twinstream.schedule.violations import (
    BadWait,
    CarriedNotValid,
    OperandsOverlap,
    OverwriteTooEarly,
    ReadTooEarly,
    UnsafeSchedule,
    VersionOutOfOrder,
    Violation,
    WrongContent,
)


def verify(schedule: Schedule) -> list[Violation]:
    """All violations found; an empty list is a proof of safety.

    When slots, parts or waits are malformed, only those are reported: the walk needs them sound.
    """
    access_map = AccessMap(schedule.tensors, schedule.slots)
    malformed = layout_violations(schedule, access_map) + _wait_violations(schedule)
    if malformed:
        return malformed
    walk = _Walk(schedule, access_map)
    walk.run()
    return walk.violations


def require_safe(schedule: Schedule) -> None:
    """Raise UnsafeSchedule unless `verify` finds nothing."""
    if found := verify(schedule):
        raise UnsafeSchedule(found)


def _wait_violations(schedule: Schedule) -> list[Violation]:
    found: list[Violation] = []
    streams = {op.op_id: op.stream for op in schedule.ops}
    issued: set[str] = set()
    for op in schedule.ops:
        for wait in op.waits:
            if wait not in issued or streams[wait] == op.stream:
                why = (
                    "which is not in the schedule" if wait not in streams
                    else "which is issued later" if wait not in issued
                    else "which is on the same stream"
                )  # fmt: skip
                found.append(BadWait(f"op '{op.op_id}' waits for '{wait}', {why}", (op.op_id,)))
        for wait in op.waits_previous:
            if wait not in streams:
                found.append(
                    BadWait(
                        f"op '{op.op_id}' waits for '{wait}' of the previous pass, which is not "
                        "in the schedule",
                        (op.op_id,),
                    )
                )
        issued.add(op.op_id)
    return found


class _Walk:
    def __init__(self, schedule: Schedule, access_map: AccessMap) -> None:
        self.schedule = schedule
        self.map = access_map
        self.position = {op.op_id: i for i, op in enumerate(schedule.ops)}
        self.order = StreamOrder(schedule.ops)
        self.clocks = Clocks(self.order)
        self.memory = [MemoryCells() for _ in access_map.tiers]
        self.latest = [0] * len(access_map.leaves)
        self.violations: list[Violation] = []
        self._reported: set[tuple[type, str, str, str]] = set()
        self._accesses = [access_map.of(op) for op in schedule.ops]
        self._op_on: list[list[str]] = [[] for _ in self.order.names]
        for position, op in enumerate(schedule.ops):
            self._op_on[self.order.stream_of[position]].append(op.op_id)

    def run(self) -> None:
        self._fill_carried()
        for second in (False, True):
            if second:
                self._check_carried()
                self._cross_boundary()
            for position, op in enumerate(self.schedule.ops):
                self._visit(position, op)

    def _visit(self, position: int, op: Op) -> None:
        clock = self.clocks.predecessor(position)
        for wait in op.waits:
            merge(clock, self.clocks.completed[self.position[wait]])
        if op.waits_previous and self.clocks.completed_previous:
            for wait in op.waits_previous:
                merge(clock, self.clocks.completed_previous[self.position[wait]])
        stream, index = self.order.stream_of[position], self.clocks.index(position)
        for access in self._accesses[position]:
            mode = access.mode
            if mode == "read":
                self._read(op, access, clock, stream, index)
                continue
            if mode == "update":
                self._read(op, access, clock, stream, index, updates=True)
            self._write(op, access, clock, stream, index)
        self.clocks.complete(position, clock)

    def _read(
        self, op: Op, access: Access, clock: list[int], stream: int, index: int,
        *, updates: bool = False,
    ) -> None:  # fmt: skip
        cell = self.memory[access.tier].find(access.start, access.end, access.leaf, access.version)
        if cell is None:
            self._report_wrong_content(op, access)
        elif clock[cell.writer_stream] <= cell.writer_index:
            maker = self._name(cell.writer_stream, cell.writer_index)
            if maker != op.op_id:
                self._report(
                    ReadTooEarly,
                    f"op '{op.op_id}' reads {self._what(access)} in slot '{access.slot}' without "
                    f"waiting for op '{maker}', which makes it",
                    (op.op_id, maker), access,
                )  # fmt: skip
        if cell is not None and not updates:
            cell.readers[stream] = index

    def _write(self, op: Op, access: Access, clock: list[int], stream: int, index: int) -> None:
        memory = self.memory[access.tier]
        for cell in memory.overlapping(access.start, access.end):
            if clock[cell.writer_stream] <= cell.writer_index:
                self._report_overwrite(op, access, cell.writer_stream, cell.writer_index, "writes")
            for reader_stream, reader_index in cell.readers.items():
                if clock[reader_stream] <= reader_index:
                    self._report_overwrite(op, access, reader_stream, reader_index, "reads")
        leaf, version = self._made(op, access)
        memory.replace(Cell(access.start, access.end, leaf, version, stream, index))

    def _made(self, op: Op, access: Access) -> tuple[int, int]:
        """The content an access leaves, after checking its version against the newest."""
        if access.mode == "scratch":
            return GARBAGE, 0
        newest = self.latest[access.leaf]
        if access.mode == "update":
            made, ordered = access.version + 1, access.version == newest
        elif isinstance(op, Copy):
            return access.leaf, access.version
        else:
            made, ordered = access.version, access.version >= max(1, newest)
        if not ordered:
            self._report(
                VersionOutOfOrder,
                f"op '{op.op_id}' makes version {made} of '{self.map.leaves[access.leaf]}', "
                f"whose newest version is {newest}",
                (op.op_id,), access,
            )  # fmt: skip
        self.latest[access.leaf] = max(newest, made)
        return access.leaf, made

    def _fill_carried(self) -> None:
        for item in self.schedule.carried:
            tier, ranges = self.map.ranges(item.tensor, item.slot, None)
            for start, end, leaf in ranges:
                for cell in self.memory[tier].overlapping(start, end):
                    if cell.leaf != GARBAGE:
                        other = self.map.leaves[cell.leaf]
                        self._add(CarriedNotValid(
                            f"carried tensors '{item.tensor}' and '{other}' share bytes at the "
                            "boundary", (), item.tensor, item.slot,
                        ))  # fmt: skip
                self.memory[tier].replace(Cell(start, end, leaf, 0, 0, -1))

    def _check_carried(self) -> None:
        for item in self.schedule.carried:
            tier, ranges = self.map.ranges(item.tensor, item.slot, None)
            for start, end, leaf in ranges:
                if leaf == GARBAGE:
                    continue
                final = self.latest[leaf]
                if self.memory[tier].find(start, end, leaf, final) is None:
                    self._add(CarriedNotValid(
                        f"slot '{item.slot}' does not hold the final version {final} of "
                        f"'{self.map.leaves[leaf]}' when the pass ends, though it is carried",
                        (), item.tensor, item.slot,
                    ))  # fmt: skip

    def _cross_boundary(self) -> None:
        """Final versions in carried slots become version 0; all other content is dead."""
        kept: set[int] = set()
        for item in self.schedule.carried:
            tier, ranges = self.map.ranges(item.tensor, item.slot, None)
            for start, end, leaf in ranges:
                if leaf == GARBAGE:
                    continue
                cell = self.memory[tier].find(start, end, leaf, self.latest[leaf])
                if cell is not None:
                    cell.version = 0
                    kept.add(id(cell))
        for memory in self.memory:
            for cell in memory.cells():
                if id(cell) not in kept:
                    cell.leaf = GARBAGE
        self.latest = [0] * len(self.latest)
        self.clocks.next_pass()

    def _report_wrong_content(self, op: Op, access: Access) -> None:
        memory = self.memory[access.tier]
        there = [
            f"version {c.version} of '{self.map.leaves[c.leaf]}'"
            for c in memory.overlapping(access.start, access.end)
            if c.leaf != GARBAGE
        ]
        held = f"it holds {', '.join(there[:2])}" if there else "nothing valid is there"
        self._report(
            WrongContent,
            f"op '{op.op_id}' needs {self._what(access)} in slot '{access.slot}', but {held}",
            (op.op_id,), access,
        )  # fmt: skip

    def _report_overwrite(self, op: Op, access: Access, stream: int, index: int, does: str) -> None:
        other = self._name(stream, index)
        where = f"slot '{access.slot}' ({access.start} to {access.end} of {self._tier(access)})"
        if other == op.op_id and stream == self.order.stream_of[self.position[op.op_id]]:
            kind: type[Violation] = OperandsOverlap
            text = f"op '{op.op_id}' writes {where} as '{access.tensor}' and {does} it as another"
        else:
            kind = OverwriteTooEarly
            text = (
                f"op '{op.op_id}' writes '{access.tensor}' over {where} without waiting for op "
                f"'{other}', which {does} there"
            )
        self._report(kind, text, (op.op_id, other), access)

    def _report(
        self, kind: type[Violation], message: str, ops: tuple[str, ...], access: Access
    ) -> None:
        key = (kind, ops[0], ops[-1], access.slot)
        if key not in self._reported:
            self._reported.add(key)
            self._add(kind(message, ops, access.tensor, access.slot))

    def _add(self, violation: Violation) -> None:
        self.violations.append(violation)

    def _name(self, stream: int, index: int) -> str:
        names = self._op_on[stream]
        return names[index % len(names)]

    def _tier(self, access: Access) -> str:
        return str(self.map.tiers[access.tier])

    def _what(self, access: Access) -> str:
        return f"version {access.version} of '{self.map.leaves[access.leaf]}'"
