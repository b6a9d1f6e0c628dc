"""The played calendar: without failures the plan itself, with them what a formula says."""

from math import exp

import pytest

from tests.fleet.small_fleets import random_fleet, speed, tasks
from twinstream.fleet import ordering
from twinstream.fleet.failures import play, study_failures
from twinstream.fleet.jobs import fleet_of
from twinstream.fleet.plan import plan_fleet

_HOUR_S = 3600.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("elastic", [False, True])
def test_without_failures_it_plays_as_planned(seed, elastic, monkeypatch):
    monkeypatch.setattr(ordering, "_MOST_TRIED", 300)
    fleet = random_fleet(seed, elastic=elastic, jobs=5, nodes=4, checkpoint_s=45.0)
    plan = plan_fleet(fleet, speed)
    played = play(fleet, tasks(fleet), plan.calendar)
    assert played.ends_s == pytest.approx({job.name: job.end_s for job in plan.jobs})
    assert played.failures == 0


def _one_job(rate: float, hours: int, nodes: int = 2):
    return fleet_of(
        {"cluster": "h100_dgx", "nodes": nodes, "failures_per_node_hour": rate,
         "checkpoint_s": 0.0, "checkpoint_interval_s": _HOUR_S, "restart_s": 900.0,
         "jobs": [{"name": "a", "model": "m", "seq_len": 1024, "global_batch": 64, "nodes": nodes,
                   "tokens": int(hours * _HOUR_S * 1e5 * nodes**0.7)}]}
    )  # fmt: skip


def test_the_mean_with_failures_is_that_of_the_formula():
    """To get through L without a failure at rate r takes (e^(r L) - 1) e^(r R) / r on average,
    where each failure costs a restart R, in which nodes may fail, too.
    """
    fleet = _one_job(rate=0.15, hours=20)
    plan = plan_fleet(fleet, speed, plays=400)
    rate, piece_h, restart_h = 0.15 * 2, 1.0, 0.25
    expected_h = 20 * (exp(rate * piece_h) - 1) * exp(rate * restart_h) / rate
    assert plan.makespan_s == pytest.approx(20 * _HOUR_S)
    assert plan.played is not None
    assert plan.played.makespan_s == pytest.approx(expected_h * _HOUR_S, rel=0.015)
    assert plan.played.least_makespan_s < plan.played.makespan_s < plan.played.most_makespan_s


def test_the_same_seeds_fail_alike():
    fleet = _one_job(rate=0.2, hours=10)
    plan = plan_fleet(fleet, speed)
    once, again = (study_failures(fleet, tasks(fleet), plan.calendar, 5) for _ in range(2))
    assert once == again
    ends = {play(fleet, tasks(fleet), plan.calendar, seed=seed).makespan_s for seed in range(5)}
    assert len(ends) == 5


def test_a_failure_delays_who_waits_for_the_nodes():
    two = [
        {"name": name, "model": "m", "seq_len": 1024, "global_batch": 64, "nodes": 1,
         "tokens": int(5 * _HOUR_S * 1e5)}
        for name in "ab"
    ]  # fmt: skip
    fleet = fleet_of(
        {"cluster": "h100_dgx", "nodes": 1, "failures_per_node_hour": 0.5, "jobs": two}
    )
    plan = plan_fleet(fleet, speed)
    first, second = sorted(plan.jobs, key=lambda job: job.end_s)
    played = play(fleet, tasks(fleet), plan.calendar, seed=3)
    late = played.ends_s[first.name] - first.end_s
    assert late > 0 and played.ends_s[second.name] >= second.end_s + late - 1e-6


def test_errors_of_speeds_are_carried_to_times():
    fleet = random_fleet(2, jobs=2, nodes=1)
    fleet = fleet.model_copy(
        update={"jobs": tuple(j.model_copy(update={"arrives_hours": 0.0}) for j in fleet.jobs)}
    )
    plan = plan_fleet(fleet, speed)
    for job in plan.jobs:  # one after the other on one node: all scale together
        assert job.earliest_end_s == pytest.approx(job.end_s / 1.1)
        assert job.latest_end_s == pytest.approx(job.end_s / 0.9)
        late = job.deadline_s is not None and job.end_s / 0.9 > job.deadline_s
        if job.outcome != "missed":
            assert job.outcome == ("at risk" if late else "met")
