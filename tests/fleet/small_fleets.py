"""Small fleets with made-up speeds, and all their calendars by another road."""

import random
from collections.abc import Iterator
from itertools import product
from math import inf

from twinstream.fleet.jobs import FleetFile, FleetJob, fleet_of
from twinstream.fleet.rates import FleetTask, SpeedOnNodes, tasks_of

HOUR_S = 3600.0


def speed(job: FleetJob, nodes: int) -> SpeedOnNodes:
    """Less than linear, of each model by another power; an error of a tenth."""
    power = 0.6 + 0.1 * (len(job.model) % 5)
    rate = 1e5 * nodes**power
    return SpeedOnNodes(nodes=nodes, layout=f"dp{nodes}", tokens_per_s=rate, error=0.1)


def random_fleet(seed: int, *, elastic: bool = False, jobs: int = 3, nodes: int = 3, **more):
    """Jobs of one to nine hours of a node, some arriving late, deadlines that may clash."""
    rng = random.Random(seed)
    found = []
    for number in range(jobs):
        tokens = int(rng.uniform(1, 9) * HOUR_S * 1e5)
        arrives = rng.choice([0.0, 0.0, 1.5])
        found.append(
            {"name": f"job{number}", "model": "m" * rng.randint(1, 5), "tokens": tokens,
             "seq_len": 1024, "global_batch": 64, "arrives_hours": arrives,
             "deadline_hours": arrives + 10 * rng.uniform(0.9, 1.5), "elastic": elastic,
             "priority": rng.choice([1.0, 2.0]), "nodes": list(range(1, nodes + 1))}
        )  # fmt: skip
    return fleet_of(
        {"cluster": "h100_dgx", "nodes": nodes, "jobs": found, "checkpoint_s": 0.0, **more}
    )


def tasks(fleet: FleetFile) -> list[FleetTask]:
    return tasks_of(fleet, speed, "fleet")


def best_by_enumeration(
    found: list[FleetTask], nodes: int, restart_s: float
) -> tuple[float, float]:
    """(Weight of missed deadlines, makespan): at every arrival and end all numbers of nodes of all
    jobs are tried; elastic jobs may change theirs there, which costs a restart.
    """
    best = [(inf, inf)]

    def choices(now: float, left: list[float], have: list[int]) -> Iterator[list[int]]:
        options = []
        for task, share, size in zip(found, left, have, strict=True):
            if share <= 0 or task.job.arrives_s > now:
                options.append([0])
            elif size and not task.job.elastic:
                options.append([size])
            else:
                options.append([0, *task.seconds])
        return ([*one] for one in product(*options) if sum(one) <= nodes)

    def walk(now, left, have, begun, debts, reached):
        missed, last = reached
        if (missed, last) >= best[0]:
            return
        if all(share <= 0 for share in left):
            best[0] = (missed, last)
            return
        for sizes in choices(now, left, have):
            owed = [
                restart_s if size and size != old and one else (debt if size == old else 0.0)
                for size, old, one, debt in zip(sizes, have, begun, debts, strict=True)
            ]
            ends = [
                now + debt + share * task.seconds[size] if size else inf
                for task, share, size, debt in zip(found, left, sizes, owed, strict=True)
            ]
            arrivals = [t.job.arrives_s for t in found if t.job.arrives_s > now]
            then = min([*ends, *arrivals])
            if then == inf:
                continue
            after, missed_then, last_then = [], missed, last
            for task, share, size, debt, end in zip(found, left, sizes, owed, ends, strict=True):
                trained = max(0.0, then - now - debt) / task.seconds[size] if size else 0.0
                after.append(0.0 if end <= then + 1e-9 else share - trained)
                if size and end <= then + 1e-9:
                    last_then = max(last_then, end)
                    missed_then += task.job.priority * (end > task.job.deadline_s + 1e-6)
            debts_then = [max(0.0, debt - (then - now)) for debt in owed]
            begun_then = [one or size > 0 for one, size in zip(begun, sizes, strict=True)]
            kept = [size if share > 0 else 0 for size, share in zip(sizes, after, strict=True)]
            walk(then, after, kept, begun_then, debts_then, (missed_then, last_then))

    none = [0.0] * len(found)
    start = min(task.job.arrives_s for task in found)
    walk(start, [1.0] * len(found), [0] * len(found), [False] * len(found), none, (0.0, 0.0))
    return best[0]
