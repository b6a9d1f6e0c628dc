"""The search for the best calendar: orders of jobs and sizes, all of them where they are few."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import factorial, prod

from twinstream.fleet.calendar import Interruption, Stretch, placed
from twinstream.fleet.rates import FleetTask

_MOST_TRIED = 6000  # calendars; one of eight jobs takes 0.2 ms
_ALIKE_S = 1e-6

Genome = tuple[tuple[int, ...], tuple[int, ...]]  # jobs in order, nodes of each job
Score = tuple[float, ...]


@dataclass(frozen=True)
class Ordered:
    """The best calendar; `is_exhaustive`: every order and size was tried."""

    calendar: list[list[Stretch]]
    score: Score
    is_exhaustive: bool


def best_calendar(
    tasks: Sequence[FleetTask], num_nodes: int, cost: Interruption, objective: str, seed: int = 0
) -> Ordered:
    """The best of all calendars where these are few, else the best of a local search."""
    tried: dict[Genome, Score] = {}

    def score_of(genome: Genome) -> Score:
        if genome not in tried:
            calendar = _calendar(tasks, genome, num_nodes, cost)
            tried[genome] = score(tasks, calendar, objective)
        return tried[genome]

    sizes = [_choices(task) for task in tasks]
    count = factorial(len(tasks)) * prod(map(len, sizes))
    if count <= _MOST_TRIED:
        best = min(_all(len(tasks), sizes), key=score_of)
    else:
        best = _climbed(tasks, sizes, score_of, tried, random.Random(seed))
    return Ordered(_calendar(tasks, best, num_nodes, cost), score_of(best), count <= _MOST_TRIED)


def _choices(task: FleetTask) -> tuple[int, ...]:
    """Nodes of a job; of an elastic one the most, or as a negative number those it keeps."""
    sizes = tuple(task.seconds)
    return (*sizes, *(-size for size in sizes[1:])) if task.job.elastic else sizes


def score(
    tasks: Sequence[FleetTask], calendar: Sequence[Sequence[Stretch]], objective: str
) -> Score:
    """What is to be least: weight of missed deadlines, makespan, node-seconds; whichever first."""
    ends = [own[-1].end_s for own in calendar]
    missed = sum(
        task.job.priority
        for task, end in zip(tasks, ends, strict=True)
        if end > task.job.deadline_s + _ALIKE_S
    )
    used = sum((one.end_s - one.start_s) * one.nodes for own in calendar for one in own)
    first = (missed, round(max(ends), 6))
    return (*(first if objective == "deadlines" else first[::-1]), round(used, 6), sum(ends))


def _calendar(
    tasks: Sequence[FleetTask], genome: Genome, num_nodes: int, cost: Interruption
) -> list[list[Stretch]]:
    order, sizes = genome
    found = placed([(tasks[place], sizes[place]) for place in order], num_nodes, cost)
    by_task = dict(zip(order, found, strict=True))
    return [by_task[place] for place in range(len(tasks))]


def _all(count: int, sizes: Sequence[Sequence[int]]) -> Iterator[Genome]:
    for order in permutations(range(count)):
        for chosen in product(*sizes):
            yield order, chosen


def _climbed(
    tasks: Sequence[FleetTask], sizes: Sequence[Sequence[int]], score_of, tried, rng: random.Random
) -> Genome:  # fmt: skip
    """From several beginnings, always the first better neighbour; then from random ones."""
    best: Genome | None = None
    beginnings = list(_beginnings(tasks, sizes))
    while len(tried) < _MOST_TRIED:
        if beginnings:
            genome = beginnings.pop()
        else:
            order = rng.sample(range(len(tasks)), len(tasks))
            genome = tuple(order), tuple(rng.choice(own) for own in sizes)
        before = len(tried)
        genome = _improved(genome, sizes, score_of, tried, rng)
        if best is None or score_of(genome) < score_of(best):
            best = genome
        if len(tried) == before and not beginnings:
            break
    assert best is not None
    return best


def _improved(genome: Genome, sizes: Sequence[Sequence[int]], score_of, tried, rng) -> Genome:
    """Walk to better neighbours until there is none, or enough was tried."""
    is_better = True
    while is_better and len(tried) < _MOST_TRIED:
        is_better = False
        near = list(_neighbours(genome, sizes))
        rng.shuffle(near)
        for other in near:
            if len(tried) >= _MOST_TRIED:
                break
            if score_of(other) < score_of(genome):
                genome, is_better = other, True
                break
    return genome


def _beginnings(tasks: Sequence[FleetTask], sizes: Sequence[Sequence[int]]) -> Iterator[Genome]:
    """By deadline and by length, with the fewest node-seconds, and with the fastest size."""
    places = range(len(tasks))
    orders: Iterable[list[int]] = (
        sorted(places, key=lambda i: (tasks[i].job.deadline_s, -tasks[i].job.priority)),
        sorted(places, key=lambda i: -tasks[i].fastest_s),
    )
    for order in orders:
        yield (
            tuple(order),
            tuple(
                min(own, key=lambda n, t=task: abs(n) * t.seconds[abs(n)])
                for own, task in zip(sizes, tasks, strict=True)
            ),
        )
        yield (
            tuple(order),
            tuple(
                min(own, key=lambda n, t=task: t.seconds[abs(n)])
                for own, task in zip(sizes, tasks, strict=True)
            ),
        )


def _neighbours(genome: Genome, sizes: Sequence[Sequence[int]]) -> Iterator[Genome]:
    """One job of another size, or at another place of the order."""
    order, chosen = genome
    for place, own in enumerate(sizes):
        for size in own:
            if size != chosen[place]:
                yield order, (*chosen[:place], size, *chosen[place + 1 :])
    for place, job in enumerate(order):
        rest = (*order[:place], *order[place + 1 :])
        for at in range(len(order)):
            if at != place:
                yield (*rest[:at], job, *rest[at:]), chosen
