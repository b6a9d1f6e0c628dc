"""What no calendar can beat, by linear programs: the makespan, the deadlines, the GPU-hours.

Relaxed: a job may do any share of its work on any of its sizes, change them at no cost, and use
parts of nodes. Kept: its own length at one size after the other, and for jobs that arrive after a
and have to end by d, that N nodes have N (d - a) node-seconds.
"""

from collections.abc import Sequence
from itertools import product
from math import floor, inf

from twinstream.fleet.rates import FleetTask
from twinstream.planner.bound.program import LinearProgram
from twinstream.schedule.node import Node

_TOLERANCE = 1e-9


class FleetBounds(Node):
    """No calendar of these jobs at these speeds ends earlier, or meets more, or uses less.

    Fields:
        makespan_s: the last job of any calendar ends no earlier.
        deadlines_met: no calendar meets more of them.
        priority_met: the priorities of the deadlines that a calendar meets are no more together.
        node_seconds: no calendar uses fewer.
    """

    makespan_s: float
    deadlines_met: int
    priority_met: float
    node_seconds: float


def bounds_of(tasks: Sequence[FleetTask], num_nodes: int) -> FleetBounds:
    """All bounds of a fleet."""
    with_deadline = [task for task in tasks if task.job.deadline_s < inf]
    weights = [task.job.priority for task in with_deadline]
    count = _most_met(with_deadline, [1.0] * len(weights), num_nodes)
    return FleetBounds(
        makespan_s=least_makespan_s(tasks, num_nodes),
        deadlines_met=floor(count + _TOLERANCE * max(1, len(weights))),
        priority_met=_most_met(with_deadline, weights, num_nodes),
        node_seconds=sum(min(n * s for n, s in task.seconds.items()) for task in tasks),
    )


def least_makespan_s(tasks: Sequence[FleetTask], num_nodes: int) -> float:
    """min M: sum of n p x <= N (M - a) of jobs from a on; a + sum of p x <= M of each job."""
    unit_s = sum(task.fastest_s for task in tasks) + max(task.job.arrives_s for task in tasks)
    program = LinearProgram()
    end = program.column()
    shares = []
    for task in tasks:
        columns = {size: program.column() for size in task.seconds}
        shares.append(columns)
        program.equal([(column, 1.0) for column in columns.values()], 1.0)
        length = [(column, task.seconds[n] / unit_s) for n, column in columns.items()]
        program.at_most([*length, (end, -1.0)], -task.job.arrives_s / unit_s)
    for arrives_s in {task.job.arrives_s for task in tasks}:
        used = [
            (column, n * task.seconds[n] / unit_s / num_nodes)
            for task, columns in zip(tasks, shares, strict=True)
            if task.job.arrives_s >= arrives_s
            for n, column in columns.items()
        ]
        program.at_most([*used, (end, -1.0)], -arrives_s / unit_s)
    found = program.minimise({end: 1.0})
    assert found is not None, "jobs one after the other, each at its fastest, are a solution"
    return found.dual_objective * unit_s


def _most_met(tasks: Sequence[FleetTask], weights: Sequence[float], num_nodes: int) -> float:
    """max of sum w y: a job that meets its deadline (y = 1) does its work between a and d."""
    if not tasks:
        return 0.0
    program = LinearProgram()
    meets, shares = [], []
    for task in tasks:
        room_s = task.job.deadline_s - task.job.arrives_s
        fits = {n: s for n, s in task.seconds.items() if task.job.elastic or s <= room_s}
        columns = {n: program.column() for n in fits}
        met = program.column(upper=1.0 if fits and min(fits.values()) <= room_s else 0.0)
        program.equal([(met, -1.0), *((column, 1.0) for column in columns.values())], 0.0)
        length = [(column, fits[n] / room_s) for n, column in columns.items()]
        program.at_most([*length, (met, -1.0)], 0.0)
        meets.append(met)
        shares.append(columns)
    arrivals = {task.job.arrives_s for task in tasks}
    for arrives_s, deadline_s in product(arrivals, {task.job.deadline_s for task in tasks}):
        if deadline_s <= arrives_s:
            continue
        room = num_nodes * (deadline_s - arrives_s)
        used = [
            (column, n * task.seconds[n] / room)
            for task, columns in zip(tasks, shares, strict=True)
            if task.job.arrives_s >= arrives_s and task.job.deadline_s <= deadline_s
            for n, column in columns.items()
        ]
        if used:
            program.at_most(used, 1.0)
    found = program.minimise({met: -weight for met, weight in zip(meets, weights, strict=True)})
    assert found is not None, "to meet none is a solution"
    return min(-found.dual_objective, sum(weights))
