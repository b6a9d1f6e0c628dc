"""Documents of tensor parallel ranks: what they hold, what is refused, and that damage is seen."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from random import Random

import pytest

from tests.schedule.cluster.damages import DAMAGES
from tests.schedule.cluster.oracle import Cache, problems
from twinstream.clusters.conforms import conforms
from twinstream.clusters.kernel_sets import run_refusal
from twinstream.clusters.pipeline import cluster_evaluation_of, plan_pipeline
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import PART
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, LayoutError
from twinstream.models.loss import Dpo
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


# Of cp 2 ranks that have two parts of each sequence, four slices of four tokens.
SLICES = {"tp": 1, "sequence_parallel": True, "cp": 2, "cp_parts": 4}


@cache
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


def test_logits_are_never_exchanged():
    """Of a chunk's 32 x 256 logits each part tells three numbers a row."""
    part = planned().schedules["stage 0"]
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in part.tensors}
    told = [op for op in part.ops if isinstance(op, Communicate) and "loss" in op.op_id]
    assert len(told) == WORKLOAD.rounds_per_step
    assert {sizes[o.tensor] for op in told for o in op.operands} == {3 * 32 * 4, 2 * 3 * 32 * 4}


@pytest.mark.parametrize(
    "fields", [{}, {"parts": 4}, {"pp": 2}, {"dp": 2, "zero": 3}, {**SLICES, "pp": 2}]
)
def test_its_evaluation_is_proven_too(fields):
    spec = SMALL.model_copy(update={"num_layers": 2})
    found = cluster_evaluation_of(planned(spec, **fields))
    assert verify(found) == []
    assert conforms(found) == []


QWEN = load_preset("tiny-qwen3").model_copy(update={"num_kv_heads": 4})


@pytest.mark.parametrize(
    ("spec", "recipe", "fields", "said"),
    [
        (SMALL, {}, {"tp": 8}, "4 key and value heads in 8 parts"),
        (SMALL, {}, {"parts": 3, "tp": 1}, "8 heads in 3 parts"),
        (SMALL, {}, {"parts": 3}, "3 parts on tp 2 (as many on each rank)"),
        (SMALL.model_copy(update={"vocab_size": 257}), {}, {}, "257 rows of the vocabulary in 2"),
        (SMALL.model_copy(update={"experts": Experts(count=4, per_token=2, d_ff=8)}), {}, {},
         "experts in parts"),
        (SMALL, {"lora": Lora(rank=4, alpha=8.0)}, {}, "LoRA beside tp 2"),
        (SMALL, {"frozen": ("0",)}, {"parts": 4}, "frozen weights beside 4 parts"),
        (SMALL, {"optimizer_state": "8bit"}, {}, "8-bit optimizer state"),
        (SMALL, {"update": "muon"}, {}, "Muon, whose matrices are whole beside tp 2"),
        (SMALL, {"loss": Dpo()}, {}, "a loss of pairs beside tp 2"),
        (QWEN, {}, {"pp": 2}, "tied embeddings on two stages beside tp 2"),
        (SMALL, {}, {"sequence_parallel": True}, "tp 2 with sequence parallelism"),
        (SMALL, {}, {"dp": 2, "ep": 2}, "ep 2 (no kernels here are split over ep)"),
        (SMALL, {}, {"cp": 2, "cp_parts": 3}, "3 parts of a sequence on cp 2 (as many on each"),
        (SMALL, {"lora": Lora(rank=4, alpha=8.0)}, {"tp": 1, "sequence_parallel": True, "cp": 2},
         "LoRA beside cp 2"),
    ],
)  # fmt: skip
def test_what_is_not_computed_in_parts_is_refused_by_name(spec, recipe, fields, said):
    layout = Layout.model_validate({"tp": 2, "sequence_parallel": False, "zero": 0, **fields})
    assert said in str(run_refusal(spec, Recipe(**recipe), layout))
    with pytest.raises(LayoutError) as caught:
        planned(spec, Recipe(**recipe), **fields)
    assert said in str(caught.value)


Change = Callable[[RankSchedule], RankSchedule]


def _changed(part: RankSchedule, wanted: str, **update: object) -> RankSchedule:
    at = next(i for i, op in enumerate(part.ops) if op.op_id == wanted)
    ops = list(part.ops)
    ops[at] = ops[at].model_copy(update=update)
    return part.model_copy(update={"ops": tuple(ops)})


def _communication(part: RankSchedule, named: str) -> Communicate:
    return next(op for op in part.ops if isinstance(op, Communicate) and named in op.op_id)


def _dropped(named: str) -> Change:
    def change(part: RankSchedule) -> RankSchedule:
        gone = _communication(part, named)
        kept = [op for op in part.ops if op is not gone]
        kept = [
            op.model_copy(update={"waits": tuple(w for w in op.waits if w != gone.op_id)})
            for op in kept
        ]
        return part.model_copy(update={"ops": tuple(kept)})

    return change


def _said(named: str, **update: object) -> Change:
    def change(part: RankSchedule) -> RankSchedule:
        return _changed(part, _communication(part, named).op_id, **update)

    return change


def _of_other_tensor(named: str, old: str, new: str) -> Change:
    def change(part: RankSchedule) -> RankSchedule:
        op = _communication(part, named)
        slots = {o.tensor: o.slot for one in part.ops for o in getattr(one, "operands", ())}
        operands = tuple(
            o.model_copy(update={"tensor": new, "slot": slots[new]}) if o.tensor == old else o
            for o in op.operands
        )
        return _changed(part, op.op_id, operands=operands)

    return change


def _attribute(named: str, **told: object) -> Change:
    def change(part: RankSchedule) -> RankSchedule:
        name, call = next((n, c) for n, c in part.calls.items() if n.startswith(named))
        attributes = {**call.attributes, **told}
        changed = call.model_copy(update={"attributes": attributes})
        return part.model_copy(update={"calls": {**part.calls, name: changed}})

    return change


def _fed_other_slice(part: RankSchedule) -> RankSchedule:
    return _changed(
        part, next(op.op_id for op in part.ops if op.kind == "feed" and op.index), index=0
    )


def _other_call(kind: str, old: str, new: str) -> Change:
    def change(part: RankSchedule) -> RankSchedule:
        op = next(
            op for op in part.ops
            if isinstance(op, Compute) and op.label.kind == kind and op.call.endswith(old)
        )  # fmt: skip
        return _changed(part, op.op_id, call=op.call.replace(old, new))

    return change


@pytest.mark.parametrize(
    "change",
    [
        _dropped("tp.attention."), _dropped("tp.mlp_backward"), _dropped("tp.loss_sums"),
        _dropped("part_squares"),
        _said("tp.attention.", collective="all_to_all"), _said("tp.mlp.", axes=("dp",)),
        _said("tp.embed", reduction="rank_order"), _said("tp.head", sequence=99),
        _of_other_tensor("tp.attention.", "pieces.0", "pieces.1"),
        _attribute("head_part_sums", first_row=(128, 0)),
        _attribute("embed_part_forward", first_row=(0, 0)),
        _attribute("adamw.0.tp0", tensor_seed=(1, 2)),
        _attribute("add_parts", num_pieces=1), _attribute("mlp_part_forward", d_ff=97),
        _other_call("head_sums", ".tp0", ".tp1"), _other_call("embed", ".tp0", ".tp1"),
    ],
)  # fmt: skip
def test_a_damaged_exchange_or_shard_is_seen(change):
    _assert_seen(planned(parts=4), change)


@pytest.mark.parametrize(
    "change",
    [
        _dropped("cp.kv.low"), _dropped("cp.kv_again.high"), _dropped("cp.d_kv.low"),
        _dropped("reduce.loss"), _dropped("reduce.0"),
        _said("cp.kv.high", last_first=None), _said("cp.kv.low", last_first=True),
        _said("cp.d_kv.high", last_first=None), _said("cp.d_kv.low", reduction="rank_order"),
        _said("cp.kv.low", axes=("dp",)), _said("cp.kv_again", sequence=99),
        _said("reduce.0", reduction="rank_order"), _said("reduce.loss", axes=("pp",)),
        _of_other_tensor("cp.kv.low", "context.0.tp0.low", "context.0.tp0.high"),
        _attribute("kv_part_forward", chunk_start=(4, 0)),
        _attribute("context_part_forward", chunk_start=(0, 4)),
        _attribute("qkv_part_backward", kv_start=0), _fed_other_slice,
    ],
)  # fmt: skip
def test_a_damaged_exchange_or_slice_is_seen(change):
    _assert_seen(planned(**SLICES), change)


def _assert_seen(document: Schedule, change: Change) -> None:
    before = document.schedules["stage 0"]
    after = change(before)
    assert after != before
    damaged = document.model_copy(update={"schedules": {"stage 0": after}})
    assert verify(damaged) or conforms(damaged)


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({"parts": 4}, ({"tp": 1, "parts": 4}, {"parts": 2}, {"parts": None})),
        (SLICES, ({"cp": 1}, {"cp_parts": 2}, {"cp": 2, "cp_parts": None})),
    ],
)
def test_swapped_exchanges_and_other_meshes_are_seen(fields, others):
    document = planned(**fields)
    order = list(document.order)
    order[0], order[1] = order[1], order[0]
    assert verify(document.model_copy(update={"order": tuple(order)}))
    for other in others:
        layout = {name: v for name, v in (document.layout | other).items() if v is not None}
        assert conforms(document.model_copy(update={"layout": layout}))


def judged(seeds: range, base: Schedule) -> tuple[Counter[str], Counter[str]]:
    """How often each damage was tried; and accepted by the proof though brute force, which runs
    every rank, has something against it."""
    tried, wrongly = Counter[str](), Counter[str]()
    assert problems(base, Random(0), Cache()) == set()
    for seed in seeds:
        for name, damage in DAMAGES.items():
            damaged = damage(base, Random(f"{seed} {name}"))
            if damaged is None:
                continue
            tried[name] += 1
            if bool(problems(damaged, Random(seed), Cache())) and not verify(damaged):
                wrongly[name] += 1
    return tried, wrongly


BASES = [{"parts": 4, "dp": 2}, {**SLICES, "cp_parts": 2, "dp": 2}]


@pytest.mark.parametrize("fields", BASES, ids=["tp", "cp"])
def test_no_random_damage_that_brute_force_refuses_is_accepted(fields):
    tried, wrongly = judged(range(1), planned(**fields))
    assert sum(tried.values()) > 20
    assert not wrongly


@pytest.mark.parametrize("fields", BASES, ids=["tp", "cp"])
@pytest.mark.parametrize("block", range(4))
def test_none_of_many_random_damages_is_accepted(block, fields):
    tried, wrongly = judged(range(1 + 6 * block, 7 + 6 * block), planned(**fields))
    assert sum(tried.values()) > 140
    assert not wrongly
