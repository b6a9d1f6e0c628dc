"""The search for the best calendar: orders of jobs and sizes, all of them where they are few."""

from collections.abc import Iterator, Sequence
from itertools import islice, permutations, product
from math import factorial, prod
from random import Random
from typing import NamedTuple

from twinstream.fleet.calendar import Interruption, Stretch, placed
from twinstream.fleet.rates import FleetTask

_MOST_TRIED = 6000  # calendars; one of eight jobs takes 0.2 ms
_ELASTIC_TAKE = 3  # times as long
_ALIKE_S = 1e-6

Genome = tuple[tuple[int, ...], tuple[int, ...]]  # jobs in order, nodes of each job
Score = tuple[float, ...]
Calendar = list[list[Stretch]]


class Ordered(NamedTuple):
    """The best calendar; `is_exhaustive`: every order and size was tried."""

    calendar: Calendar
    score: Score
    is_exhaustive: bool


def best_calendar(
    tasks: Sequence[FleetTask], num_nodes: int, cost: Interruption, objective: str, seed: int = 0
) -> Ordered:
    """The best of all calendars where these are few, else of a local search from several starts."""
    tried: dict[Genome, tuple[Score, Calendar]] = {}

    def score_of(genome: Genome) -> Score:
        if genome not in tried:
            order, nodes = genome
            found = placed([(tasks[place], nodes[place]) for place in order], num_nodes, cost)
            calendar = [found[order.index(place)] for place in range(len(tasks))]
            tried[genome] = score(tasks, calendar, objective), calendar
        return tried[genome][0]

    sizes = [_choices(task) for task in tasks]
    most = _MOST_TRIED // (_ELASTIC_TAKE if any(task.job.elastic for task in tasks) else 1)
    is_small = factorial(len(tasks)) * prod(map(len, sizes)) <= most
    if is_small:
        for order in permutations(range(len(tasks))):
            for chosen in product(*sizes):
                score_of((order, chosen))
    else:
        rng = Random(seed)
        for genome in _starts(tasks, sizes, rng):
            before, at, better = len(tried), genome, [genome]
            while better and len(tried) < most:
                at, near = better[0], list(_neighbours(better[0], sizes))
                rng.shuffle(near)
                better = list(islice((one for one in near if score_of(one) < score_of(at)), 1))
            if len(tried) >= most or len(tried) == before:
                break
    found, calendar = min(tried.values(), key=lambda pair: pair[0])
    return Ordered(calendar, found, is_small)


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


def _starts(
    tasks: Sequence[FleetTask], sizes: Sequence[Sequence[int]], rng: Random
) -> Iterator[Genome]:
    """By deadline and by length, with the fewest node-seconds and at full speed; then at random."""
    places, pairs = range(len(tasks)), list(zip(sizes, tasks, strict=True))
    few = tuple(min((abs(n) * t.seconds[abs(n)], n) for n in own)[1] for own, t in pairs)
    fast = tuple(min((t.seconds[abs(n)], n) for n in own)[1] for own, t in pairs)
    by_deadline = sorted(places, key=lambda i: (tasks[i].job.deadline_s, -tasks[i].job.priority))
    for order in (by_deadline, sorted(places, key=lambda i: -tasks[i].fastest_s)):
        yield from ((tuple(order), few), (tuple(order), fast))
    while True:
        order = rng.sample(places, len(tasks))
        yield tuple(order), tuple(rng.choice(own) for own in sizes)


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
