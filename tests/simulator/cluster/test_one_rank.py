"""A cluster of one rank is the ordinary simulator."""

import pytest
from hypothesis import given, settings

from tests.clusters.random_jobs import DENSE, GPT, MIXTURE, job_of, lowered
from tests.hardware_profiles.machines import number
from tests.helpers.flat_machine import flat_machine
from tests.helpers.schedules import schedules
from tests.simulator.cluster.real_clusters import spans_of, two_passes
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.schedule.document import Axis, Mesh, RankClass, RankSchedule, Schedule
from twinstream.schedule.timeline import PassSpans
from twinstream.simulator.costs import MachineCosts
from twinstream.simulator.network_costs import ClusterCosts
from twinstream.simulator.replay import replay_cluster, replay_passes, simulate_rank

ALONE = Cluster(name="alone", description="", machine="h100", gpus_per_node=number(1))


def of_one_rank(schedule: RankSchedule) -> Schedule:
    return Schedule(
        mesh=Mesh(axes=(Axis(name="dp", size=1),), ranks_per_node=1),
        classes=(RankClass(name="all", schedule="all", cells={}),),
        schedules={"all": schedule}, order=(), model={}, layout={}, seq_len=8, global_batch=1,
        model_flops=1, machine=schedule.machine,
    )  # fmt: skip


def shown(passes: list[PassSpans]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(one.start_ns, one.end_ns) for one in passes]


@settings(max_examples=60)
@given(schedules())
def test_any_schedule_runs_as_in_the_ordinary_simulator(pair):
    _, schedule = pair
    document, machine = of_one_rank(schedule), flat_machine()
    passes = replay_passes(schedule, MachineCosts(schedule, machine), 3)
    assert passes[0].end_ns
    costs = ClusterCosts(document, ALONE, machine)
    (timeline,) = replay_cluster(document, costs, "alone", num_passes=3).classes.values()
    assert timeline.cold is not None
    assert shown([timeline.cold]) == shown(passes[:1])
    last = shown([*timeline.passes])  # the second and the third, if the second is not the first
    assert last in (shown(passes[:2]), shown(passes[1:]))


@pytest.mark.parametrize("cluster", ["h100_dgx", "rtx4090_ethernet"])
@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        (DENSE, {}),
        (DENSE, {"recompute": "full", "pipeline": "gpipe"}),
        (DENSE, {"recompute": "selective", "zero": 3}),
        (GPT, {"pipeline": "zero_bubble", "micro_batch": 2}),
        (MIXTURE, {}),
    ],
)
def test_every_op_runs_when_the_ordinary_simulator_says(shape, fields, cluster):
    (schedule,) = (document := lowered(job_of(3, shape, **fields))).schedules.values()
    machine = machine_of(load_cluster(cluster))
    ordinary = simulate_rank(schedule, machine)
    found = two_passes(document, cluster)
    costs = MachineCosts(schedule, machine)
    passes = replay_passes(schedule, costs, 2)
    (timeline,) = found.classes.values()
    spans = spans_of(timeline)
    for at, op in enumerate(schedule.ops):
        both = [(one.start_ns[at], one.end_ns[at]) for one in passes]
        assert list(spans[op.op_id][1:]) == both
    assert found.step_ns == ordinary.step_ns
