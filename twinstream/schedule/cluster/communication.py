"""The claims of one schedule to others: its Communicate ops by communicator."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from twinstream.schedule.document import Mesh, RankSchedule
from twinstream.schedule.ops import Communicate, Op
from twinstream.schedule.proof.accesses import AccessMap

OperandClaim = tuple[str, int, str, int]  # of an operand: tensor, version, dtype, bytes


class Communicator(NamedTuple):
    """Who counts together: (axes, queue) of collectives, (axis, shift, send or recv) of messages.

    `name` is the queue of collectives, and `send` or `recv` of messages, which have a shift.
    """

    axes: tuple[str, ...]
    shift: int
    name: str

    def __str__(self) -> str:
        where = f"along {', '.join(self.axes)}"
        return f"{self.name} {where} by {self.shift}" if self.shift else f"'{self.name}' {where}"

    @property
    def opposite(self) -> "Communicator":
        """That of the other end of a message."""
        return Communicator(self.axes, -self.shift, "recv" if self.name == "send" else "send")


def communicator_of(op: Communicate) -> Communicator:
    """Among whose ops it is counted."""
    return Communicator(op.axes, op.shift, op.collective if op.shift else op.stream.queue)


def counted_anew(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Some of a schedule's ops, in its order, with sequences that have no gaps."""
    counts: dict[Communicator, int] = {}
    found: list[Op] = []
    for op in ops:
        if isinstance(op, Communicate):
            number = counts.setdefault(communicator := communicator_of(op), 0)
            counts[communicator] = number + 1
            op = op.model_copy(update={"sequence": number})
        found.append(op)
    return tuple(found)


class Side(NamedTuple):
    """One op: its place in issue order, and what must be equal on all sides that meet.

    The two ends of a message differ in collective and modes, so `does` is empty there.
    """

    position: int
    op: Communicate
    operation: tuple[str, ...]
    operands: tuple[OperandClaim, ...]


class Communication:
    """The Communicate ops of a schedule, in issue order on each communicator."""

    def __init__(self, schedule: RankSchedule) -> None:
        self.schedule = schedule
        self.sides: dict[Communicator, list[Side]] = {}
        self.position = {op.op_id: at for at, op in enumerate(schedule.ops)}
        self._access_map = AccessMap(schedule.tensors, ())
        self._types: dict[tuple[str, int | None], tuple[str, int]] = {}
        for position, op in enumerate(schedule.ops):
            if op.kind == "communicate":
                known = self.sides.setdefault(communicator_of(op), [])
                known.append(self._side(position, op))

    def _side(self, position: int, op: Communicate) -> Side:
        operands = tuple(
            [(o.tensor, o.version, *self._type(o.tensor, o.num_parts)) for o in op.operands]
        )
        if op.shift:
            return Side(position, op, (), operands)
        order = ("last_first",) if op.last_first else ()
        operation = (op.collective, op.reduction, *order, *[o.mode for o in op.operands])
        return Side(position, op, operation, operands)

    def _type(self, tensor: str, num_parts: int | None) -> tuple[str, int]:
        """Data type, and bytes."""
        key = (tensor, num_parts)
        found = self._types.get(key)
        if found is None:
            start, end = self._access_map.extent(tensor, num_parts)
            found = self._types[key] = (self._access_map.tensors[tensor].dtype, end - start)
        return found

    def axes_wrong(self, mesh: Mesh) -> Iterator[tuple[str, Communicate]]:
        """Ops along axes that are unknown or named twice, and what of it to say."""
        for communicator, sides in self.sides.items():
            axes = communicator.axes
            if unknown := [axis for axis in axes if axis not in mesh.names]:
                known = ", ".join(mesh.names)
                yield f"is along axis '{unknown[0]}', the mesh has {known}", sides[0].op
            elif len(set(axes)) < len(axes):
                yield f"names an axis twice in {', '.join(axes)}", sides[0].op

    def sequences_wrong(self) -> Iterator[tuple[str, Communicate]]:
        """Per communicator the first op that is out of sequence."""
        for communicator, sides in self.sides.items():
            for expected, side in enumerate(sides):
                if (sequence := side.op.sequence) != expected:
                    yield (
                        f"has sequence {sequence}, but is number {expected} of {communicator}",
                        side.op,
                    )
                    break

    def operands_wrong(self, mesh: Mesh) -> Iterator[tuple[str, Communicate]]:
        """Ops whose operands are not what their collective needs."""
        for communicator, sides in self.sides.items():
            num_ranks = prod(mesh.length(axis) for axis in communicator.axes)
            for side in sides:
                if why := _unsuited(side, num_ranks):
                    yield why, side.op


def _unsuited(side: Side, num_ranks: int) -> str | None:
    """What is wrong with an op's operands, among so many ranks."""
    collective = side.op.collective
    if side.op.counts is not None:
        return _unsuited_rows(side, num_ranks)
    modes = [operand.mode for operand in side.op.operands]
    sizes = [told[3] for told in side.operands]
    has = ", ".join(f"{m} of {s} bytes" for m, s in zip(modes, sizes, strict=True))
    every = {"all_reduce": "update", "send": "read", "recv": "write"}.get(collective)
    if every is not None:
        return None if set(modes) == {every} else f"takes {every} operands only, it has {has}"
    if sorted(modes) == ["read", "write"]:
        read, written = sizes if modes[0] == "read" else sizes[::-1]
        more, less = {
            "all_gather": (num_ranks * read, written),
            "reduce_scatter": (read, num_ranks * written),
            "all_to_all": (read, written),
            "send_recv": (read, written),
        }[collective]
        if more == less or (collective == "reduce_scatter" and more and not more % (less or 1)):
            return None
        ratio = {"all_gather": "the write has the bytes of all reads",
                 "reduce_scatter": "the read has the bytes of all writes, or so many pieces",
                 "all_to_all": "both have equal bytes",
                 "send_recv": "both have equal bytes"}[collective]  # fmt: skip
        return f"is among {num_ranks} ranks, where {ratio}: it has {has}"
    if collective in ("all_to_all", "send_recv"):
        return f"takes one read and one write, it has {has}"
    if modes != ["update"]:
        return f"takes one read and one write, or one update, it has {has}"
    if sizes[0] % num_ranks:
        return f"is among {num_ranks} ranks, which do not divide the {sizes[0]} bytes of its update"
    return None


def _unsuited_rows(side: Side, num_ranks: int) -> str | None:
    """Likewise, of an exchange of rows that are counted."""
    modes = [operand.mode for operand in side.op.operands]
    given, taken, counts = (told[3] for told in side.operands)
    if modes != ["read", "write", "read"] or side.operands[2][2] != "int32":
        return f"takes rows to read, rows to write and int32 counts to read, it has {modes}"
    if max(given, taken) != num_ranks * min(given, taken):
        return (
            f"is among {num_ranks} ranks, where one side has room for the rows of all: it reads "
            f"{given} bytes and writes {taken}"
        )
    if counts % (4 * num_ranks * num_ranks):
        return (
            f"is among {num_ranks} ranks, which do not each have as many experts in {counts} bytes "
            "of counts"
        )
    return None
