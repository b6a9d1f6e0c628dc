"""Classes of ranks cut into smaller ones, down to single ranks: the same schedule, said finer."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from twinstream.schedule.document import Exchange, Mesh, RankClass, RankSchedule, Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Communicate

Cells = Mapping[str, Sequence[Sequence[int]]]
_Place = tuple[tuple[int, ...], ...]  # a cell on each axis of the mesh
_Sides = list[tuple["_Part", str]]


class SplitError(TwinstreamError):
    """Cells that classes of ranks cannot be cut into."""


def split(schedule: Schedule, cells: Cells) -> Schedule:
    """The same with a class for each product of cells: `{"dp": ((0,), (1, 2, 3))}`.

    Classes share the schedule of the class that they come from. Where a ring along an axis is cut,
    every rank but one has a variant of it that issues each recv before the send that it was issued
    after: in one order of all exchanges somebody has to send first and somebody to receive.

    Raises:
        SplitError: cells do not make up their axis, or a message leads from one cell into several.
    """
    for axis, parts in cells.items():
        _require_partition(schedule.mesh, axis, parts)
    splitter = _Splitter(schedule, cells)
    order = [Exchange.made(sides=sides) for one in schedule.order for sides in splitter.sides(one)]
    classes, schedules = splitter.classes()
    update = {"classes": classes, "schedules": schedules, "order": tuple(order)}
    return schedule.model_copy(update=update)


def expanded(schedule: Schedule) -> Schedule:
    """The same with a class for every rank."""
    return split(schedule, {axis.name: _singles(axis.size) for axis in schedule.mesh.axes})


def with_straggler(schedule: Schedule, rank: int) -> tuple[Schedule, str]:
    """The same with a class of that rank alone, and the name of it.

    Every axis is cut into the rank's coordinate and all others, or, where messages go along it,
    into single coordinates: ranks that meet the straggler are not like those that do not.
    """
    mesh, place = schedule.mesh, schedule.mesh.coordinates(rank)
    spoken = {axis for part in schedule.schedules.values() for axis in _message_axes(part)}
    cells: dict[str, Sequence[Sequence[int]]] = {}
    for axis in mesh.axes:
        here = place[axis.name]
        others = tuple(i for i in range(axis.size) if i != here)
        if axis.name in spoken:
            cells[axis.name] = _singles(axis.size)
        elif others:
            cells[axis.name] = ((here,), others)
    cut = split(schedule, cells)
    (name,) = [
        one.name
        for one in cut.classes
        if all(here in one.cell(axis, mesh.length(axis)) for axis, here in place.items())
    ]
    return cut, name


class _Part(NamedTuple):
    """A class to be, by the number of the class that it is a part of and its cells."""

    number: int
    place: _Place


class _Splitter:
    """Cuts exchange after exchange, and notes who has to receive first."""

    def __init__(self, schedule: Schedule, cells: Cells) -> None:
        self._schedule, self._mesh = schedule, schedule.mesh
        self._number = {one.name: number for number, one in enumerate(schedule.classes)}
        self._parts = [_parts(schedule.mesh, one, cells) for one in schedule.classes]
        self._place_of = {
            _Part(number, place): name
            for number, parts in enumerate(self._parts)
            for place, name in parts.items()
        }
        self._ops = {
            name: {op.op_id: (at, op) for at, op in enumerate(part.ops) if op.kind == "communicate"}
            for name, part in schedule.schedules.items()
        }
        self._swapped: dict[_Part, list[int]] = {}

    def sides(self, exchange: Exchange) -> Iterator[tuple[tuple[str, str], ...]]:
        """Sides of the exchanges that one becomes."""
        sides = [(self._number[name], op_id) for name, op_id in exchange.sides]
        first = self._op(*sides[0])[1]
        meetings = self._messages(sides) if first.shift else self._collectives(sides, first.axes)
        for meeting in meetings:
            yield tuple([(self._place_of[part], op_id) for part, op_id in meeting])

    def classes(self) -> tuple[tuple[RankClass, ...], dict[str, RankSchedule]]:
        """All classes, and their schedules by name."""
        found, schedules = [], {}
        for part, name in self._place_of.items():
            old = self._schedule.classes[part.number]
            known, swapped = old.schedule, self._swapped.get(part)
            if swapped and f"{known}, receiving first" not in schedules:
                variant = _receiving_first(self._schedule.of(old), swapped)
                schedules[f"{known}, receiving first"] = variant
            elif not swapped:
                schedules[known] = self._schedule.of(old)
            cells = {
                axis.name: cell
                for axis, cell in zip(self._mesh.axes, part.place, strict=True)
                if len(cell) < axis.size
            }
            used = f"{known}, receiving first" if swapped else known
            found.append(RankClass(name=name, schedule=used, cells=cells))
        return tuple(found), schedules

    def _op(self, number: int, op_id: str) -> tuple[int, Communicate]:
        return self._ops[self._schedule.classes[number].schedule][op_id]

    def _collectives(self, sides: list[tuple[int, str]], axes: tuple[str, ...]) -> list[_Sides]:
        """Those meet whose cells on all other axes are equal."""
        others = [at for at, axis in enumerate(self._mesh.axes) if axis.name not in axes]
        found: dict[_Place, _Sides] = {}
        for number, op_id in sides:
            for place in self._parts[number]:
                key = tuple([place[at] for at in others])
                found.setdefault(key, []).append((_Part(number, place), op_id))
        return list(found.values())

    def _messages(self, sides: list[tuple[int, str]]) -> list[_Sides]:
        """Every sender meets the ranks that its cell is shifted to; rings in their order."""
        (sender, sent) = next(s for s in sides if self._op(*s)[1].collective == "send")
        (receiver, received) = next(s for s in sides if self._op(*s)[1].collective == "recv")
        op = self._op(sender, sent)[1]
        at, size = self._mesh.names.index(op.axes[0]), self._mesh.length(op.axes[0])
        found: list[_Sides] = []
        left = dict.fromkeys(self._parts[sender])
        while left:
            begun = place = next(iter(left))
            while place in left:
                del left[place]
                cell = tuple(sorted((i + op.shift) % size for i in place[at]))
                target = (*place[:at], cell, *place[at + 1 :])
                if target not in self._parts[receiver]:
                    raise SplitError(
                        f"op '{sent}' of class '{self._place_of[_Part(sender, place)]}' sends by "
                        f"{op.shift} along axis '{op.axes[0]}', to ranks that are no class: cut "
                        "that axis into single coordinates, or not at all"
                    )
                found.append([(_Part(sender, place), sent), (_Part(receiver, target), received)])
                place = target
                if sender == receiver and target != begun:
                    self._swapped.setdefault(_Part(receiver, target), []).append(
                        self._adjacent(sender, sent, received)
                    )
        return found

    def _adjacent(self, number: int, sent: str, received: str) -> int:
        """Where the send is that the recv follows."""
        position, behind = self._op(number, sent)[0], self._op(number, received)[0]
        assert behind == position + 1, f"'{received}' is not issued right after '{sent}'"
        return position


def _receiving_first(schedule: RankSchedule, positions: list[int]) -> RankSchedule:
    """The ops at these positions, and those after them, change places."""
    ops = list(schedule.ops)
    for at in positions:
        ops[at], ops[at + 1] = ops[at + 1], ops[at]
    return schedule.model_copy(update={"ops": tuple(ops)})


def _parts(mesh: Mesh, one: RankClass, cells: Cells) -> dict[_Place, str]:
    """The places that a class is cut into, each with its name."""
    by_axis: list[list[tuple[tuple[int, ...], str]]] = []
    for axis in mesh.axes:
        own = one.cell(axis.name, axis.size)
        wanted = [tuple(i for i in own if i in cell) for cell in cells.get(axis.name, (own,))]
        cut = [cell for cell in wanted if cell]
        by_axis.append([(c, f", {axis.name} {_shown(c)}" if len(cut) > 1 else "") for c in cut])
    return {
        tuple([cell for cell, _ in one_each]): one.name + "".join([text for _, text in one_each])
        for one_each in product(*by_axis)
    }


def _shown(cell: tuple[int, ...]) -> str:
    """
    >>> _shown((0,)), _shown((0, 1, 2)), _shown((0, 2, 3))
    ('0', '0-2', '0,2-3')
    """
    runs: list[list[int]] = []
    for i in cell:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _singles(size: int) -> tuple[tuple[int], ...]:
    return tuple((i,) for i in range(size))


def _message_axes(schedule: RankSchedule) -> set[str]:
    return {op.axes[0] for op in schedule.ops if op.kind == "communicate" and op.shift}


def _require_partition(mesh: Mesh, axis: str, parts: Sequence[Sequence[int]]) -> None:
    if axis not in mesh.names:
        raise SplitError(f"the mesh has no axis '{axis}', it has {', '.join(mesh.names)}")
    size = mesh.length(axis)
    if sorted(i for part in parts for i in part) != list(range(size)):
        raise SplitError(
            f"cells {[list(part) for part in parts]} of axis '{axis}' are not each of its {size} "
            "coordinates once"
        )
