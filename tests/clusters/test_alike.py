"""Stages that are alike, lowered and simulated once: as the whole simulation, to the nanosecond."""

from random import Random
from typing import Any

import pytest

from tests.clusters.random_jobs import DENSE, GPT, MIXTURE, job_of
from twinstream.clusters.alike import AlikePipeline, Role, is_alike
from twinstream.clusters.predict import Prediction, Prepared
from twinstream.clusters.timed_step import TimedStep, document_of
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.presets import load_model
from twinstream.schedule.analysis.occupancy import slot_bytes_by_role
from twinstream.simulator.blocks import IrregularError
from twinstream.simulator.states import KnownStates

CLUSTERS = {name: load_cluster(name) for name in ("a100_dgx", "h100_dgx")}
LARGE = DENSE.model_copy(
    update={"d_model": 2048, "num_heads": 16, "num_kv_heads": 16, "head_dim": 128, "d_ff": 5632}
)


def assert_as_the_whole(job: Job, name: str, known: KnownStates | None = None) -> None:
    """Step, bytes of every stage, and what compute of each waits for."""
    cluster = CLUSTERS[name]
    machine = machine_of(cluster)
    pipeline = AlikePipeline(job, cluster.count("gpus_per_node"), {})
    document = document_of(job, cluster)
    whole = TimedStep.simulated(document, cluster, machine)
    step_ns, exposed, _ = pipeline.timed(cluster, machine, {} if known is None else known)
    assert step_ns == whole.step_ns
    assert exposed == whole.exposed
    stages = [slot_bytes_by_role(document.of(one)) for one in document.classes]
    assert pipeline.stage_bytes() == stages


@pytest.mark.parametrize(
    ("shape", "count", "fields"),
    [
        (LARGE, 12, {"pp": 8, "tp": 2, "dp": 2}),
        (LARGE, 13, {"pp": 7, "dp": 3, "recompute": "full"}),  # whole layers are single ops
        (GPT, 5, {"pp": 5, "tp": 4, "sequence_parallel": False, "dp_overlap": False}),
        (MIXTURE, 9, {"pp": 5, "tp": 2, "ep": 2, "dp": 2, "sequence_parallel": False}),
        (LARGE, 3, {"pp": 8, "tp": 8, "zero": 0, "dp": 4}),  # fewer microbatches than stages
    ],
)
def test_it_is_the_whole_simulation(shape: ModelSpec, count: int, fields: dict[str, Any]):
    assert_as_the_whole(job_of(count, shape, 1024, **fields), "a100_dgx")


def test_messages_that_share_links_with_collectives():
    """Two stages on a node: their messages and what tp says are on the same links."""
    job = job_of(11, LARGE, 1024, pp=6, tp=4, dp=2)
    assert_as_the_whole(job.model_copy(update={"shape": _deeper(LARGE, 12)}), "h100_dgx")


def test_a_tp_group_over_two_nodes_shares_its_nics_with_messages():
    shape = _deeper(LARGE, 6)
    assert_as_the_whole(job_of(7, shape, 1024, pp=6, tp=16, dp=1), "a100_dgx")


def test_collectives_that_overlap_products_are_waited_for_in_part():
    job = job_of(9, LARGE, 1024, pp=4, tp=4, tp_overlap=True)
    assert_as_the_whole(job, "h100_dgx")
    later = job_of(9, LARGE, 1024, pp=4, tp=4)
    cluster = CLUSTERS["h100_dgx"]
    assert Prepared(job, cluster).on(cluster).step_s < Prepared(later, cluster).on(cluster).step_s


def test_states_of_one_layout_hold_for_the_next():
    known: KnownStates = {}
    for dp in (2, 4, 2):
        assert_as_the_whole(job_of(9, LARGE, 1024, pp=4, tp=4, dp=dp), "a100_dgx", known)


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts(seed: int):
    rng = Random(seed)
    shape, pp = rng.choice([LARGE, GPT, MIXTURE]), rng.choice([3, 4, 5, 6, 9])
    shape = _deeper(shape, rng.choice([pp, pp + 1, 2 * pp]))
    dp = rng.choice([1, 2, 3])
    job = job_of(
        rng.randint(2, 24), shape, 1024, pp=pp, dp=dp, tp=rng.choice([1, 2, 4, 8]),
        ep=dp if shape.experts and dp < 3 else 1, zero=rng.choice([0, 1]),
        recompute=rng.choice(["none", "full", "selective", "mlp"]),
        sequence_parallel=rng.random() < 0.6, dp_overlap=rng.random() < 0.6,
        micro_batch=rng.choice([1, 2]),
    )  # fmt: skip
    assert_as_the_whole(job, rng.choice(list(CLUSTERS)))


@pytest.mark.parametrize("seed", range(12))
def test_what_repeats_stands_for_any_number_of_microbatches(seed: int):
    """The step of a few, made longer by its pace, is the whole simulation of more."""
    rng = Random(seed)
    fields = {"pp": rng.choice([3, 4, 7]), "tp": rng.choice([1, 4]), "dp": rng.choice([1, 2])}
    shape = _deeper(rng.choice([LARGE, GPT, MIXTURE]), fields["pp"] * rng.choice([1, 2]))
    few, more = rng.randint(24, 36), 2 * rng.randint(1, 20)
    cluster = CLUSTERS["a100_dgx"]
    pipeline = AlikePipeline(job_of(few, shape, 1024, **fields), 8, {})
    step = TimedStep(*pipeline.timed(cluster, machine_of(cluster), {}))
    assert step.pace is not None
    document = document_of(job_of(few + more, shape, 1024, **fields), cluster)
    whole = TimedStep.simulated(document, cluster, machine_of(cluster))
    longer = step.with_further(more)
    assert longer is not None
    assert (longer.step_ns, longer.exposed) == (whole.step_ns, whole.exposed)


def test_530b_on_3360_gpus_is_the_whole_simulation():
    """vTrain's case: 70 and 105 of 160 microbatches, op by op 467,000 tasks."""
    fields = {"tp": 8, "pp": 35, "dp": 12, "recompute": "full"}
    job = job_of(160, load_model("gpt-530b"), 2048, **fields)
    assert is_alike(job)
    cluster = CLUSTERS["a100_dgx"]
    prepared = Prepared(job, cluster)
    fast = prepared.on(cluster)
    for step in prepared.steps:
        step._alike = None
    whole: Prediction = prepared.on(cluster)
    assert fast == whole


def test_few_microbatches_stand_for_many():
    """34 ahead and 71 in turn from 4 and 4: the first two and the last stay, the third repeats."""
    job = job_of(105, _deeper(DENSE, 105), pp=35, tp=8)
    role = Role.of(job, 0, turns=1)
    assert (role.ahead, role.pairs, role.few.ahead, role.few.pairs) == (34, 71, 4, 4)
    places = role.places()
    assert len(places) == role.num_blocks == 2 * 105 and role.few.num_blocks == 16
    assert places[:4] == [0, 1, 2, 2] and places[33] == 3
    assert places[34:42] == [4, 5, 6, 7, 8, 9, 8, 9]
    assert places[-34:-31] == [12, 13, 14] and places[-2:] == [14, 15]


@pytest.mark.parametrize(
    "fields",
    [
        {"pipeline": "interleaved", "virtual_stages": 2},
        {"pipeline": "gpipe"},
        {"pipeline": "zero_bubble"},
        {"zero": 2, "dp": 2},
        {"cp": 2},
        {"offload": True},
    ],
)
def test_other_pipelines_are_simulated_op_by_op(fields: dict[str, Any]):
    shape = _deeper(DENSE, 32)
    assert is_alike(job_of(40, shape, pp=4, tp=2))
    assert not is_alike(job_of(40, shape, tp=2, pp=4, **fields))


def test_what_is_not_alike_is_not_told_as_if_it_were():
    """Of one microbatch forward and backward are one block."""
    cluster = CLUSTERS["a100_dgx"]
    pipeline = AlikePipeline(job_of(1, LARGE, 1024, pp=4, tp=2), 8, {})
    with pytest.raises(IrregularError):
        pipeline.timed(cluster, machine_of(cluster), {})


def _deeper(shape: ModelSpec, num_layers: int) -> ModelSpec:
    return shape.model_copy(update={"num_layers": num_layers})
