"""Bytes of stages: parameters, gradients and state over all ranks, activations in flight."""

from collections import Counter, defaultdict
from typing import Any

import pytest

from tests.clusters.random_jobs import DENSE, GPT, MIXTURE, job_of, lowered
from twinstream.models.decoders.sizes import layer_parameters
from twinstream.models.layouts.saved import saved_bytes, stored_hidden_bytes
from twinstream.schedule.analysis.occupancy import slot_bytes_by_role
from twinstream.schedule.document import Schedule

UNTIED_GPT = GPT.model_copy(update={"tied_embeddings": False, "vocab_size": 1024, "num_layers": 4})


def bytes_over_all_ranks(schedule: Schedule, role: str) -> int:
    """Of slots that hold a role, all ranks together."""
    return sum(
        slot_bytes_by_role(schedule.of(one)).get(role, 0) * schedule.num_ranks(one)
        for one in schedule.classes
    )


def carried_over_all_ranks(schedule: Schedule, role: str) -> int:
    """Of what is carried from step to step: not what is gathered."""
    total = 0
    for one in schedule.classes:
        part = schedule.of(one)
        kept = {item.tensor for item in part.carried}
        sizes = [t.size_bytes for t in part.tensors if t.role == role and t.tensor_id in kept]
        total += sum(sizes) * schedule.num_ranks(one)
    return total


@pytest.mark.parametrize("shape", [DENSE, UNTIED_GPT, MIXTURE])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "fields", [{"dp": 4}, {"dp": 2, "cp": 2}, {"pp": 4, "dp": 2}, {"dp": 4, "shard": 2}]
)
def test_all_ranks_together_hold_the_model_as_often_as_zero_says(shape, zero, fields):
    schedule = lowered(job_of(4, shape, zero=zero, **fields))
    replicas = schedule.mesh.size // schedule.mesh.length("pp")
    outer = replicas // (fields.get("shard") or replicas)
    count = shape.num_parameters
    of_parameters = replicas if zero < 3 else 0  # the master is in the state
    assert carried_over_all_ranks(schedule, "parameter") == 2 * count * of_parameters
    of_state = replicas if zero == 0 else outer
    assert carried_over_all_ranks(schedule, "optimizer_state") == 12 * count * of_state
    if zero < 2:
        gradients = bytes_over_all_ranks(schedule, "gradient")
        reduced = 4 * count * outer if zero == 1 and outer > 1 else 0  # shards, to be summed again
        assert gradients == 4 * count * replicas + reduced


def test_what_tensor_parallelism_does_not_split_is_on_each_rank():
    schedule = lowered(job_of(1, tp=4, zero=0))
    norms = (2 * DENSE.num_layers + 1) * DENSE.d_model
    expected = DENSE.num_parameters + 3 * norms
    assert carried_over_all_ranks(schedule, "parameter") == 2 * expected


def test_experts_are_shared_by_replicas():
    schedule = lowered(job_of(1, MIXTURE, dp=8, ep=4, zero=0))
    each = layer_parameters(MIXTURE)
    routed = MIXTURE.num_layers * each.num_experts * each.expert
    dense = MIXTURE.num_parameters - routed
    # the dense part on all eight, each expert on two
    assert carried_over_all_ranks(schedule, "parameter") == 2 * (8 * dense + 2 * routed)


def test_a_tied_embedding_is_held_by_the_first_and_the_last_stage():
    shape = DENSE.model_copy(update={"tied_embeddings": True})
    rows = shape.vocab_size * shape.d_model
    one, two = (lowered(job_of(4, shape, pp=pp)) for pp in (1, 2))
    assert carried_over_all_ranks(one, "parameter") == 2 * shape.num_parameters
    assert carried_over_all_ranks(two, "parameter") == 2 * (shape.num_parameters + rows)
    told = [e for e in two.order if e.sides[0][1].startswith("tied_")]
    assert len(told) == 2 and not [e for e in one.order if e.sides[0][1].startswith("tied_")]


def test_shards_that_do_not_divide_are_padded():
    shape = DENSE.model_copy(update={"d_model": 257 * 2, "num_layers": 1})
    schedule = lowered(job_of(1, shape, dp=7, zero=3))
    (part,) = schedule.schedules.values()
    sizes = {t.tensor_id: t.size_bytes for t in part.tensors}
    gathers = [op for op in part.ops if op.kind == "communicate" and op.collective == "all_gather"]
    assert gathers
    for op in gathers:
        shard, whole = (sizes[operand.tensor] for operand in op.operands)
        assert whole == 7 * shard
    masters = [size for name, size in sizes.items() if name.startswith("optimizer.")]
    assert 0 <= 7 * sum(masters) - 12 * shape.num_parameters < 7 * 12 * len(masters)


@pytest.mark.parametrize(("zero", "gathered", "gradients"), [(2, 0, 3), (3, 3, 3)])
def test_zero_2_and_3_hold_few_whole_layers_at_a_time(zero, gathered, gradients):
    """One in use, one on its way, and one that was given back last."""
    schedule = lowered(job_of(4, dp=4, zero=zero))
    (part,) = schedule.schedules.values()
    pools = Counter(slot.slot_id.rpartition(".")[0] for slot in part.slots)
    assert pools["gathered.layer"] == gathered
    assert 2 <= pools["gradient.layer"] <= gradients
    kept = [
        s for s in part.slots if s.slot_id.startswith("gradient.") and ".layer" not in s.slot_id
    ]
    of_layer = layer_parameters(DENSE).total
    assert [s.size_bytes for s in kept if s.slot_id.startswith("gradient.0")] == [4 * of_layer // 4]


def units_in_flight(schedule: Schedule, stage: int, layers: int) -> int:
    """How many times a chunk's layers find a place for what attention keeps."""
    pools = Counter(
        slot.slot_id.rpartition(".")[0] for slot in schedule.schedules[f"stage {stage}"].slots
    )
    slots = pools["saved.attention"] + pools["saved.attention.first"]
    assert slots % layers == 0
    return slots // layers


@pytest.mark.parametrize("fields", [{}, {"tp": 2}])
def test_as_many_activations_are_kept_as_the_order_of_the_pipeline_says(fields: dict[str, Any]):
    pp, count = 4, 8

    def kept(pipeline: str, virtual: int = 1) -> list[int]:
        job = job_of(count, pp=pp, pipeline=pipeline, virtual_stages=virtual, **fields)
        layers = DENSE.num_layers // (pp * virtual)
        return [units_in_flight(lowered(job), stage, layers) for stage in range(pp)]

    assert kept("gpipe") == [count] * pp
    assert kept("1f1b") == [4, 3, 2, 1]  # pp - stage
    assert kept("zero_bubble") == [pp] * pp  # and as many as are put off
    assert kept("interleaved", 2) == [2 * (pp - 1 - s) + pp + 1 for s in range(pp)]
    assert kept("ring", 2) == [2 * count] * pp


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "fields", [{}, {"tp": 4}, {"tp": 2, "sequence_parallel": False}, {"cp": 2}]
)
def test_a_layers_saved_bytes_are_what_recomputation_leaves(recompute, fields):
    """Of one microbatch: layers' saved bytes; of a stage's first layer the input is the stage's."""
    job = job_of(1, recompute=recompute, **fields)
    (part,) = lowered(job).schedules.values()
    saved = sum(s.size_bytes for s in part.slots if s.slot_id.startswith("saved."))
    entered = stored_hidden_bytes(job.work)
    assert saved + entered == DENSE.num_layers * saved_bytes(job.work, recompute)


def test_slots_do_not_overlap_and_are_aligned():
    for part in lowered(job_of(4, MIXTURE, pp=2, tp=2, dp=2, ep=2, zero=2)).schedules.values():
        end = 0
        for slot in part.slots:
            assert slot.offset_bytes >= end and slot.offset_bytes % 256 == 0
            end = slot.offset_bytes + slot.size_bytes


def test_both_ends_of_every_exchange_move_equal_bytes():
    schedule = lowered(job_of(4, GPT, pp=2, dp=2, tp=2, zero=2))
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    for name, part in schedule.schedules.items():
        of_tensor = {t.tensor_id: t.size_bytes for t in part.tensors}
        for op in part.ops:
            if op.kind == "communicate":
                sizes[name][op.op_id] = max(of_tensor[o.tensor] for o in op.operands)
    for one in schedule.order:
        assert len({sizes[name][op_id] for name, op_id in one.sides}) == 1


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("fields", [{}, {"tp": 2}, {"cp": 2}])
def test_zero_bubble_puts_off_the_gradients_of_what_products_make(recompute, fields):
    """Of QKV, output projection, up and gate, and down; with what was computed again."""
    job = job_of(2, pipeline="zero_bubble", recompute=recompute, **fields)
    (part,) = lowered(job).schedules.values()
    work, d = job.work, DENSE.d_model
    widths = [work.d_qkv, d, 2 * work.d_ff, d]
    again = saved_bytes(work, "none") if recompute == "full" else 0
    held = [
        s for s in part.slots if s.slot_id.startswith(("put_off.", "again.attention", "again.mlp"))
    ]
    expected = 2 * work.tokens * sum(widths) + again
    # of every layer, since one microbatch's backward comes before its weights' gradients
    assert sum(slot.size_bytes for slot in held) == DENSE.num_layers * expected
