"""A calendar of nodes: jobs placed one after the other, each where it ends first.

Of jobs that keep their nodes, some order of placing them gives every calendar in which no job could
start earlier by itself, so the best calendar is among those of all orders and sizes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

from twinstream.fleet.rates import FleetTask
from twinstream.schedule.node import Node

_EPS_S = 1e-6


class Interruption(NamedTuple):
    """What a change of a job's nodes costs: a checkpoint on the old ones, a restart on the new."""

    checkpoint_s: float
    restart_s: float


class Stretch(NamedTuple):
    """A job on a constant number of nodes; `share` of its work is done in it."""

    start_s: float
    end_s: float
    nodes: int
    share: float
    restarts: bool = False
    saves: bool = False


class Booking(Node):
    """A stretch on nodes by number."""

    job: str
    nodes: tuple[int, ...]
    start_s: float
    end_s: float
    share: float
    restarts: bool
    saves: bool


class _FreeNodes:
    """How many nodes are free, from each time on."""

    def __init__(self, num_nodes: int) -> None:
        self.times, self.free = [0.0], [num_nodes]

    def cut(self, time_s: float) -> int:
        """The place of a time among the times, which it is added to."""
        place = bisect_right(self.times, time_s + _EPS_S) - 1
        if self.times[place] < time_s - _EPS_S:
            place += 1
            self.times.insert(place, time_s)
            self.free.insert(place, self.free[place - 1])
        return place

    def take(self, stretches: Sequence[Stretch], *, back: bool = False) -> None:
        for stretch in stretches:
            first, last = self.cut(stretch.start_s), self.cut(stretch.end_s)
            for place in range(first, last):
                self.free[place] += stretch.nodes if back else -stretch.nodes

    def spans_from(self, time_s: float) -> list[tuple[float, float, int]]:
        """(start, end, free) from a time on; the last never ends."""
        first = self.cut(time_s)
        times = [*self.times[first:], inf]
        return [(a, b, f) for (a, b), f in zip(pairwise(times), self.free[first:], strict=True)]


def placed(
    order: Sequence[tuple[FleetTask, int]], num_nodes: int, cost: Interruption
) -> list[list[Stretch]]:
    """Stretches of each job, in the order given.

    A number is of nodes; of elastic jobs the most, or those that it keeps as a negative number.

    At last elastic jobs, the one that ends last first, take what the others leave, if they end
    earlier so.
    """
    free, found = _FreeNodes(num_nodes), list[list[Stretch]]()
    for task, size in order:
        spans = free.spans_from(task.job.arrives_s)
        found.append(
            _elastic(task, size, spans, cost)
            if task.job.elastic and size > 0
            else [_rigid(task.seconds[abs(size)], abs(size), spans)]
        )
        free.take(found[-1])
    elastic_ones = [place for place, (task, _) in enumerate(order) if task.job.elastic]
    for place in sorted(elastic_ones, key=lambda place: -found[place][-1].end_s):
        task = order[place][0]
        free.take(found[place], back=True)
        spans = free.spans_from(task.job.arrives_s)
        other = _elastic(task, num_nodes, spans, cost)
        if other[-1].end_s < found[place][-1].end_s - _EPS_S:
            found[place] = other
        free.take(found[place])
    return found


def _rigid(seconds: float, size: int, spans: Sequence[tuple[float, float, int]]) -> Stretch:
    """The earliest place in which so many nodes are free for so long."""
    start_s: float | None = None
    for begin, end, free in spans:
        start_s = None if free < size else begin if start_s is None else start_s
        if start_s is not None and start_s + seconds <= end + _EPS_S:
            return Stretch(start_s, start_s + seconds, size, 1.0)
    raise AssertionError("the last span never ends")


@dataclass(frozen=True)
class _Way:
    """One way to have run so far: the share done, the nodes, and since when they train."""

    done: float
    nodes: int
    ready_s: float
    stretches: tuple[Stretch, ...]
    begun_s: float
    restarts: bool


def _elastic(
    task: FleetTask, most: int, spans: Sequence[tuple[float, float, int]], cost: Interruption
) -> list[Stretch]:
    """The way that ends first, of those that change their nodes where others begin or end.

    Forward over the spans, by dynamic programming: of each number of nodes (0: it waits) the way
    that has done most is kept.
    """
    seconds = {size: s for size, s in task.seconds.items() if size <= most}
    ways = {0: _Way(0.0, 0, spans[0][0], (), spans[0][0], restarts=False)}
    for begin, end, free in spans:
        now: dict[int, _Way] = {}
        for size in (0, *(size for size in seconds if size <= free)):
            changed = [_at_size(way, size, begin, seconds, cost) for way in ways.values()]
            possible = [way for way in changed if way is not None]
            if possible:
                now[size] = max(possible, key=lambda way: (way.done, -way.ready_s))
        ends = [(_end_of(way, begin, seconds), size) for size, way in now.items() if size]
        finish, size = min(ends, default=(inf, 0))
        if finish <= end + _EPS_S:
            way = now[size]
            last = Stretch(way.begun_s, finish, size, 1.0, way.restarts)
            return _with_shares([*way.stretches, last], seconds, cost)
        ways = {size: _advanced(way, begin, end, seconds) for size, way in now.items()}
    raise AssertionError("the last span never ends")


def _at_size(
    way: _Way, size: int, now_s: float, seconds: dict[int, float], cost: Interruption
) -> _Way | None:
    """The way with other nodes from now on; None where no checkpoint could be made before."""
    if size == way.nodes:
        return way
    done, stretches = way.done, way.stretches
    if way.nodes:
        if now_s - way.ready_s < cost.checkpoint_s - _EPS_S:
            return None
        done -= cost.checkpoint_s / seconds[way.nodes]
        last = Stretch(way.begun_s, now_s, way.nodes, 0.0, way.restarts, saves=True)
        stretches = (*stretches, last)
    restarts = bool(stretches)
    ready_s = now_s + (cost.restart_s if size and restarts else 0.0)
    return _Way(done, size, ready_s, stretches, now_s, restarts)


def _end_of(way: _Way, begin: float, seconds: dict[int, float]) -> float:
    return max(begin, way.ready_s) + (1.0 - way.done) * seconds[way.nodes]


def _advanced(way: _Way, begin: float, end: float, seconds: dict[int, float]) -> _Way:
    if not way.nodes:
        return way
    trained_s = max(0.0, end - max(begin, way.ready_s))
    done = way.done + trained_s / seconds[way.nodes]
    return _Way(done, way.nodes, way.ready_s, way.stretches, way.begun_s, way.restarts)


def _with_shares(
    stretches: Sequence[Stretch], seconds: dict[int, float], cost: Interruption
) -> list[Stretch]:
    """With what each does of the work, in the time that it neither saves nor restarts."""
    return [
        one._replace(
            share=(one.end_s - one.start_s - cost.restart_s * one.restarts
                   - cost.checkpoint_s * one.saves) / seconds[one.nodes]
        )
        for one in stretches
    ]  # fmt: skip


def booked(
    names: Sequence[str], calendar: Sequence[Sequence[Stretch]], num_nodes: int
) -> list[Booking]:
    """Stretches on nodes by number, in order of time; a job keeps nodes where it can."""
    free_from = [0.0] * num_nodes
    last: dict[str, set[int]] = {}
    order = sorted(
        ((stretch, name) for name, own in zip(names, calendar, strict=True) for stretch in own),
        key=lambda pair: (pair[0].start_s, pair[0].end_s, pair[1]),
    )
    found = []
    for stretch, name in order:
        free = [n for n in range(num_nodes) if free_from[n] <= stretch.start_s + _EPS_S]
        free.sort(key=lambda n: (n not in last.get(name, ()), n))
        taken = tuple(sorted(free[: stretch.nodes]))
        assert len(taken) == stretch.nodes, "the calendar books more nodes than there are"
        for node in taken:
            free_from[node] = stretch.end_s
        last[name] = set(taken)
        found.append(
            Booking(job=name, nodes=taken, start_s=stretch.start_s, end_s=stretch.end_s,
                    share=stretch.share, restarts=stretch.restarts, saves=stretch.saves)
        )  # fmt: skip
    return found
