"""Steps of many microbatches from steps of few: as the whole step simulated says."""

from typing import Any

import pytest

from tests.clusters.random_jobs import DENSE, MIXTURE, job_of
from tests.simulator.cluster.real_clusters import calm_cluster, two_passes
from twinstream.clusters.predict import Prediction, predict, without_reduction
from twinstream.clusters.timed_step import document_of
from twinstream.hardware_profiles.collectives.rank_group import on_one_node
from twinstream.hardware_profiles.collectives.timing import collective_time_ns
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import LayoutError
from twinstream.schedule.analysis.occupancy import slot_bytes_by_role

H100, ETHERNET = "h100_dgx", "rtx4090_ethernet"
LARGE = DENSE.model_copy(
    update={"d_model": 2048, "num_heads": 16, "num_kv_heads": 16, "head_dim": 128, "d_ff": 5632}
)
ORDERS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("ring", 2), ("zero_bubble", 1)]


def assert_close(job: Job, cluster: str, rel: float) -> None:
    """Step, and bytes by class of tensor of the fullest stage, exactly."""
    document = document_of(job, calm_cluster(cluster))
    whole_ns = two_passes(document, cluster).step_ns
    found = predict(job, calm_cluster(cluster))
    assert found.step_s * 1e9 == pytest.approx(whole_ns, rel=rel)
    stages = [slot_bytes_by_role(document.of(one)) for one in document.classes]
    expected = max(stages, key=lambda stage: sum(stage.values()))
    assert {kind: size for kind, size in found.memory.items() if kind != "reserve"} == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"pp": 4, "dp": 2},
        {"pp": 2, "dp": 4, "zero": 2},
        {"pp": 2, "tp": 2, "dp": 2, "recompute": "full"},
        {"pp": 2, "dp": 8, "zero": 3},
    ],
)
@pytest.mark.parametrize(("order", "virtual"), ORDERS)
def test_a_step_is_linear_in_microbatches(order: str, virtual: int, fields: dict[str, Any]):
    """All but to the nanosecond, but for what meets other kernels as it goes on: the messages of
    breadth first, and what is reduced for every microbatch."""
    job = job_of(8 * fields["pp"], LARGE, 2048, pipeline=order, virtual_stages=virtual, **fields)
    assert_close(job, H100, 5e-4 if order == "ring" or fields.get("zero") else 5e-5)


@pytest.mark.parametrize(
    "fields", [{"dp": 4, "zero": 3}, {"tp": 2, "dp": 2}, {"cp": 2, "dp": 2, "zero": 2}]
)
def test_a_step_without_stages_is_linear_in_microbatches(fields):
    assert_close(job_of(12, LARGE, 2048, **fields), H100, 2e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"pp": 4, "dp": 2},
        {"pp": 2, "dp": 2, "zero": 2},
        {"tp": 2, "dp": 2},
        {"pp": 2, "cp": 2, "dp": 2},
    ],
)
def test_over_a_slow_network_too(fields):
    assert_close(job_of(16, LARGE, 2048, **fields), ETHERNET, 2e-3)


def test_few_microbatches_are_simulated_as_they_are():
    assert_close(job_of(5, MIXTURE, pp=2, ep=2, dp=2), H100, 0.0)


def prediction(shape: ModelSpec = LARGE, **fields: Any) -> Prediction:
    return predict(job_of(8, shape, 2048, **fields), calm_cluster(H100))


def test_figures_of_a_prediction_hang_together():
    found = prediction(pp=2, dp=2, tp=2)
    assert found.num_gpus == 8 and found.tokens_per_step == 8 * 2 * 2048
    assert found.tokens_per_s == found.tokens_per_step / found.step_s
    reached = found.mfu * found.peak_flop_per_s * found.num_gpus
    assert reached * found.step_s == pytest.approx(found.model_flops)
    assert found.memory_bytes == sum(found.memory.values()) and found.fits
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_what_does_not_fit_says_so():
    large = LARGE.model_copy(update={"d_model": 16384, "d_ff": 65536})
    assert not prediction(large, tp=2).fits and prediction(large, tp=8, zero=3, dp=8).fits


def test_recomputation_takes_time_and_saves_memory():
    none, selective, full = (prediction(recompute=r) for r in ("none", "selective", "full"))
    assert none.step_s < selective.step_s < full.step_s
    assert none.memory["activation"] > selective.memory["activation"] > full.memory["activation"]


def test_zero_saves_memory_stage_by_stage():
    memory = [prediction(dp=8, zero=zero).memory_bytes for zero in range(4)]
    assert memory == sorted(memory, reverse=True)


def test_switches_that_reduce_can_be_left_out():
    cluster = calm_cluster(H100)
    plain = without_reduction(cluster)
    with_, without = (
        collective_time_ns(one, "all_reduce", 2**28, on_one_node(8)) for one in (cluster, plain)
    )
    assert without.algorithm == "ring" and without.time_ns > with_.time_ns


def test_an_impossible_layout_is_refused():
    with pytest.raises(LayoutError, match="8 heads are not divisible by tp 16"):
        predict(job_of(1, tp=16, sequence_parallel=False), calm_cluster(H100))
