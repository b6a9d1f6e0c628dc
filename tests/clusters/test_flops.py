"""What all ranks compute together is what the model needs, and what recomputation adds."""

from typing import Any

import pytest

from tests.clusters.random_jobs import DENSE, GPT, MIXTURE, job_of, lowered
from twinstream.models.spec import ModelSpec
from twinstream.schedule.document import Schedule

UNITS = ("matmul", "attention_forward", "attention_backward")
GPT_WHOLE = GPT.model_copy(update={"vocab_size": 1024})


def computed(schedule: Schedule) -> int:
    """FLOPs of matrix products and attention in all ops of all ranks."""
    total = 0
    for one in schedule.classes:
        part = schedule.of(one)
        each = {
            name: sum(work.flops for work in call.cost if work.unit in UNITS)
            for name, call in part.calls.items()
        }
        flops = sum(each[op.call] for op in part.ops if op.kind == "compute")
        total += flops * schedule.num_ranks(one)
    return total


def expected(shape: ModelSpec, sequences: int, recompute: str, seq_len: int = 192) -> int:
    """Forward, and backward twice that; causal attention forward, and backward 5/2 of it, since
    fused kernels compute the scores again; the recomputed once more."""
    d, layers = shape.d_model, shape.num_layers
    attention = layers * 2 * seq_len * seq_len * shape.d_q
    projections = 2 * seq_len * d * (2 * shape.d_q + 2 * shape.d_kv) * layers
    ups = (2 if shape.gated else 1) * 2 * seq_len * d * shape.d_ff * layers
    downs = 2 * seq_len * shape.d_ff * d * layers
    head = 2 * seq_len * d * shape.vocab_size
    again = {
        "none": 0,
        "selective": attention,
        "mlp": attention + ups,
        "full": attention + projections + ups + downs,
    }
    once = projections + ups + downs + head
    return sequences * (3 * once + attention + attention * 5 // 2 + again[recompute])


@pytest.mark.parametrize("shape", [DENSE, GPT_WHOLE], ids=["gated", "gelu"])
@pytest.mark.parametrize("recompute", ["none", "selective", "mlp", "full"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tp": 4},
        {"tp": 2, "sequence_parallel": False, "pp": 2},
        {"cp": 4, "dp": 2, "zero": 2},
        {"cp": 2, "tp": 2, "pp": 2},
        {"pp": 4, "dp": 2, "micro_batch": 2, "pipeline": "gpipe"},
        {"pp": 2, "virtual_stages": 2, "pipeline": "interleaved", "zero": 3, "dp": 2},
        {"pp": 2, "tp": 2, "pipeline": "zero_bubble"},
        {"pp": 2, "pipeline": "zero_bubble"},
    ],
)
def test_all_ranks_together_compute_the_models_flops(shape, recompute, fields: dict[str, Any]):
    job = job_of(4, shape, recompute=recompute, **fields)
    schedule = lowered(job)
    assert computed(schedule) == expected(shape, job.global_batch, recompute)
    if recompute == "none":  # model FLOPs take attention's backward for twice its forward
        attention = shape.num_layers * 2 * 192 * 192 * shape.d_q * job.global_batch
        assert schedule.model_flops == computed(schedule) - attention // 2


@pytest.mark.parametrize("fields", [{}, {"dp": 4, "ep": 4}, {"dp": 2, "ep": 2, "tp": 2, "pp": 2}])
def test_experts_compute_what_the_tokens_that_go_to_them_need(fields):
    job = job_of(4, MIXTURE, **fields)
    attention = MIXTURE.num_layers * 2 * 192 * 192 * MIXTURE.d_q * job.global_batch
    schedule = lowered(job)
    assert computed(schedule) == schedule.model_flops + attention // 2


def test_the_busiest_experts_compute_more():
    even, uneven = (
        computed(lowered(job_of(4, MIXTURE, dp=4, ep=4, expert_imbalance=more)))
        for more in (1.0, 1.25)
    )
    experts = MIXTURE.experts
    assert experts is not None
    once = 2 * 192 * MIXTURE.d_model * 3 * experts.d_ff * experts.per_token * MIXTURE.num_layers
    assert uneven - even == 3 * once * 16 // 4


def test_every_group_is_updated_once_in_shards():
    for zero, shards in ((0, 1), (1, 4), (3, 4)):
        (part,) = lowered(job_of(2, dp=4, zero=zero)).schedules.values()
        works = [
            work
            for op in part.ops
            if op.kind == "compute"
            for work in part.calls[op.call].cost
            if work.unit == "adamw"
        ]
        assert len(works) == DENSE.num_layers + 2
        assert sum(work.flops for work in works) == 14 * DENSE.num_parameters // shards
