"""What all ranks ran, joined with what is predicted of their classes, and fitted."""

from typing import Any

import pytest

from tests.helpers.tiny_chains import WORKLOADS, small
from twinstream.clusters.pipeline import plan_pipeline
from twinstream.clusters.running.measured import rank_names
from twinstream.fidelity.ranks_fit import fit_ranks
from twinstream.hardware_profiles.clusters.curves import CollectiveCurve
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine, Number
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.analysis.comparison import compare
from twinstream.schedule.cluster.splitting import expanded
from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import Timeline, TimelineMismatch
from twinstream.simulator.replay import simulate
from twinstream.simulator.stragglers import slower

SPEC = small("tiny", num_layers=4)
WORKLOAD = WORKLOADS["packed"].model_copy(update={"rounds_per_step": 4})
MESSAGE_NS, SUM_NS = 300_000.0, 900_000.0


def schedule_of(**fields: Any) -> Schedule:
    return plan_pipeline(
        Job.of_step(SPEC, WORKLOAD, Recipe(), Layout(**fields)), load_machine("cpu")
    )


def cluster_of(num_ranks: int) -> Cluster:
    """Messages and sums take what they take, whatever their size."""

    def number(value: float) -> Number:
        return Number(value=value, kind="assumed", source="a test")

    def curve(collective: Any, time_ns: float) -> CollectiveCurve:
        return CollectiveCurve(
            collective=collective, ranks=2, ranks_per_node=2, lines=((time_ns, 0.0),),
            least_bytes=1, most_bytes=2**30, kind="assumed", source="a test",
        )  # fmt: skip

    return Cluster(
        name="given", description="A test's.", machine="cpu", gpus_per_node=number(num_ranks),
        most_nodes=number(1), compute_lost=number(0),
        curves=(curve("send_recv", MESSAGE_NS), curve("all_reduce", SUM_NS)),
    )  # fmt: skip


def as_measured(
    schedule: Schedule, machine: Machine, slow: dict[str, Machine] | None = None
) -> Timeline:
    """What ranks would measure that take the simulator's time: all of them, on one clock."""
    ranks = expanded(schedule)
    found = simulate(ranks, machine, cluster_of(schedule.mesh.size), slow)
    names = rank_names(schedule)
    firsts = {
        one.name: next(n for n in names if n.startswith(one.name)) for one in schedule.classes
    }
    told = found.provenance.model_copy(update={"kind": "measured"})
    return found.model_copy(
        update={
            "classes": {name: found.classes[first] for name, first in firsts.items()},
            "ranks": {name: found.classes[name] for name in names},
            "provenance": told,
        }
    )


def test_ranks_are_named_in_their_order():
    names = rank_names(schedule_of(pp=2, dp=2, zero=0))
    assert names == ["stage 0, dp 0", "stage 0, dp 1", "stage 1, dp 0", "stage 1, dp 1"]


def test_ranks_that_take_what_was_predicted_are_off_by_nothing():
    schedule, machine = schedule_of(pp=2, dp=2, zero=0), load_machine("cpu")
    predicted = simulate(schedule, machine, cluster_of(4))
    found = compare(schedule, predicted, as_measured(schedule, machine))
    assert [one.name for one in found.ranks] == rank_names(schedule)
    pairs = [found.step_ns, found.cold_ns, *(kind.busy_ns for kind in found.kinds)]
    pairs += [said.busy_ns for one in found.ranks for said in one.said]
    assert all(pair.predicted == pair.measured for pair in pairs)
    for one, said_ns in zip(found.ranks, _said_ns(schedule), strict=True):
        assert one.said[1].busy_ns.measured == said_ns


def _said_ns(schedule: Schedule) -> list[float]:
    """Of each rank, by counting."""
    found = []
    for one in schedule.classes:
        kinds = [op.collective for op in schedule.of(one).ops if op.kind == "communicate"]
        sums = kinds.count("all_reduce")
        found += [sums * SUM_NS + (len(kinds) - sums) * MESSAGE_NS] * schedule.num_ranks(one)
    return found


def test_a_rank_that_is_slower_than_its_class_shows():
    schedule, machine = schedule_of(pp=2, dp=2, zero=0), load_machine("cpu")
    predicted = simulate(schedule, machine, cluster_of(4))
    slow = {"stage 1, dp 1": slower(machine, 2.0)}
    found = compare(schedule, predicted, as_measured(schedule, machine, slow))
    backward = {
        one.name: kind.busy_ns.error
        for one in found.ranks
        for kind in one.comparison.kinds
        if kind.name == "block_backward"
    }
    assert backward.pop("stage 1, dp 1") == pytest.approx(-0.5, abs=0.01)
    assert set(backward.values()) == {0.0}
    assert found.step_ns.error < -0.1


def test_a_timeline_of_another_schedule_is_refused():
    machine = load_machine("cpu")
    one, other = schedule_of(pp=2, dp=2, zero=0), schedule_of(pp=4)
    predicted = simulate(one, machine, cluster_of(4))
    with pytest.raises(TimelineMismatch, match="stage 3"):
        compare(one, predicted, as_measured(other, machine))


def test_a_fit_finds_kernels_that_share_cores_and_what_is_said():
    schedule, base = schedule_of(pp=2, dp=2, zero=0), load_machine("cpu")
    measured = as_measured(schedule, slower(base, 3.0))
    found = fit_ranks(base, [(schedule, measured)], "here", "a test")
    times = {curve.collective: {ns for _, ns in curve.points} for curve in found.cluster.curves}
    assert times == {"send_recv": {MESSAGE_NS}, "all_reduce": {SUM_NS}}
    assert "3.00 times" in found.cluster.description
    again = simulate(schedule, found.machine, found.cluster)
    assert again.step_ns == pytest.approx(measured.step_ns, rel=0.02)
    other = schedule_of(pp=4)
    there = as_measured(other, slower(base, 3.0))
    elsewhere = simulate(other, found.machine, found.cluster)
    assert elsewhere.step_ns == pytest.approx(there.step_ns, rel=0.02)


def test_runs_of_different_numbers_of_ranks_are_no_profile():
    base = load_machine("cpu")
    runs = [(s, as_measured(s, base)) for s in (schedule_of(pp=2), schedule_of(pp=4))]
    with pytest.raises(CalibrationError, match="runs of 2, 4 ranks"):
        fit_ranks(base, runs, "here", "a test")
