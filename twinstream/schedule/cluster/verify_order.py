"""Is the order of a cluster's schedule one of exactly what meets, and each class's own?"""

from collections.abc import Iterator

from twinstream.schedule.cluster.cells import ClassCells
from twinstream.schedule.cluster.communication import Communication
from twinstream.schedule.cluster.meetings import Meeting
from twinstream.schedule.cluster.violations import OrderWrong
from twinstream.schedule.document import Exchange


class OrderCheck:
    """One walk over the exchanges, keeping how far every class has come."""

    def __init__(
        self, cells: ClassCells, communications: list[Communication], meetings: list[Meeting]
    ) -> None:
        self.names = cells.names
        self.communications = communications
        self.meetings = meetings
        self._number = {name: number for number, name in enumerate(cells.names)}
        self._meeting = {side: at for at, sides in enumerate(meetings) for side in sides}
        self._given = [False] * len(meetings)
        self._latest = [-1] * len(communications)

    def run(self, order: tuple[Exchange, ...]) -> Iterator[OrderWrong]:
        """Reports every exchange that is none, and of each class the first issued too late."""
        late: set[int] = set()
        for at, exchange in enumerate(order):
            meeting = self._of(at, exchange)
            if isinstance(meeting, OrderWrong):
                yield meeting
                continue
            places: dict[int, list[int]] = {}
            for number, position in meeting:
                places.setdefault(number, []).append(position)
            for number, positions in places.items():
                if min(positions) < self._latest[number] and number not in late:
                    late.add(number)
                    yield self._issued_before(at, number, min(positions))
                self._latest[number] = max(*positions, self._latest[number])
        for given, meeting in zip(self._given, self.meetings, strict=True):
            if not given:
                yield self._violation(f"{self._text(meeting)} is in no exchange", meeting)

    def _of(self, at: int, exchange: Exchange) -> Meeting | OrderWrong:
        """The meeting that an exchange is."""
        sides = []
        for name, op_id in exchange.sides:
            number = self._number.get(name)
            position = None if number is None else self.communications[number].position.get(op_id)
            if number is None or position is None or (number, position) not in self._meeting:
                text = (
                    f"exchange {at} has side '{op_id}' of class '{name}', which is no communication"
                )
                return OrderWrong(text, (op_id,), classes=(name,))
            sides.append((number, position))
        index = self._meeting[sides[0]]
        meeting = self.meetings[index]
        if sorted(sides) != sorted(meeting):
            text = f"exchange {at} has {self._text(tuple(sides))}, what meets is"
            return self._violation(f"{text} {self._text(meeting)}", meeting)
        if self._given[index]:
            return self._violation(f"exchange {at} is there twice: {self._text(meeting)}", meeting)
        self._given[index] = True
        return meeting

    def _issued_before(self, at: int, number: int, position: int) -> OrderWrong:
        ops = self.communications[number].schedule.ops
        here, before, name = (
            ops[position].op_id,
            ops[self._latest[number]].op_id,
            self.names[number],
        )
        text = (
            f"exchange {at} has op '{here}' of class '{name}' after an exchange with its op "
            f"'{before}', which the class issues later"
        )
        return OrderWrong(text, (here, before), classes=(name,))

    def _violation(self, text: str, meeting: Meeting) -> OrderWrong:
        ops = tuple(self.communications[n].schedule.ops[position].op_id for n, position in meeting)
        return OrderWrong(text, ops, classes=tuple(self.names[number] for number, _ in meeting))

    def _text(self, sides: Meeting) -> str:
        shown = [
            f"{self.names[number]}/{self.communications[number].schedule.ops[position].op_id}"
            for number, position in sides[:4]
        ]
        return " = ".join(shown) + (f" = ... ({len(sides)} sides)" if len(sides) > 4 else "")
