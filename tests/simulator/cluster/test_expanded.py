"""A class of ranks takes the same nanoseconds as each of its ranks does when all are simulated."""

from typing import Any

import pytest

from tests.clusters.random_jobs import DENSE, MIXTURE, job_of, lowered, random_job
from tests.simulator.cluster.real_clusters import spans_of, two_passes
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.models.parallel.job import Job
from twinstream.schedule.cluster.splitting import expanded
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import Schedule

H100, ETHERNET = "h100_dgx", "rtx4090_ethernet"
FOUR_LAYERS = DENSE.model_copy(update={"num_layers": 4})
TWO_OF_EXPERTS = MIXTURE.model_copy(update={"num_layers": 2})


def on(cluster: str, job: Job) -> Schedule:
    return lowered(job, load_cluster(cluster).count("gpus_per_node"))


def assert_expands(schedule: Schedule, cluster: str) -> None:
    """Every op of every rank starts and ends when its class's does, in a cold pass and the next."""
    ranks = expanded(schedule)
    assert len(ranks.classes) == schedule.mesh.size <= 64
    assert verify(ranks) == []
    whole, single = two_passes(schedule, cluster), two_passes(ranks, cluster)
    expected = {name: spans_of(one) for name, one in whole.classes.items()}
    for one in ranks.classes:
        assert spans_of(single.classes[one.name]) == expected[one.name.partition(",")[0]], one.name
    assert single.step_ns == whole.step_ns


@pytest.mark.parametrize("cluster", [H100, ETHERNET])
@pytest.mark.parametrize(
    ("microbatches", "fields"),
    [
        (2, {"tp": 2, "pp": 2, "dp": 2, "zero": 0}),
        (4, {"tp": 2, "pp": 4, "dp": 2, "zero": 1}),
        (2, {"pp": 2, "dp": 8, "zero": 2}),
        (2, {"dp": 8, "zero": 3}),
        (2, {"tp": 4, "dp": 4, "zero": 3, "shard": 2}),
        (2, {"dp": 12, "zero": 1, "shard": 4}),
        (4, {"pp": 2, "tp": 2, "dp": 2, "virtual_stages": 2, "pipeline": "interleaved"}),
        (4, {"pp": 2, "dp": 4, "virtual_stages": 2, "pipeline": "ring", "zero": 2}),
        (3, {"pp": 4, "tp": 2, "sequence_parallel": False, "pipeline": "zero_bubble"}),
        (2, {"tp": 1, "cp": 2, "pp": 2, "dp": 2}),
    ],
)
def test_ranks_are_like_their_class(microbatches: int, fields: dict[str, Any], cluster: str):
    assert_expands(on(cluster, job_of(microbatches, FOUR_LAYERS, **fields)), cluster)


@pytest.mark.parametrize(
    "fields",
    [
        {"ep": 4, "dp": 8, "zero": 1},
        {"ep": 2, "dp": 4, "tp": 2, "pp": 2, "zero": 2},
        {"ep": 2, "dp": 2, "tp": 2, "sequence_parallel": False},
    ],
)
def test_experts_are_like_their_class(fields: dict[str, Any]):
    assert_expands(on(H100, job_of(2, TWO_OF_EXPERTS, **fields)), H100)


@pytest.mark.parametrize("fields", [{"cp": 8}, {"cp": 4, "tp": 2, "pp": 2}, {"cp": 2, "tp": 2}])
def test_rings_within_a_node_are_like_their_class(fields: dict[str, Any]):
    assert_expands(on(H100, job_of(2, FOUR_LAYERS, **fields)), H100)


def test_rings_whose_every_step_leaves_the_node_are_like_their_class():
    assert_expands(on(H100, job_of(2, FOUR_LAYERS, cp=3, tp=8, seq_len=96)), H100)


@pytest.mark.parametrize("fields", [{"cp": 4}, {"cp": 4, "pp": 2, "dp": 2, "zero": 2}])
def test_of_rings_that_leave_the_node_in_some_steps_a_class_takes_the_slowest(fields):
    """Two ranks a node: of four messages of a step two are within nodes. A class has one time for
    all: the network's. Each rank by itself is through earlier, by up to 5 % of these steps, which
    are small ones: mostly communication."""
    schedule = on(ETHERNET, job_of(2, FOUR_LAYERS, **fields))
    whole, single = two_passes(schedule, ETHERNET), two_passes(expanded(schedule), ETHERNET)
    assert 0.95 * whole.step_ns < single.step_ns < whole.step_ns


@pytest.mark.parametrize("seed", [2, 6, 7, 13, 14, 25, 28, 35, 39, 43, 44, 48, 57])
def test_ranks_of_random_layouts_are_like_their_class(seed):
    assert_expands(on(H100, random_job(seed)), H100)


@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 2, "pp": 4, "dp": 8, "zero": 2},
        {"tp": 4, "cp": 2, "pp": 2, "dp": 4, "zero": 3},
        {"pp": 4, "dp": 16, "virtual_stages": 2, "pipeline": "interleaved"},
    ],
)
def test_sixty_four_ranks_are_like_their_class(fields: dict[str, Any]):
    shape = DENSE if fields["pp"] == 4 else FOUR_LAYERS
    assert_expands(on(H100, job_of(8 if fields["pp"] == 4 else 2, shape, **fields)), H100)
