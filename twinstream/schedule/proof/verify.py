"""Prove a schedule safe: right content at every access, no race, within the caps.

One walk over two consecutive passes in issue order. Content is interpreted in that order; it is
what every execution finds, because the walk also proves by vector clocks that any two accesses
to the same bytes, one of them a write, are ordered. Two passes suffice: an op of pass p precedes
itself in pass p + 1 on its stream, so what is ordered against the next pass is ordered against
all later ones. Of the second pass only those accesses are looked at that meet bytes as the first
one left them: what happens to bytes that a pass has written itself is the same in every pass.
A schedule that consumes is run for one pass, and walked once.
Linear in the number of accesses (and their byte-range look-ups, logarithmic).
"""

from collections.abc import Iterator
from itertools import pairwise

from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import require
from twinstream.schedule.ops import Op
from twinstream.schedule.proof.accesses import Access, AccessMap
from twinstream.schedule.proof.clocks import Clocks, StreamOrder, merge
from twinstream.schedule.proof.memory_cells import GARBAGE, MemoryCell, MemoryCells
from twinstream.schedule.proof.verify_layout import layout_violations
from twinstream.schedule.proof.verify_report import WalkReport
from twinstream.schedule.proof.violations import BadWait, UnsafeSchedule, Violation


def verify_rank(schedule: RankSchedule) -> list[Violation]:
    """Return all violations found; an empty list is a proof of safety.

    When slots, parts or waits are malformed, only those are reported: the walk needs them sound.
    """
    require("schedule", schedule, RankSchedule)
    access_map = AccessMap(schedule.tensors, schedule.slots)
    order = StreamOrder(schedule.ops)
    if malformed := [*layout_violations(schedule, access_map), *_wait_violations(schedule, order)]:
        return malformed
    return _Walk(schedule, access_map, order).run()


def require_safe_rank(schedule: RankSchedule) -> None:
    """Raise UnsafeSchedule unless `verify` finds nothing."""
    if found := verify_rank(schedule):
        raise UnsafeSchedule(found)


def _wait_violations(schedule: RankSchedule, order: StreamOrder) -> Iterator[Violation]:
    """Waits point backwards, to other streams, at ops that exist."""
    stream_of = order.stream_of
    circle: list[tuple[int, int]] | None = None
    for at, op in enumerate(schedule.ops):
        for wait, target in zip(op.waits, order.waits[at], strict=True):
            if target < 0:
                yield _bad_wait(op, wait, ", which is not in the schedule")
            elif target >= at:
                circle = _circle(order) if circle is None else circle
                why = ", which is not issued before it"
                if (at, target) in circle:
                    why += f", and neither ever starts: {_describe_cycle(schedule, order, circle)}"
                yield _bad_wait(op, wait, why)
            elif stream_of[target] == stream_of[at]:
                yield _bad_wait(op, wait, ", which is on the same stream")
        for wait, target in zip(op.waits_previous, order.waits_previous[at], strict=True):
            if target < 0:
                yield _bad_wait(op, wait, " of the pass before, which is not in the schedule")


def _circle(order: StreamOrder) -> list[tuple[int, int]]:
    """Pairs (op, what it cannot start before) around a circle of ops that never start, if any."""
    before = [[wait for wait in waits if wait >= 0] for waits in order.waits]
    for positions in order.positions_on:
        for earlier, later in pairwise(positions):
            before[later].append(earlier)
    after: list[list[int]] = [[] for _ in before]
    for later, found in enumerate(before):
        for earlier in found:
            after[earlier].append(later)
    missing = [len(found) for found in before]
    ready = [at for at, count in enumerate(missing) if not count]
    for at in ready:
        for later in after[at]:
            missing[later] -= 1
            if not missing[later]:
                ready.append(later)
    never = [at for at, count in enumerate(missing) if count]
    if not never:
        return []
    # every op left lacks one that is left, too: going back from any of them ends in a circle
    path = [never[0]]
    while path[-1] not in path[:-1]:
        path.append(next(earlier for earlier in before[path[-1]] if missing[earlier]))
    return list(pairwise(path[path.index(path[-1]) :]))


def _describe_cycle(
    schedule: RankSchedule, order: StreamOrder, circle: list[tuple[int, int]]
) -> str:
    """The circle from wait to wait; what follows one another on a stream is one leg."""
    legs: list[tuple[int, int, bool]] = []
    for op, earlier in circle:
        waits = earlier in order.waits[op]
        first = legs.pop()[0] if legs and not (waits or legs[-1][2]) else op
        legs.append((first, earlier, waits))
    ids = [op.op_id for op in schedule.ops]
    return ", ".join(
        f"'{ids[op]}' waits for '{ids[earlier]}'" if waits
        else f"'{ids[op]}' follows '{ids[earlier]}' on {order.names[order.stream_of[op]]}"
        for op, earlier, waits in legs
    )  # fmt: skip


def _bad_wait(op: Op, wait: str, why: str) -> Violation:
    return BadWait(f"op '{op.op_id}' waits for '{wait}'{why}", (op.op_id, wait))


class _Walk:
    def __init__(self, schedule: RankSchedule, access_map: AccessMap, order: StreamOrder) -> None:
        self.schedule = schedule
        self.map = access_map
        self.order = order
        self.clocks = Clocks(order)
        self.memory = [MemoryCells() for _ in access_map.tiers]
        self.latest = [0] * len(access_map.leaves)
        self.first_pass = True
        self.report = WalkReport(schedule.ops, access_map, order)
        self._carried = [
            (item, access_map.ranges(item.tensor, item.slot, None)) for item in schedule.carried
        ]

    def run(self) -> list[Violation]:
        self._fill_carried()
        exposed: dict[int, list[Access]] = {}
        for position, op in enumerate(self.schedule.ops):
            if found := self._visit(position, op, self.map.of(op)):
                exposed[position] = found
        self._cross_boundary()
        if not self.schedule.consumed:  # what consumes is run for one pass
            for position, op in enumerate(self.schedule.ops):
                self._visit(position, op, exposed.get(position, []))
        return self.report.violations

    def _visit(self, position: int, op: Op, accesses: list[Access]) -> list[Access]:
        """Check an op's accesses; return those that meet bytes this pass has not yet written."""
        clock = self._start(position)
        stream, index = self.order.stream_of[position], self.clocks.index(position)
        exposed: list[Access] = []
        for access in accesses:
            memory, mode = self.memory[access.tier], access.mode
            cell = memory.exactly(access.start, access.end)
            if cell is None or cell.writer_index < 0:  # as the pass before, or the fill, left them
                exposed.append(access)
            if mode == "read" or mode == "update":
                self._check_content(op, access, cell, clock)
            if mode == "read":
                if cell is not None:
                    cell.readers[stream] = index
                continue
            for old in memory.overlapping(access.start, access.end) if cell is None else (cell,):
                self._check_overwrite(op, access, old, clock)
            if cell is None:
                cell = memory.carve(access.start, access.end)
            # from here on only this write and what reads it have to be ordered against later ones:
            # that all before are over when it starts has just been shown
            cell.leaf, cell.version = self._made(op, access)
            cell.writer_stream, cell.writer_index = stream, index
            if cell.readers:
                cell.readers = {}
        self.clocks.complete(position, clock)
        return exposed

    def _start(self, position: int) -> list[int]:
        """The clock at which an op starts: its stream predecessor's and those it waits for."""
        clocks = self.clocks
        clock = clocks.predecessor(position)
        for wait in self.order.waits[position]:
            merge(clock, clocks.completed[wait])
        if not self.first_pass:
            for wait in self.order.waits_previous[position]:
                merge(clock, clocks.completed_previous[wait])
        return clock

    def _check_content(
        self, op: Op, access: Access, cell: MemoryCell | None, clock: list[int]
    ) -> None:
        if cell is None or cell.leaf != access.leaf or cell.version != access.version:
            there = self.memory[access.tier].overlapping(access.start, access.end)
            self.report.wrong_content(op, access, there)
        elif clock[cell.writer_stream] <= cell.writer_index:  # the write may still run
            self.report.read_too_early(op, access, cell)

    def _check_overwrite(self, op: Op, access: Access, cell: MemoryCell, clock: list[int]) -> None:
        # op i of stream s is over when clock[s] > i: write after write, then write after read
        if clock[cell.writer_stream] <= cell.writer_index:
            self.report.overwrite(op, access, (cell.writer_stream, cell.writer_index), "writes")
        for reader in cell.readers.items():
            if clock[reader[0]] <= reader[1]:
                self.report.overwrite(op, access, reader, "reads")

    def _made(self, op: Op, access: Access) -> tuple[int, int]:
        """The content an access leaves, after checking its version against the newest."""
        leaf, version, mode = access.leaf, access.version, access.mode
        if mode == "scratch":
            return GARBAGE, 0
        if op.kind == "copy":
            return leaf, version
        newest = self.latest[leaf]
        if mode == "update":
            made, ordered = version + 1, version == newest
        else:
            made, ordered = version, version >= max(1, newest)
        if not ordered and self.first_pass:  # versions are the same in every pass
            self.report.version_out_of_order(op, access, made, newest)
        if made > newest:
            self.latest[leaf] = made
        return leaf, made

    def _fill_carried(self) -> None:
        ranges_of = self.map.ranges
        consumed = [ranges_of(item.tensor, item.slot, None) for item in self.schedule.consumed]
        for tier, ranges in (*(found for _, found in self._carried), *consumed):
            for start, end, leaf in ranges:
                self.memory[tier].replace(MemoryCell(start, end, leaf, 0, 0, -1))

    def _cross_boundary(self) -> None:
        """Final versions in carried slots become version 0; all other content is dead."""
        kept: set[int] = set()
        for item, (tier, ranges) in self._carried:
            for start, end, leaf in ranges:
                if leaf == GARBAGE:
                    continue
                cell = self.memory[tier].exactly(start, end)
                # the induction over passes: what a pass finds at its begin, it leaves at its end
                if cell is None or (cell.leaf, cell.version) != (leaf, self.latest[leaf]):
                    self.report.carried_not_valid(item, leaf, self.latest[leaf])
                else:
                    cell.version = 0
                    kept.add(id(cell))
        for memory in self.memory:
            for cell in memory.cells():
                if id(cell) not in kept:
                    cell.leaf = GARBAGE
        self.first_pass = False
        self.clocks.next_pass()
        self.report.next_pass()
