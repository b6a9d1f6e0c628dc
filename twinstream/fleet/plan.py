"""The plan of a fleet: jobs predicted, placed, bounded, charged and played."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Literal

from twinstream.cost.bill import CostError, price_at
from twinstream.fleet.bounds import FleetBounds, bounds_of
from twinstream.fleet.calendar import Booking, Interruption, booked
from twinstream.fleet.failures import FailureStudy, play, study_failures
from twinstream.fleet.jobs import HOUR_S, FleetError, FleetFile
from twinstream.fleet.ordering import best_calendar
from twinstream.fleet.rates import (
    FleetTask,
    Predict,
    SpeedOnNodes,
    require_reachable,
    tasks_of,
    worst_error,
)
from twinstream.hardware_profiles.clusters.loader import load_cluster, place_names
from twinstream.schedule.node import Node

_ALIKE_S = 1e-6


class PlannedJob(Node):
    """One job of the plan; times in seconds from the start of the calendar.

    Fields:
        speeds: what was predicted, by count of nodes.
        earliest_end_s, latest_end_s: if all speeds are off by their error; None where one is not
            known.
        outcome: of its deadline: met, at risk (not met if speeds are as slow as their error
            allows), missed; None without one.
    """

    name: str
    model: str
    elastic: bool
    priority: float
    deadline_s: float | None
    start_s: float
    end_s: float
    earliest_end_s: float | None
    latest_end_s: float | None
    outcome: Literal["met", "at risk", "missed"] | None
    speeds: tuple[SpeedOnNodes, ...]


class FleetPlan(Node):
    """Which job runs on which nodes with which layout, when; and what no plan can beat.

    Fields:
        is_best: of the calendars in which every job keeps its nodes none is better; False where
            jobs are elastic, or not all calendars were tried.
        earliest_makespan_s, latest_makespan_s: if all speeds are off by their error.
        busy_share: of the nodes, until the last job ends.
        gpu_hours, money: of the nodes while jobs hold them.
        played: with failures, None where nodes never fail.
    """

    cluster: str
    nodes: int
    gpus_per_node: int
    objective: str
    jobs: tuple[PlannedJob, ...]
    calendar: tuple[Booking, ...]
    makespan_s: float
    earliest_makespan_s: float | None
    latest_makespan_s: float | None
    mean_end_s: float
    deadlines: int
    deadlines_met: int
    bounds: FleetBounds
    is_best: bool
    busy_share: float
    gpu_hours: float
    money: float | None
    price_per_gpu_hour: float | None
    played: FailureStudy | None

    def records(self) -> list[dict[str, object]]:
        """A row for each stretch of the calendar."""
        jobs = {job.name: job for job in self.jobs}
        rows = []
        for one in self.calendar:
            speed = next(s for s in jobs[one.job].speeds if s.nodes == len(one.nodes))
            about = {"model": jobs[one.job].model, "layout": speed.layout,
                     "tokens_per_s": speed.tokens_per_s, "error": speed.error}  # fmt: skip
            nodes = " ".join(map(str, one.nodes))
            rows.append({**one.model_dump(), "nodes": nodes, **about})
        return rows


def plan_fleet(
    fleet: FleetFile, predict: Predict, *, source: str = "the fleet", plays: int = 20,
    may_be_late: bool = False,
    on_job: Callable[[], object] = lambda: None,
) -> FleetPlan:  # fmt: skip
    """Plan a fleet.

    Args:
        predict: how fast a job is on so many nodes.
        source: what errors call the fleet.
        plays: with failures, where nodes fail.
        may_be_late: a deadline that cannot be reached is no error.
        on_job: is called whenever a job is predicted.

    Raises:
        TwinstreamError: the cluster is not known, a job fits nowhere, or cannot meet its deadline.
    """
    cluster = load_cluster(fleet.cluster)
    if cluster.most_nodes is not None and fleet.nodes > cluster.count("most_nodes"):
        most = cluster.count("most_nodes")
        raise FleetError(f"{source}: nodes = {fleet.nodes} of {cluster.name}, which has {most:,}")
    price = _price(fleet, place_names(cluster), source)
    tasks = tasks_of(fleet, predict, source, on_job)
    if not may_be_late:
        require_reachable(tasks, source)
    cost = Interruption(fleet.checkpoint_s, fleet.restart_s)
    ordered = best_calendar(tasks, fleet.nodes, cost, fleet.objective)
    bookings = booked([task.job.name for task in tasks], ordered.calendar, fleet.nodes)
    jobs = _jobs(fleet, tasks, bookings)
    makespan_s, has_error = max(job.end_s for job in jobs), worst_error(tasks) is not None
    node_s = sum((one.end_s - one.start_s) * len(one.nodes) for one in bookings)
    per_node = cluster.count("gpus_per_node")
    gpu_hours = node_s / HOUR_S * per_node
    fails = fleet.failures_per_node_hour > 0
    return FleetPlan(
        cluster=cluster.name, nodes=fleet.nodes, gpus_per_node=per_node, objective=fleet.objective,
        jobs=jobs, calendar=tuple(bookings), makespan_s=makespan_s,
        earliest_makespan_s=max(job.earliest_end_s or 0.0 for job in jobs) if has_error else None,
        latest_makespan_s=max(job.latest_end_s or 0.0 for job in jobs) if has_error else None,
        mean_end_s=sum(job.end_s for job in jobs) / len(jobs),
        deadlines=sum(job.deadline_s is not None for job in jobs),
        deadlines_met=sum(job.outcome in ("met", "at risk") for job in jobs),
        bounds=bounds_of(tasks, fleet.nodes),
        is_best=ordered.is_exhaustive and not any(task.job.elastic for task in tasks),
        busy_share=node_s / (makespan_s * fleet.nodes), gpu_hours=gpu_hours,
        money=None if price is None else price * gpu_hours, price_per_gpu_hour=price,
        played=study_failures(fleet, tasks, bookings, plays) if fails else None,
    )  # fmt: skip


def _price(fleet: FleetFile, names: Sequence[str], source: str) -> float | None:
    price = price_at(fleet.price_per_gpu_hour, names)
    if price is None and fleet.price_per_gpu_hour is not None:
        assert isinstance(fleet.price_per_gpu_hour, dict)
        raise CostError(
            f"{source}: price_per_gpu_hour is of {', '.join(fleet.price_per_gpu_hour)}, and the "
            f"cluster is {names[0]}: add {names[0]} = 2.5"
        )
    return price


def _jobs(
    fleet: FleetFile, tasks: Sequence[FleetTask], bookings: Sequence[Booking]
) -> tuple[PlannedJob, ...]:
    """Jobs with their times, and how far these may be off by the errors of speeds together."""
    ranges: list[dict[str, float] | None] = [None, None]
    if worst_error(tasks) is not None:
        errors = {
            task.job.name: max(speed.error or 0.0 for speed in task.speeds.values())
            for task in tasks
        }
        ranges = [
            dict(play(fleet, tasks, bookings, slower=slower).ends_s)
            for slower in (
                {name: 1 / (1 + error) for name, error in errors.items()},
                {name: 1 / max(1 - error, 1e-3) for name, error in errors.items()},
            )
        ]
    found = []
    for task in tasks:
        job, own = task.job, [one for one in bookings if one.job == task.job.name]
        early, late = (None if times is None else times[job.name] for times in ranges)
        found.append(
            PlannedJob(
                name=job.name, model=job.model, elastic=job.elastic, priority=job.priority,
                deadline_s=None if job.deadline_s == inf else job.deadline_s,
                start_s=own[0].start_s, end_s=own[-1].end_s, earliest_end_s=early,
                latest_end_s=late, outcome=_outcome(job.deadline_s, own[-1].end_s, late),
                speeds=tuple(task.speeds.values()),
            )
        )  # fmt: skip
    return tuple(found)


def _outcome(
    deadline_s: float, end_s: float, latest_s: float | None
) -> Literal["met", "at risk", "missed"] | None:
    if deadline_s == inf:
        return None
    if end_s > deadline_s + _ALIKE_S:
        return "missed"
    return "met" if latest_s is not None and latest_s <= deadline_s + _ALIKE_S else "at risk"
