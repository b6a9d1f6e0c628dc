"""Which ops meet: those of the classes on a group's lines, and the two ends of a message.

What is found for classes holds for ranks. Where a line is sound, every rank of one of its classes
has a group that crosses the same classes, and every class that shares a coordinate with it on the
other axes is in the line. Where the ranks `shift` further than a class are exactly another class,
every rank of either has its partner in the other.
"""

from collections.abc import Iterator
from typing import NamedTuple

from twinstream.schedule.cluster.cells import ClassCells
from twinstream.schedule.cluster.communication import Communication, Communicator, Side
from twinstream.schedule.cluster.violations import (
    ClusterViolation,
    GroupNotSymmetric,
    SideMissing,
    SidesDiffer,
)

Meeting = tuple[tuple[int, int], ...]  # of sides: number of a class, place in its issue order


class End(NamedTuple):
    """A class, and all it says on one communicator."""

    number: int
    communicator: Communicator
    sides: list[Side]


class Meetings:
    """Finds all meetings; says what is wrong where sides do not fit. Axes must be known."""

    def __init__(self, cells: ClassCells, communications: list[Communication]) -> None:
        self.cells = cells
        self.communications = communications
        self.found: list[Meeting] = []
        self.violations: list[ClusterViolation] = []
        users: dict[Communicator, list[int]] = {}
        for number, communication in enumerate(communications):
            for communicator in communication.sides:
                users.setdefault(communicator, []).append(number)
        for communicator, numbers in users.items():
            if communicator.shift:
                self._messages(communicator, numbers)
            else:
                self._collectives(communicator, numbers)

    def _collectives(self, communicator: Communicator, numbers: list[int]) -> None:
        speaking = set(numbers)
        self._check_lines(communicator, speaking)
        for line in self.cells.lines(communicator.axes).values():
            if speaking.isdisjoint(line):
                continue
            self._meet([self._end(number, communicator) for number in line])

    def _end(self, number: int, communicator: Communicator) -> End:
        return End(number, communicator, self.communications[number].sides.get(communicator, []))

    def _check_lines(self, communicator: Communicator, speaking: set[int]) -> None:
        """No class shares a coordinate on the other axes with a line that it is not in."""
        for line, beside in self.cells.crossing_lines(communicator.axes):
            if not speaking.isdisjoint(line + beside):
                names = self.cells.names[line[0]], self.cells.names[beside[0]]
                text = (
                    f"{communicator} some ranks of class '{names[0]}' meet class '{names[1]}' and "
                    "others do not, or the other way round: their cells on the other axes overlap "
                    "and differ"
                )
                self.violations.append(GroupNotSymmetric(text, classes=names))

    def _messages(self, communicator: Communicator, numbers: list[int]) -> None:
        axis, size = communicator.axes[0], self.cells.mesh.length(communicator.axes[0])
        for number in numbers:
            end = self._end(number, communicator)
            partner = self.cells.shifted(number, axis, communicator.shift)
            name, op_id = self.cells.names[number], end.sides[0].op.op_id
            if communicator.shift % size == 0:
                text = (
                    f"op '{op_id}' of class '{name}' is a message to itself: shift "
                    f"{communicator.shift} is a multiple of the {size} ranks of axis '{axis}'"
                )
                self.violations.append(GroupNotSymmetric(text, (op_id,), classes=(name,)))
            elif partner is None:
                text = (
                    f"{communicator} the ranks that class '{name}' meets in op '{op_id}' are no "
                    "class: its cell, shifted, must be the cell of one class with equal cells on "
                    "the other axes"
                )
                self.violations.append(GroupNotSymmetric(text, (op_id,), classes=(name,)))
            else:
                other = self._end(partner, communicator.opposite)
                if communicator.name == "send" or not other.sides:  # else the sender has met it
                    self._meet([end, other])

    def _meet(self, ends: list[End]) -> None:
        """The k-th ops of all ends meet; the first that do not fit are reported, per end."""
        fullest = max(ends, key=lambda end: len(end.sides))
        before = len(self.violations)
        for end in ends:
            if len(end.sides) < len(fullest.sides):
                self.violations.append(self._missing(fullest, end))
            elif (difference := _first_difference(fullest, end)) is not None:
                self.violations.append(self._differ(fullest, end, difference))
        if len(self.violations) == before:
            columns = [[(end.number, side.position) for side in end.sides] for end in ends]
            self.found += zip(*columns, strict=True)

    def _missing(self, full: End, end: End) -> SideMissing:
        names = self.cells.names[full.number], self.cells.names[end.number]
        op_id = full.sides[len(end.sides)].op.op_id
        text = (
            f"class '{names[0]}' has {len(full.sides)} ops of {full.communicator}, and class "
            f"'{names[1]}', which they meet, has {len(end.sides)} of {end.communicator}: op "
            f"'{op_id}' of class '{names[0]}' is alone"
        )
        return SideMissing(text, (op_id,), classes=names)

    def _differ(self, one: End, other: End, at: int) -> SidesDiffer:
        names = self.cells.names[one.number], self.cells.names[other.number]
        sides = one.sides[at], other.sides[at]
        texts = [
            f"op '{side.op.op_id}' of class '{name}' ({claim})"
            for name, side, claim in zip(names, sides, _differing_claims(*sides), strict=True)
        ]
        ops = sides[0].op.op_id, sides[1].op.op_id
        return SidesDiffer(f"{texts[0]} meets {texts[1]}", ops, classes=names)


def _first_difference(one: End, other: End) -> int | None:
    if one.sides is other.sides:
        return None
    for at, (a, b) in enumerate(zip(one.sides, other.sides, strict=False)):
        if a.operands != b.operands or a.operation != b.operation:
            return at
    return None


def _differing_claims(one: Side, other: Side) -> Iterator[str]:
    """The first thing that each says otherwise."""
    for a, b in zip(one.operation, other.operation, strict=False):
        if a != b:
            return iter((a, b))
    for x, y in zip(one.operands, other.operands, strict=False):
        if x != y:
            return iter([f"version {v} of '{t}', {size} bytes of {d}" for t, v, d, size in (x, y)])
    return iter([f"{len(side.operands)} operands" for side in (one, other)])
