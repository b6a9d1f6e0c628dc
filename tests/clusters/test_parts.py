"""Documents of tensor parallel ranks: what they hold, what is refused, and that damage is seen."""

import pytest

from tests.clusters.changes import (
    Change,
    assert_seen,
    attribute,
    changed,
    dropped,
    judged,
    of_other_tensor,
    said,
)
from twinstream.clusters.conforms import conforms
from twinstream.clusters.kernel_sets import run_refusal
from twinstream.clusters.pipeline import cluster_evaluation_of, plan_pipeline
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import PART
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, LayoutError
from twinstream.models.options import Experts
from twinstream.models.presets import load_preset
from twinstream.models.recipes.lora import Lora
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.projecting import rank_part
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.ops import Communicate, Compute
from twinstream.schedule.workload import Workload

WORKLOAD = Workload(seq_len=32, chunk_tokens=32, chunks_per_round=1, rounds_per_step=2)
SMALL = load_preset("tiny").model_copy(
    update={"num_layers": 1, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16}
)

CLIPS = Recipe(clips=True)


def planned(spec: ModelSpec = SMALL, recipe: Recipe = CLIPS, **fields: object) -> Schedule:
    layout = Layout.model_validate({"tp": 2, "sequence_parallel": False, "zero": 0, **fields})
    return plan_pipeline(Job.of_step(spec, WORKLOAD, recipe, layout), load_machine("cpu"))


def test_ranks_together_hold_matrices_once_and_norms_each():
    whole = plan_pipeline(
        Job.of_step(SMALL, WORKLOAD, Recipe(), Layout(zero=0)), load_machine("cpu")
    ).schedules["stage 0"]
    sizes = {one.tensor_id: one.size_bytes for one in whole.tensors}
    norms = {"param.0": 2 * SMALL.d_model * 4, "param.head": SMALL.d_model * 4}
    for fields in ({}, {"parts": 4}):
        own = {t.tensor_id: t.size_bytes for t in planned(**fields).schedules["stage 0"].tensors}
        for group in ("embedding", "0", "head"):
            name = f"param.{group}"
            parts = sum(size for one, size in own.items() if one.startswith(f"{name}{PART}"))
            assert 2 * parts == sizes[name] - norms.get(name, 0)
            assert own.get(name, 0) == norms.get(name, 0)


def test_each_rank_has_rows_of_its_own_and_random_numbers_of_its_parts():
    document = planned(parts=4)
    rows, seeds = [], []
    for rank in range(2):
        calls = rank_part(document, rank).schedule.calls
        for number in range(2):
            rows.append(calls[f"head_part_sums{PART}{number}"].attributes["first_row"])
            seeds.append(calls[f"adamw.0{PART}{number}"].attributes["tensor_seed"])
    assert rows == [0, 64, 128, 192]  # of 256
    assert len(set(seeds)) == 4


def test_a_document_says_parts_only_where_they_are_asked_for():
    assert "parts" not in planned().layout
    assert planned(parts=4).layout["parts"] == 4


def test_ranks_keep_slices_of_hidden_states():
    sizes = [
        {
            t.tensor_id: t.size_bytes
            for t in planned(sequence_parallel=sp).schedules["stage 0"].tensors
        }
        for sp in (False, True)
    ]
    kept = [name for name in sizes[0] if name.startswith(("hidden.", "x_o.", "d_hidden."))]
    assert len(kept) == 8
    for name in kept:
        assert 2 * sizes[1][name] == sizes[0][name] == 32 * SMALL.d_model * SMALL.itemsize
    assert "all_hidden.0" in sizes[1].keys() - sizes[0].keys()


def test_parts_of_a_model_without_experts_are_not_told_of_any():
    (part,) = planned(tp=2).schedules.values()
    assert not any("experts" in name for name in part.calls)
    assert not any("frozen_experts" in call.attributes for call in part.calls.values())


def test_logits_are_never_exchanged():
    """Of a chunk's 32 x 256 logits each part tells three numbers a row."""
    part = planned().schedules["stage 0"]
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in part.tensors}
    told = [op for op in part.ops if isinstance(op, Communicate) and "loss" in op.op_id]
    assert len(told) == WORKLOAD.rounds_per_step
    assert {sizes[o.tensor] for op in told for o in op.operands} == {3 * 32 * 4, 2 * 3 * 32 * 4}


SLICED = {"parts": 4, "sequence_parallel": True}


@pytest.mark.parametrize("fields", [{}, {"parts": 4}, {"pp": 2}, {"dp": 2, "zero": 3}, SLICED])
def test_its_evaluation_is_proven_too(fields):
    spec = SMALL.model_copy(update={"num_layers": 2})
    found = cluster_evaluation_of(planned(spec, **fields))
    assert verify(found) == []
    assert conforms(found) == []


OF_EXPERTS = SMALL.model_copy(
    update={
        "experts": Experts(count=4, per_token=2, d_ff=64, shared_d_ff=32, shared_gate=True),
    }
)
QWEN = load_preset("tiny-qwen3").model_copy(update={"num_kv_heads": 4})


@pytest.mark.parametrize(
    ("spec", "recipe", "fields", "said"),
    [
        (SMALL, {}, {"tp": 8}, "4 key and value heads in 8 parts"),
        (SMALL, {}, {"parts": 3, "tp": 1}, "8 heads in 3 parts"),
        (SMALL, {}, {"parts": 3}, "3 parts on tp 2 (as many on each rank)"),
        (SMALL.model_copy(update={"vocab_size": 257}), {}, {}, "257 rows of the vocabulary in 2"),
        (OF_EXPERTS, {}, {"parts": 3, "tp": 1}, "64 columns of an expert in 3 parts"),
        (OF_EXPERTS, {}, {"sequence_parallel": True},
         "experts with sequence parallelism beside tp 2"),
        (OF_EXPERTS.model_copy(update={"qk_norm": True, "qk_norm_rows": True}), {}, {},
         "norms over all heads of Q and K in parts"),
        (SMALL, {"lora": Lora(rank=4, alpha=8.0, saved=("lm_head",))}, {},
         "modules that LoRA saves whole beside tp 2"),
        (SMALL, {"lora": Lora(rank=4, alpha=8.0), "base": "nf4"}, {"parts": 4},
         "a base in nf4, of which 64 elements of a row share a scale, beside 4 parts"),
        (SMALL, {"optimizer_state": "8bit"}, {}, "8-bit optimizer state"),
        (SMALL, {"update": "muon"}, {}, "Muon, whose matrices are whole beside tp 2"),
        (SMALL, {}, {"sequence_parallel": True, "cp": 2},
         "sequence parallelism beside cp 2"),
    ],
)  # fmt: skip
def test_what_is_not_computed_in_parts_is_refused_by_name(spec, recipe, fields, said):
    layout = Layout.model_validate({"tp": 2, "sequence_parallel": False, "zero": 0, **fields})
    assert said in str(run_refusal(spec, Recipe(**recipe), layout))
    with pytest.raises(LayoutError) as caught:
        planned(spec, Recipe(**recipe), **fields)
    assert said in str(caught.value)


def test_tokens_that_slices_do_not_divide_are_refused_by_name():
    odd = WORKLOAD.model_copy(update={"seq_len": 34, "chunk_tokens": 34})
    job = Job.of_step(SMALL, odd, CLIPS, Layout(tp=2, parts=4, zero=0))
    with pytest.raises(LayoutError, match="of 4 parts with chunks of 34 tokens"):
        plan_pipeline(job, load_machine("cpu"))


def _other_call(kind: str, old: str, new: str) -> Change:
    def change(part: RankSchedule) -> RankSchedule:
        op = next(
            op for op in part.ops
            if isinstance(op, Compute) and op.label.kind == kind and op.call.endswith(old)
        )  # fmt: skip
        return changed(part, op.op_id, call=op.call.replace(old, new))

    return change


@pytest.mark.parametrize(
    "change",
    [
        dropped("tp.attention."), dropped("tp.mlp_backward"), dropped("tp.loss_sums"),
        dropped("part_squares"),
        said("tp.attention.", collective="all_to_all"), said("tp.mlp.", axes=("dp",)),
        said("tp.embed", reduction="rank_order"), said("tp.head", sequence=99),
        of_other_tensor("tp.attention.", "pieces.0", "pieces.1"),
        attribute("head_part_sums", first_row=(128, 0)),
        attribute("embed_part_forward", first_row=(0, 0)),
        attribute("adamw.0.tp0", tensor_seed=(1, 2)),
        attribute("add_parts", num_pieces=1), attribute("mlp_part_forward", d_ff=97),
        _other_call("head_sums", ".tp0", ".tp1"), _other_call("embed", ".tp0", ".tp1"),
    ],
)  # fmt: skip
def test_a_damaged_exchange_or_shard_is_seen(change):
    assert_seen(planned(parts=4), change)


@pytest.mark.parametrize(
    "change",
    [
        dropped("tp.hidden.gather"), dropped("tp.d_attention.gather"), dropped("gather.parts.0"),
        said("tp.mlp.", collective="all_gather"), said("tp.x_o.gather", collective="all_to_all"),
        of_other_tensor("tp.d_mlp.gather", "d_hidden.0", "d_hidden.1"),
        of_other_tensor("tp.head_hidden", "all_hidden.0", "all_d_hidden.0"),
        attribute("add_parts", piece_groups=1), attribute("norm_parts_backward", num_slices=1),
    ],
)  # fmt: skip
def test_a_damaged_slice_of_tokens_is_seen(change):
    assert_seen(planned(parts=4, sequence_parallel=True), change)


@pytest.mark.parametrize(
    "change",
    [
        dropped("gather.parts.lora"), said("gather.parts.lora", collective="reduce_scatter"),
        of_other_tensor("gather.parts.lora.0", "grad_pieces.lora.0", "grad.lora.0"),
        attribute("sum_pieces", num_pieces=2), attribute("attention_part_backward", lora_rank=2),
    ],
)  # fmt: skip
def test_a_damaged_sum_of_adapters_is_seen(change):
    document = planned(recipe=Recipe(lora=Lora(rank=4, alpha=8.0)), parts=4)
    after = change(document.schedules["stage 0"])
    damaged = document.model_copy(update={"schedules": {"stage 0": after}})
    assert verify(damaged) or conforms(damaged)


@pytest.mark.parametrize(
    "change",
    [
        dropped("tp.mlp."), dropped("tp.mlp_backward"), dropped("part_squares.0.experts"),
        attribute("mlp_part_forward", **{"experts.d_ff": 32}),
        attribute("mlp_part_backward", **{"experts.count": 2}),
        attribute("norm_parts_backward", **{"experts.shared_gate": False}),
        attribute("adamw.0.experts.tp0", tensor_seed=(1, 2)),
        of_other_tensor("tp.mlp.", "pieces.0", "pieces.1"),
    ],
)  # fmt: skip
def test_a_damaged_exchange_or_share_of_experts_is_seen(change):
    assert_seen(planned(OF_EXPERTS, parts=4), change)


def test_ranks_together_hold_columns_of_experts_once_and_the_router_each():
    own = {t.tensor_id: t.size_bytes for t in planned(OF_EXPERTS).schedules["stage 0"].tensors}
    experts, d_model = OF_EXPERTS.experts, OF_EXPERTS.d_model
    assert experts is not None
    matrices = experts.count * 3 * experts.d_ff * d_model * OF_EXPERTS.itemsize
    assert 2 * own[f"param.0.experts{PART}0"] == matrices
    shared = 2 * d_model + experts.count * d_model + d_model  # norms, router, gate
    assert own["param.0"] == shared * OF_EXPERTS.itemsize


def test_swapped_exchanges_and_other_meshes_are_seen():
    document = planned(parts=4)
    order = list(document.order)
    order[0], order[1] = order[1], order[0]
    assert verify(document.model_copy(update={"order": tuple(order)}))
    others = {"tp": 1, "parts": 4}, {"parts": 2}, {"parts": None}, {"sequence_parallel": True}
    for fields in (*others, {"sliced_norms": True}):
        layout = {name: v for name, v in (document.layout | fields).items() if v is not None}
        assert conforms(document.model_copy(update={"layout": layout}))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_random_damage_that_brute_force_refuses_is_accepted(sequence_parallel):
    document = planned(parts=4, dp=2, sequence_parallel=sequence_parallel)
    tried, wrongly = judged(document, range(1))
    assert sum(tried.values()) > 20
    assert not wrongly


@pytest.mark.parametrize("block", range(4))
def test_none_of_many_random_damages_is_accepted(block):
    tried, wrongly = judged(planned(parts=4, dp=2), range(1 + 6 * block, 7 + 6 * block))
    assert sum(tried.values()) > 150
    assert not wrongly
