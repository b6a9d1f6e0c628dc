"""Brute force: is the schedule of a cluster safe, and does nobody wait for ever?

Written from the documents' docstrings and sharing no code with `verify`: every rank is
listed and runs its class's ops over several passes, stream by stream, with waits and
`waits_previous`. A rank that comes to a communication posts it: (communicator, who takes part,
how many it has had on it). When all who take part have posted the same, they meet, and are
compared; before that none goes on.

One execution decides. Streams are in order, an op that can begin stays able to begin until it does,
and beginning it takes nothing away from others: whoever meets whom is settled by counts, not by who
comes first. So every execution that goes on while it can ends in the same state, whatever the order
of progress; `shuffled` takes a random one to show it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import NamedTuple

from tests.helpers import schedule_oracle
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.ops import Communicate

Cache = dict[int, tuple[RankSchedule, set[str]]]  # by id of a schedule that is kept alive here
Coordinates = tuple[int, ...]
Posted = tuple[Coordinates, int]  # a rank, and the place of its op
Sides = frozenset[tuple[str, int]]  # classes, and the place of the op


def problems(cluster: Schedule, shuffled: Random, cache: Cache | None = None) -> set[str]:
    """Which kinds of things are wrong; empty when the schedule is safe."""
    found = {"class" for one in cluster.classes if _unsafe(cluster.of(one), cache)}
    names = {axis.name for axis in cluster.mesh.axes}
    ranks: dict[Coordinates, str] = {}
    for rank in product(*(range(axis.size) for axis in cluster.mesh.axes)):
        held_by = [one.name for one in cluster.classes if _holds(cluster, one.cells, rank)]
        if len(held_by) != 1:
            found.add("partition")
        ranks[rank] = held_by[0] if held_by else ""
    ops = {one.name: cluster.of(one).ops for one in cluster.classes}
    for op in (op for all_ops in ops.values() for op in all_ops if isinstance(op, Communicate)):
        if set(op.axes) - names or len(set(op.axes)) != len(op.axes):
            found.add("axes")
    if found:
        return found
    for one in cluster.classes:
        found |= set(_wrong_in_itself(cluster, cluster.of(one)))
    run = Run(cluster, ranks)
    run.until_the_end(None)
    again = Run(cluster, ranks)
    again.until_the_end(shuffled)
    assert (run.found, run.met) == (again.found, again.met), "the order of progress matters"
    found |= run.found
    return found if "stuck" in found else found | _asymmetry(run) | _disorder(cluster, run)


def _unsafe(schedule: RankSchedule, cache: Cache | None) -> bool:
    if cache is None:
        return bool(schedule_oracle.problems(schedule))
    if id(schedule) not in cache:
        cache[id(schedule)] = schedule, schedule_oracle.problems(schedule)
    return bool(cache[id(schedule)][1])


def _holds(cluster: Schedule, cells: dict[str, tuple[int, ...]], rank: Coordinates) -> bool:
    at = {axis.name: i for axis, i in zip(cluster.mesh.axes, rank, strict=True)}
    return all(at[axis] in cell for axis, cell in cells.items())


def _wrong_in_itself(cluster: Schedule, schedule: RankSchedule) -> Iterator[str]:
    sizes = {axis.name: axis.size for axis in cluster.mesh.axes}
    counts: Counter[object] = Counter()
    for op in schedule.ops:
        if isinstance(op, Communicate):
            if op.sequence != counts[_counted(op)]:
                yield "sequence"
            counts[_counted(op)] += 1
            num_ranks = 1
            for axis in op.axes:
                num_ranks *= sizes[axis]
            if not _suits(
                op, [_size(schedule, o.tensor, o.num_parts) for o in op.operands], num_ranks
            ):
                yield "operands"


def _counted(op: Communicate) -> object:
    """What an op is counted on."""
    if op.collective in ("send", "recv"):
        return op.collective, op.axes, op.shift
    return op.axes, op.stream.queue


def _size(schedule: RankSchedule, tensor: str, num_parts: int | None) -> int:
    tensors = {t.tensor_id: t for t in schedule.tensors}
    low, high = schedule_oracle.span_of(tensors, tensor, num_parts)
    return high - low


def _suits(op: Communicate, sizes: list[int], num_ranks: int) -> bool:
    modes = [operand.mode for operand in op.operands]
    bytes_of = dict(zip(modes, sizes, strict=True)) if len(modes) < 3 else {}
    pair = len(modes) == 2 and set(modes) == {"read", "write"}
    in_place = modes == ["update"] and sizes[0] % num_ranks == 0
    match op.collective:
        case "all_reduce":
            return all(mode == "update" for mode in modes)
        case "send":
            return all(mode == "read" for mode in modes)
        case "recv":
            return all(mode == "write" for mode in modes)
        case "all_gather":
            return in_place or (pair and bytes_of["write"] == num_ranks * bytes_of["read"])
        case "reduce_scatter":
            many = pair and bytes_of["read"] % (num_ranks * bytes_of["write"]) == 0
            return in_place or (many and bytes_of["read"] > 0)
        case "all_to_all" if modes == ["read", "write", "read"]:
            room = sorted(sizes[:2])
            return num_ranks * room[0] == room[1] and sizes[2] % (4 * num_ranks**2) == 0
        case "all_to_all" | "send_recv":
            return pair and bytes_of["read"] == bytes_of["write"]


class Place(NamedTuple):
    """How far a stream has come."""

    number: int  # of the pass
    index: int  # of the op on the stream


@dataclass
class Rank:
    """What a rank runs, and how far it is."""

    schedule: RankSchedule
    streams: list[list[int]]
    places: list[Place]
    done: Counter[str] = field(default_factory=Counter)  # passes, by op
    posted: set[tuple[int, int]] = field(default_factory=set)  # pass, place of the op
    counts: Counter[object] = field(default_factory=Counter)


class Run:
    """One execution by all ranks."""

    def __init__(
        self, cluster: Schedule, classes: dict[Coordinates, str], num_passes: int = 3
    ) -> None:
        self.num_passes = num_passes
        self.axes = {axis.name: i for i, axis in enumerate(cluster.mesh.axes)}
        self.sizes = [axis.size for axis in cluster.mesh.axes]
        self.classes = classes
        self.ranks: dict[Coordinates, Rank] = {}
        schedules = {one.name: cluster.of(one) for one in cluster.classes}
        for rank, name in classes.items():
            streams: dict[str, list[int]] = {}
            for position, op in enumerate(schedules[name].ops):
                streams.setdefault(str(op.stream), []).append(position)
            places = [Place(0, 0) for _ in streams]
            self.ranks[rank] = Rank(schedules[name], list(streams.values()), places)
        # How many an op has before it, in issue order of a pass, and how many a pass has.
        self.numbers = {name: _numbers(schedule) for name, schedule in schedules.items()}
        self.board: dict[object, list[tuple[Coordinates, int, int]]] = {}  # rank, stream, pass
        self.met: dict[Posted, set[frozenset[Posted]]] = {}
        self.found: set[str] = set()

    def until_the_end(self, shuffled: Random | None) -> None:
        waiting = [(rank, stream) for rank in self.ranks for stream in self._streams(rank)]
        while waiting:
            at = shuffled.randrange(len(waiting)) if shuffled else -1
            waiting[at], waiting[-1] = waiting[-1], waiting[at]
            for rank in self._go_on(*waiting.pop()):
                waiting += [(rank, stream) for stream in self._streams(rank)]
        for rank in self.ranks.values():
            if any(place.number < self.num_passes for place in rank.places):
                self.found.add("stuck")

    def _streams(self, rank: Coordinates) -> range:
        return range(len(self.ranks[rank].streams))

    def _go_on(self, name: Coordinates, stream: int) -> set[Coordinates]:
        """Begin a stream's next op if it can; returns the ranks that came further."""
        rank = self.ranks[name]
        number, index = rank.places[stream]
        if number == self.num_passes:
            return set()
        position = rank.streams[stream][index]
        op = rank.schedule.ops[position]
        if any(rank.done[wait] <= number for wait in op.waits) or any(
            rank.done[wait] < number for wait in op.waits_previous
        ):
            return set()
        if not isinstance(op, Communicate):
            self._complete(name, stream)
            return {name}
        if (number, position) in rank.posted:
            return set()
        rank.posted.add((number, position))
        before, a_pass = self.numbers[self.classes[name]][position]
        who = self._who(name, op)
        key = (*who, before + number * a_pass)
        here = self.board.setdefault(key, [])
        here.append((name, stream, number))
        if len(here) < self._how_many(op, who):
            return set()
        self._meet(here)
        for other, its_stream, _ in here:
            self._complete(other, its_stream)
        return {other for other, _, _ in here}

    def _complete(self, name: Coordinates, stream: int) -> None:
        rank = self.ranks[name]
        number, index = rank.places[stream]
        rank.done[rank.schedule.ops[rank.streams[stream][index]].op_id] += 1
        last = index + 1 == len(rank.streams[stream])
        rank.places[stream] = Place(number + 1, 0) if last else Place(number, index + 1)

    def _who(self, name: Coordinates, op: Communicate) -> tuple[object, ...]:
        """The communicator and who takes part, the same on all sides."""
        if op.collective not in ("send", "recv"):
            own = {self.axes[axis] for axis in op.axes}
            group = tuple(-1 if i in own else c for i, c in enumerate(name))
            return "group", op.axes, op.stream.queue, group
        along = self.axes[op.axes[0]]
        other = (name[along] + op.shift) % self.sizes[along]
        partner = (*name[:along], other, *name[along + 1 :])
        if partner == name:
            self.found.add("symmetry")
        if op.collective == "send":
            return "message", op.axes, op.shift, (name, partner)
        return "message", op.axes, -op.shift, (partner, name)

    def _how_many(self, op: Communicate, who: tuple[object, ...]) -> int:
        if who[0] == "message":
            return 2
        num_ranks = 1
        for axis in op.axes:
            num_ranks *= self.sizes[self.axes[axis]]
        return num_ranks

    def _meet(self, here: list[tuple[Coordinates, int, int]]) -> None:
        sides = []
        claims = set()
        for name, stream, number in here:
            rank = self.ranks[name]
            position = rank.streams[stream][rank.places[stream].index]
            op = rank.schedule.ops[position]
            assert isinstance(op, Communicate)
            sides.append((name, position))
            claims.add((number, op.sequence, *_claims(rank.schedule, op)))
        if len(claims) > 1:
            self.found.add("mismatch")
        for side in sides:
            self.met.setdefault(side, set()).add(frozenset(sides))


def _numbers(schedule: RankSchedule) -> dict[int, tuple[int, int]]:
    counts: Counter[object] = Counter()
    before = {}
    ops = {i: op for i, op in enumerate(schedule.ops) if isinstance(op, Communicate)}
    for position, op in ops.items():
        before[position] = counts[_counted(op)]
        counts[_counted(op)] += 1
    return {position: (before[position], counts[_counted(op)]) for position, op in ops.items()}


def _claims(schedule: RankSchedule, op: Communicate) -> tuple[object, ...]:
    """What must be the same on all sides."""
    dtypes = {t.tensor_id: t.dtype for t in schedule.tensors}
    what = [
        (o.tensor, o.version, dtypes[o.tensor], _size(schedule, o.tensor, o.num_parts))
        for o in op.operands
    ]
    if op.collective in ("send", "recv"):
        return tuple(what)
    return op.collective, op.reduction, tuple(o.mode for o in op.operands), tuple(what)


def _asymmetry(run: Run) -> set[str]:
    """Ranks of a class that meet others than their like do."""
    found: dict[tuple[str, int], set[Sides]] = {}
    for (rank, position), meetings in run.met.items():
        classes = {frozenset((run.classes[r], p) for r, p in sides) for sides in meetings}
        found.setdefault((run.classes[rank], position), set()).update(classes)
    return {"symmetry"} if any(len(kinds) > 1 for kinds in found.values()) else set()


def _disorder(cluster: Schedule, run: Run) -> set[str]:
    """Every rank says what it has to say in issue order: can all follow the exchanges?

    All ranks that an exchange names must be about to say it, and it must be one thing: whoever
    meets somebody in it is in it, and all hang together.
    """
    ops = {one.name: cluster.of(one).ops for one in cluster.classes}
    ahead = {
        name: [i for i, op in enumerate(all_ops) if isinstance(op, Communicate)]
        for name, all_ops in ops.items()
    }
    partners: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for (rank, position), meetings in run.met.items():
        met = {(run.classes[r], p) for sides in meetings for r, p in sides}
        partners.setdefault((run.classes[rank], position), set()).update(met)
    for exchange in cluster.order:
        sides = []
        for name, op_id in exchange.sides:
            places = [i for i, op in enumerate(ops.get(name, ())) if op.op_id == op_id]
            if not places or places[0] not in ahead[name]:
                return {"order"}
            sides.append((name, places[0]))
        together, new = set[tuple[str, int]](), {sides[0]}
        while new:
            together |= new
            new = {other for side in new for other in partners[side]} - together
        if together != set(sides) or len(set(sides)) != len(sides):
            return {"order"}
        for name in {name for name, _ in sides}:
            own = sorted(place for other, place in sides if other == name)
            if ahead[name][: len(own)] != own:
                return {"order"}
            del ahead[name][: len(own)]
    return {"order"} if any(ahead.values()) else set()
