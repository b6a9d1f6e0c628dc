"""The planned calendar is the best of all, or its distance is known; its bounds hold."""

from itertools import pairwise

import pytest

from tests.fleet.small_fleets import best_by_enumeration, random_fleet, speed, tasks
from twinstream.fleet import ordering
from twinstream.fleet.bounds import bounds_of, least_makespan_s
from twinstream.fleet.calendar import Interruption, booked
from twinstream.fleet.ordering import best_calendar
from twinstream.fleet.plan import plan_fleet

_GAP_OF_ELASTIC = 0.03  # the largest of these fleets


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("objective", ["deadlines", "makespan"])
def test_no_calendar_of_jobs_that_keep_their_nodes_is_better(seed, objective):
    fleet = random_fleet(seed, objective=objective)
    found = tasks(fleet)
    planned = best_calendar(found, 3, Interruption(0.0, 600.0), objective)
    assert planned.is_exhaustive
    best = best_by_enumeration(found, 3, 600.0)
    if objective == "deadlines":
        assert planned.score[:2] == pytest.approx(best, abs=1e-3)
    else:
        assert planned.score[0] <= best[1] + 1e-3


@pytest.mark.parametrize("seed", range(8))
def test_elastic_jobs_end_near_the_best_of_all_calendars(seed):
    fleet = random_fleet(seed, elastic=True, objective="makespan")
    found = tasks(fleet)
    rigid = tasks(random_fleet(seed))
    cost = Interruption(0.0, 600.0)
    planned = best_calendar(found, 3, cost, "makespan").score[0]
    every = [t.__class__(t.job.model_copy(update={"deadline_hours": None}), t.speeds, t.seconds)
             for t in found]  # fmt: skip
    best = best_by_enumeration(every, 3, 600.0)[1]
    assert best - 1e-3 <= planned <= best * (1 + _GAP_OF_ELASTIC)
    assert planned <= best_calendar(rigid, 3, cost, "makespan").score[0] + 1e-3


@pytest.mark.parametrize("seed", range(8))
def test_bounds_hold_for_the_best_calendar(seed):
    fleet = random_fleet(seed, elastic=seed % 2 == 0)
    found = tasks(fleet)
    bounds = bounds_of(found, 3)
    missed, _ = best_by_enumeration(found, 3, 0.0)
    total = sum(task.job.priority for task in found)
    assert total - missed <= bounds.priority_met + 1e-6
    free = [t.__class__(t.job.model_copy(update={"deadline_hours": None}), t.speeds, t.seconds)
            for t in found]  # fmt: skip
    _, makespan = best_by_enumeration(free, 3, 0.0)
    assert bounds.makespan_s <= makespan + 1e-3


def test_the_bound_is_the_area_where_speed_grows_with_nodes():
    fleet = random_fleet(0, jobs=4, nodes=4)
    found = [
        task.__class__(
            task.job.model_copy(update={"arrives_hours": 0.0}), task.speeds,
            {n: 8000.0 / n for n in task.seconds},
        )
        for task in tasks(fleet)
    ]  # fmt: skip
    assert least_makespan_s(found, 4) == pytest.approx(4 * 8000 / 4, rel=1e-6)
    alone = [found[0].__class__(found[0].job, found[0].speeds, {1: 8000.0})]
    assert least_makespan_s(alone, 4) == pytest.approx(8000, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_no_node_has_two_jobs_and_every_job_is_done_once(seed, monkeypatch):
    monkeypatch.setattr(ordering, "_MOST_TRIED", 300)
    fleet = random_fleet(seed, elastic=True, jobs=6, nodes=5, checkpoint_s=30.0)
    plan = plan_fleet(fleet, speed)
    for node in range(5):
        own = sorted((b.start_s, b.end_s) for b in plan.calendar if node in b.nodes)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(own))
    for job in plan.jobs:
        own = [one for one in plan.calendar if one.job == job.name]
        assert sum(one.share for one in own) == pytest.approx(1)
        for one in own:
            speeds = {s.nodes: s.tokens_per_s for s in job.speeds}
            tokens = next(j.tokens for j in fleet.jobs if j.name == job.name)
            trains = one.share * tokens / speeds[len(one.nodes)] * fleet.saving_share
            around = fleet.restart_s * one.restarts + fleet.checkpoint_s * one.saves
            assert one.end_s - one.start_s == pytest.approx(trains + around)
    assert plan.makespan_s >= plan.bounds.makespan_s - 1e-3
    assert plan.gpu_hours >= plan.bounds.node_seconds / 3600 * 8 - 1e-6


def test_a_booking_takes_the_nodes_that_its_job_had(monkeypatch):
    monkeypatch.setattr(ordering, "_MOST_TRIED", 300)
    fleet = random_fleet(1, elastic=True, nodes=4, jobs=4)
    found = tasks(fleet)
    ordered = best_calendar(found, 4, Interruption(0.0, 60.0), "makespan")
    bookings = booked([t.job.name for t in found], ordered.calendar, 4)
    by_job = {}
    for one in bookings:
        before = by_job.get(one.job)
        if before is not None and len(one.nodes) >= len(before):
            assert set(before) <= set(one.nodes)
        by_job[one.job] = one.nodes
