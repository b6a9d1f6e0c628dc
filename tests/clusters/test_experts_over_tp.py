"""Experts over tp x dp (`etp` 1), and collectives of tp that run beside their products."""

import pytest

from tests.clusters.random_jobs import MIXTURE, job_of, lowered
from twinstream.clusters.predict import Prepared
from twinstream.clusters.refusals import refusals_of
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Number
from twinstream.models.layouts.layout import Layout, stages_of
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import megatron_recipe
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.ops import Communicate

OVER_TP = {"tp": 2, "dp": 4, "ep": 4, "etp": 1}


def collectives(schedule):
    """Axes of each collective of tp and ep, by its id."""
    (part,) = schedule.schedules.values()
    return [op for op in part.ops if isinstance(op, Communicate) and {"tp", "ep"} & set(op.axes)]


def test_experts_over_tp_and_dp_are_safe_and_exchange_over_both():
    schedule = lowered(job_of(2, MIXTURE, zero=0, **OVER_TP))
    assert verify(schedule) == []
    assert {axis.name: axis.size for axis in schedule.mesh.axes if axis.size > 1} == {
        "dp": 2, "ep": 2, "tp": 2,
    }  # fmt: skip
    kinds = {(op.collective, op.axes) for op in collectives(schedule)}
    assert ("all_to_all", ("ep", "tp")) in kinds
    assert ("all_to_all", ("ep",)) not in kinds


def test_no_collective_of_tp_is_around_experts_that_are_not_split():
    """Attention gathers and scatters, forward and backward, and again for its weights; with split
    experts so do these."""
    counts = [
        sum(op.axes == ("tp",) for op in collectives(lowered(job_of(1, MIXTURE, zero=0, **fields))))
        for fields in (OVER_TP, {"tp": 2, "dp": 4, "ep": 4})
    ]
    assert counts[1] - counts[0] == MIXTURE.num_layers * 4


def test_a_rank_has_whole_experts_as_many_as_ep_leaves_it():
    """d_ff 256 and width d: three matrices of each of 8 / 4 experts in bf16, and of 8 / 8."""
    d, experts = MIXTURE.d_model, MIXTURE.experts
    expert_bytes = 3 * d * experts.d_ff * 2 * MIXTURE.num_layers
    for ep, held in ((4, 2), (8, 1)):
        job = job_of(1, MIXTURE, tp=2, dp=4, ep=ep, etp=1, zero=0)
        parts = [t for s in lowered(job).schedules.values() for t in s.tensors]
        experts_of = [t for t in parts if t.tensor_id.startswith("parameter.")]
        found = sum(t.size_bytes for t in experts_of if "experts" in t.tensor_id)
        assert found == held * expert_bytes


def test_where_tp_has_all_ranks_of_the_experts_they_exchange_over_it_alone():
    schedule = lowered(job_of(1, MIXTURE, tp=4, dp=2, ep=4, etp=1, zero=0))
    assert verify(schedule) == []
    kinds = {(op.collective, op.axes) for op in collectives(schedule)}
    assert ("all_to_all", ("tp",)) in kinds and not any("ep" in axes for _, axes in kinds)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tp": 4, "dp": 4, "ep": 4, "etp": 2}, "etp 2 is neither 1 nor tp 4"),
        ({"tp": 4, "dp": 4, "ep": 2, "etp": 1}, "etp 1 needs ep 2 to be a multiple of tp 4"),
        ({"tp": 2, "dp": 4, "ep": 4, "etp": 1, "sequence_parallel": False}, "and sequence par"),
        ({"tp": 2, "dp": 3, "ep": 4, "etp": 1}, "dp 3 is not divisible by ep 2"),
        ({"tp": 2, "dp": 2, "ep": 4}, "experts are shared by replicas (with etp 1 by tp x dp)"),
        ({"tp": 2, "dp": 4, "zero": 3, "dp_overlap": False}, "dp_overlap false needs zero 2 or"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(fields, sentence):
    (told,) = refusals_of(job_of(1, MIXTURE, **fields))
    assert sentence in told


def exposing(share: float) -> Cluster:
    number = Number(value=share, kind="assumed", source="of this test alone")
    return load_cluster("h100_dgx").model_copy(update={"tp_exposed": number})


def step(layout: Layout, share: float):
    job = job_of(2, load_preset("8b").model_copy(update={"num_layers": 2}), seq_len=4096)
    job = job.model_copy(update={"layout": layout, "global_batch": 2 * layout.dp})
    job = job.model_copy(update={"recipe": megatron_recipe()})
    return Prepared(job, load_cluster("h100_dgx")).on(exposing(share))


def test_compute_waits_for_the_exposed_share_of_overlapped_collectives():
    plain, beside = Layout(tp=8), Layout(tp=8, tp_overlap=True)
    apart = step(plain, 0.5).step_s
    assert step(beside, 1.0).step_s == apart
    half, none = step(beside, 0.5).step_s, step(beside, 0.0).step_s
    assert none < half < apart
    assert half == pytest.approx((none + apart) / 2, rel=0.02)
    assert step(plain, 0.0).step_s == apart


def test_documents_of_layouts_that_use_neither_are_as_before():
    assert not {"etp", "tp_overlap"} & set(Layout(tp=2, ep=2, dp=2).model_dump(mode="json"))
    told = Layout(tp=2, etp=1, tp_overlap=True)
    assert Layout.model_validate(told.model_dump(mode="json")) == told


def test_126_layers_of_128_stages_leave_the_first_and_the_last_to_embedding_and_head():
    sizes = [len(span) for span in stages_of(Layout(pp=16, virtual_stages=8), 126)]
    assert sizes == [0, *[1] * 126, 0]
