"""The part of one rank of a cluster: an ordinary schedule, and the ranks it meets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from twinstream.schedule.cluster.communication import Communicator
from twinstream.schedule.document import Mesh, RankClass, RankSchedule, Schedule
from twinstream.schedule.errors import TwinstreamError, require_whole
from twinstream.schedule.ops import Attribute, Communicate, Feed, KernelCall, Op

# Of a call that works on a shard: over which axes of the mesh the whole is cut. What else it says
# is of the first shard: its elements (`num_elements`), where it begins (`element_offset`), and of
# the whole the ranges that are not decayed (`undecayed`).
SHARD_AXES = "shard_axes"
# Of a call that has values of some attributes for each rank of an axis: that, and their names.
BY_RANK = "by_rank"
CP = "cp"  # the axis whose ranks have slices of every sequence


class Channel(NamedTuple):
    """Ranks that talk to one another on a communicator, all of them or none.

    Of a collective, `members` are its group in rank order. A message has a channel for each pair of
    sender and receiver, in this order, and its communicator is the sender's.
    """

    communicator: Communicator
    members: tuple[int, ...]


@dataclass(frozen=True)
class RankPart:
    """A rank's part of a cluster's schedule; `channels` are those of its Communicate ops, by id."""

    rank: int
    coordinates: Mapping[str, int]
    class_name: str
    schedule: RankSchedule
    channels: Mapping[str, Channel]

    @classmethod
    def alone(cls, schedule: RankSchedule) -> "RankPart":
        """The part of one device, which meets nobody."""
        return cls(0, {}, "", schedule, {})

    @property
    def place(self) -> str:
        """The rank's place in words: `rank 3 (pp 1, dp 1)`."""
        return f"rank {self.rank} ({', '.join(f'{a} {i}' for a, i in self.coordinates.items())})"


def project(schedule: Schedule, rank: int) -> RankSchedule:
    """The ordinary schedule that a rank runs.

    Raises:
        ArgumentError: the mesh has no such rank.
    """
    return rank_part(schedule, rank).schedule


def rank_part(schedule: Schedule, rank: int) -> RankPart:
    """A rank's schedule, and whom each of its Communicate ops meets.

    The schedule must be safe, as `verify` proves.

    Raises:
        ArgumentError: the mesh has no such rank.
    """
    require_whole("rank", rank, 0, schedule.mesh.size - 1)
    coordinates = schedule.mesh.coordinates(rank)
    own = _class_of(schedule, coordinates)
    part = _with_shards(schedule.of(own), schedule.mesh, coordinates)
    if CP in coordinates:
        part = part.model_copy(
            update={"ops": tuple(map(_fed_to(schedule, own, coordinates), part.ops))}
        )
    channels = {
        op.op_id: channel_of(schedule.mesh, op, coordinates)
        for op in part.ops
        if isinstance(op, Communicate)
    }
    return RankPart(rank, coordinates, own.name, part, channels)


def class_name_of(schedule: Schedule, rank: int) -> str:
    """The class of a rank: ranks of one class have the same slots."""
    return _class_of(schedule, schedule.mesh.coordinates(rank)).name


def _with_shards(part: RankSchedule, mesh: Mesh, coordinates: Mapping[str, int]) -> RankSchedule:
    """Calls on shards are told which of them is this rank's; the same where there are none."""
    filled = {}
    for name, call in part.calls.items():
        if BY_RANK in call.attributes:
            filled[name] = call = _call_of_rank(call, coordinates)
        if SHARD_AXES in call.attributes:
            line = _line(mesh, tuple(str(call.attributes[SHARD_AXES]).split()), coordinates)
            filled[name] = shard_call(call, line.index(mesh.rank(coordinates)))
    return part.model_copy(update={"calls": {**part.calls, **filled}}) if filled else part


def slice_place(index: int, rank: int, num_ranks: int, num_slices: int) -> int:
    """Which of a sequence's slices one of its ranks has as number `index`.

    The first half of its slices are as far from the sequence's begin as the others are from its
    end, so that all ranks see as many keys.

    >>> [[slice_place(i, rank, 2, 8) for i in range(4)] for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    half = num_slices // num_ranks // 2
    return rank * half + index if index < half else num_slices - (rank + 2) * half + index


def _fed_to(
    schedule: Schedule, own: RankClass, coordinates: Mapping[str, int]
) -> Callable[[Op], Op]:
    """Feeds of chunks are of the rank's slices; in documents their chunks are counted by rank."""
    num_ranks = schedule.mesh.length(CP)
    num_slices = schedule.of(own).workload.chunks_per_sequence
    each = num_slices // num_ranks

    def fed(op: Op) -> Op:
        if not isinstance(op, Feed) or op.source != "tokens":
            return op
        sequence, index = divmod(op.index, each)
        place = slice_place(index, coordinates[CP], num_ranks, num_slices)
        return op.model_copy(update={"index": sequence * num_slices + place})

    return fed


def _call_of_rank(call: KernelCall, coordinates: Mapping[str, int]) -> KernelCall:
    axis, *names = str(call.attributes[BY_RANK]).split()
    place = coordinates.get(axis, -1)
    for name in names:
        values = call.attributes.get(name)
        if not isinstance(values, tuple) or not 0 <= place < len(values):
            raise TwinstreamError(
                f"a call has no {name} of rank {place} along '{axis}': {values!r}"
            )
    return call.model_copy(update={"attributes": attributes_of_rank(call.attributes, place)})


def attributes_of_rank(attributes: Mapping[str, Attribute], place: int) -> dict[str, Attribute]:
    """What a call is told on one of the ranks of its axis, if it has values by rank."""
    told = dict(attributes)
    for name in str(told.pop(BY_RANK, "")).split()[1:]:
        values = told[name]
        assert isinstance(values, tuple), "one for each rank"
        told[name] = values[place]
    return told


def attributes_of_ranks(attributes: Mapping[str, Attribute]) -> list[dict[str, Attribute]]:
    """The same of all ranks of its axis; what all are told once, where that is alike.

    >>> attributes_of_ranks({"dtype": "float32", "start": (0, 8), "by_rank": "cp start"})
    [{'dtype': 'float32', 'start': 0}, {'dtype': 'float32', 'start': 8}]
    """
    names = str(attributes.get(BY_RANK, "")).split()[1:]
    count = len(attributes[names[0]]) if names else 1  # type: ignore[arg-type]
    return [attributes_of_rank(attributes, place) for place in range(count)]


def shard_call(call: KernelCall, index: int) -> KernelCall:
    """Return the kernel call on shard `index`.

    >>> told = {"shard_axes": "dp", "num_elements": 8, "element_offset": 0, "undecayed": (6, 10)}
    >>> call = KernelCall(kernel="adamw_step/eager", attributes=told, cost=())
    >>> shard_call(call, 1).attributes
    {'num_elements': 8, 'element_offset': 8, 'undecayed': (0, 2)}
    """
    told = {name: value for name, value in call.attributes.items() if name != SHARD_AXES}
    size, first = _whole(told, "num_elements"), _whole(told, "element_offset")
    start = first + index * size
    told["element_offset"] = start
    ranges = told.pop("undecayed", ())
    assert isinstance(ranges, tuple), "ranges are pairs of whole numbers"
    cut = [min(max(end - start, 0), size) for end in ranges]
    pairs = [pair for pair in zip(cut[::2], cut[1::2], strict=True) if pair[0] < pair[1]]
    if pairs:
        told["undecayed"] = tuple(end for pair in pairs for end in pair)
    return call.model_copy(update={"attributes": told})


def _whole(told: Mapping[str, Attribute], name: str) -> int:
    value = told.get(name)
    if type(value) is not int:
        raise TwinstreamError(f"a call on a shard has {name} {value!r}, expected a whole number")
    return value


def channel_of(mesh: Mesh, op: Communicate, coordinates: Mapping[str, int]) -> Channel:
    """Return whom the rank at these coordinates meets in an op."""
    if not op.shift:
        communicator = Communicator(op.axes, 0, op.stream.queue)
        return Channel(communicator, _line(mesh, op.axes, coordinates))
    (axis,) = op.axes
    there = (coordinates[axis] + op.shift) % mesh.length(axis)
    here, peer = mesh.rank(coordinates), mesh.rank({**coordinates, axis: there})
    communicator = Communicator(op.axes, op.shift, op.collective)
    if op.collective == "send":
        return Channel(communicator, (here, peer))
    return Channel(communicator.opposite, (peer, here))


def all_channels(schedule: Schedule) -> tuple[Channel, ...]:
    """The channels of all ranks in one order, the same wherever it is asked: for small meshes."""
    found: set[Channel] = set()
    ops_of: dict[str, list[Communicate]] = {}
    for name, part in schedule.schedules.items():
        first: dict[tuple[object, ...], Communicate] = {}
        for op in part.ops:
            if isinstance(op, Communicate):
                told = op.collective if op.shift else op.stream.queue
                first.setdefault((op.axes, op.shift, told), op)
        ops_of[name] = list(first.values())
    for rank in range(schedule.mesh.size):
        coordinates = schedule.mesh.coordinates(rank)
        for op in ops_of[_class_of(schedule, coordinates).schedule]:
            found.add(channel_of(schedule.mesh, op, coordinates))
    return tuple(sorted(found))


def _class_of(schedule: Schedule, coordinates: Mapping[str, int]) -> RankClass:
    """Classes are a partition of the mesh."""
    (found,) = (
        one
        for one in schedule.classes
        if all(coordinates[axis] in cell for axis, cell in one.cells.items())
    )
    return found


def _line(mesh: Mesh, axes: tuple[str, ...], coordinates: Mapping[str, int]) -> tuple[int, ...]:
    """Ranks that differ from that at the coordinates along these axes only, in rank order."""
    lengths = [range(mesh.length(axis)) for axis in axes]
    moved = ({**coordinates, **dict(zip(axes, at, strict=True))} for at in product(*lengths))
    return tuple(sorted(mesh.rank(at) for at in moved))
