"""A fleet's calendar played by SimPy: nodes fail, jobs restart from their last checkpoint."""

from collections.abc import Generator, Mapping, Sequence
from math import inf
from random import Random
from statistics import fmean
from typing import Any

import simpy

from twinstream.fleet.calendar import Booking
from twinstream.fleet.jobs import HOUR_S, FleetFile
from twinstream.fleet.rates import FleetTask
from twinstream.schedule.node import Node

_ALIKE_S = 1e-6


class PlayedFleet(Node):
    """One play of a calendar: when each job ended, and how often nodes of its failed."""

    ends_s: Mapping[str, float]
    failures: int

    @property
    def makespan_s(self) -> float:
        """When the last job ended."""
        return max(self.ends_s.values())


class FailureStudy(Node):
    """What failures make of a calendar, over plays with the seeds 0, 1, ...

    Fields:
        makespan_s, least_makespan_s, most_makespan_s: mean and range over the plays.
        failures: of a play, on average.
        deadlines_met, least_deadlines_met, most_deadlines_met: mean and range.
        met_share: of each job with a deadline, in which share of the plays it met it.
    """

    plays: int
    makespan_s: float
    least_makespan_s: float
    most_makespan_s: float
    failures: float
    deadlines_met: float
    least_deadlines_met: int
    most_deadlines_met: int
    met_share: Mapping[str, float]


def study_failures(
    fleet: FleetFile, tasks: Sequence[FleetTask], bookings: Sequence[Booking], plays: int
) -> FailureStudy:
    """Play a calendar so many times."""
    found = [play(fleet, tasks, bookings, seed=seed) for seed in range(plays)]
    due = {task.job.name: task.job.deadline_s for task in tasks if task.job.deadline_s < inf}
    met = [
        {name for name, deadline_s in due.items() if one.ends_s[name] <= deadline_s + _ALIKE_S}
        for one in found
    ]
    spans, counts = [one.makespan_s for one in found], [len(one) for one in met]
    return FailureStudy(
        plays=plays, makespan_s=fmean(spans), least_makespan_s=min(spans),
        most_makespan_s=max(spans), failures=fmean(one.failures for one in found),
        deadlines_met=fmean(counts), least_deadlines_met=min(counts),
        most_deadlines_met=max(counts),
        met_share={name: fmean(name in one for one in met) for name in due},
    )  # fmt: skip


def play(
    fleet: FleetFile, tasks: Sequence[FleetTask], bookings: Sequence[Booking], *,
    seed: int | None = None, slower: Mapping[str, float] | None = None,
) -> PlayedFleet:  # fmt: skip
    """Play a calendar once; without a seed nothing fails.

    A stretch begins when its job has arrived, and what was on its nodes before and its job's own
    stretch before have ended; with failures no earlier than planned.

    Args:
        slower: times of each job over those that are predicted, by its name.
    """
    env, by_name = simpy.Environment(), {task.job.name: task for task in tasks}
    between_s, failures = fleet.checkpoint_interval_s + fleet.checkpoint_s, list[str]()

    def stretch(
        booking: Booking, place: int, before: set[simpy.Process]
    ) -> Generator[Any, Any, float]:
        """SimPy process; a failure loses the work since a checkpoint and costs a restart."""
        task, rng = by_name[booking.job], Random(f"{seed}/{place}")
        rate = 0.0 if seed is None else fleet.failures_per_node_hour / HOUR_S * len(booking.nodes)
        begin_s = booking.start_s if slower is None else task.job.arrives_s
        yield env.all_of(before)
        yield env.timeout(max(0.0, begin_s - env.now))
        setup_s = fleet.restart_s * booking.restarts
        works_s = booking.share * task.seconds[len(booking.nodes)]
        works_s *= (slower or {}).get(booking.job, 1.0)
        end_s = setup_s + works_s + fleet.checkpoint_s * booking.saves
        at_s = owed_s = 0.0  # how far it is, and what a restart takes before it goes on from there
        while (fails_s := rng.expovariate(rate) if rate else inf) < (
            left_s := owed_s + end_s - at_s
        ):
            yield env.timeout(fails_s)
            failures.append(booking.job)
            trained_s = at_s + max(0.0, fails_s - owed_s) - setup_s
            at_s = max(at_s, setup_s + max(0.0, trained_s // between_s) * between_s)
            owed_s = fleet.restart_s
        yield env.timeout(left_s)
        return float(env.now)

    done: list[simpy.Process] = []
    last_on: dict[object, simpy.Process] = {}
    for place, booking in enumerate(bookings):
        keys = (booking.job, *booking.nodes)
        before = {last_on[key] for key in keys if key in last_on}
        done.append(env.process(stretch(booking, place, before)))
        last_on.update(dict.fromkeys(keys, done[-1]))
    env.run(until=env.all_of(done))
    ends: dict[str, float] = {
        booking.job: process.value or 0.0 for booking, process in zip(bookings, done, strict=True)
    }
    return PlayedFleet(ends_s=ends, failures=len(failures))
