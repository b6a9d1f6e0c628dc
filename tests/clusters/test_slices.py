"""Documents of context parallel ranks: what is refused, and that damage is seen."""

from functools import cache

import pytest

from tests.clusters.changes import (
    assert_seen,
    attribute,
    changed,
    dropped,
    judged,
    of_other_tensor,
    said,
)
from tests.clusters.test_parts import CLIPS, SMALL, WORKLOAD
from twinstream.clusters.conforms import conforms
from twinstream.clusters.kernel_sets import run_refusal
from twinstream.clusters.pipeline import cluster_evaluation_of, plan_pipeline
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, LayoutError
from twinstream.models.loss import Dpo
from twinstream.models.recipes.lora import Lora
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.workload import Packing, Workload

SAVES = {"lora": Lora(rank=4, alpha=8.0, saved=("lm_head",))}
RING = {"cp": 4, "cp_parts": None, "cp_exchange": "ring"}
ADAPTERS = Recipe(lora=Lora(rank=4, alpha=8.0), clips=True)
CUDNN = {"kernels": KernelChoice(attention="cudnn_sliced")}
PAIRS = {"loss": Dpo()}


@cache
def planned(recipe: Recipe = CLIPS, **fields: object) -> Schedule:
    """Of cp 2 ranks that have two parts of each sequence, four slices of four tokens."""
    layout = Layout.model_validate({"cp": 2, "cp_parts": 4, "zero": 0, **fields})
    spec = SMALL.model_copy(update={"num_layers": layout.pp})
    return plan_pipeline(Job.of_step(spec, WORKLOAD, recipe, layout), load_machine("cpu"))


@pytest.mark.parametrize("fields", [{}, {"cp_parts": None, "cp_exchange": "ring"}])
def test_its_evaluation_is_proven_too(fields):
    found = cluster_evaluation_of(planned(pp=2, **fields))
    assert verify(found) == []
    assert conforms(found) == []


@pytest.mark.parametrize(
    ("recipe", "fields", "wanted"),
    [
        ({}, {"cp_exchange": "ring", "cp_parts": 2}, "a ring of 2 parts of a sequence"),
        ({}, {"cp_exchange": "ring", "cp": 1}, "a ring of one rank (give --cp N)"),
        (CUDNN, {"cp_exchange": "ring"}, "attention cudnn_sliced, which is causal alone"),
        ({}, {"cp_parts": 3}, "3 parts of a sequence on cp 2 (as many on each rank)"),
        (SAVES, {}, "modules that LoRA saves whole beside cp 2"),
        (PAIRS, {}, "a loss of pairs beside cp 2"),
    ],
)  # fmt: skip
def test_what_is_not_computed_in_slices_is_refused_by_name(recipe, fields, wanted):
    layout = Layout.model_validate({"cp": 2, "zero": 0, **fields})
    assert wanted in str(run_refusal(SMALL, Recipe(**recipe), layout))


def test_packed_documents_and_chunks_that_are_no_slices_are_refused():
    packed = WORKLOAD.model_copy(update={"packing": Packing.of((16, 16))})
    odd = Workload(seq_len=36, chunk_tokens=12, chunks_per_round=3, rounds_per_step=2)
    for workload, wanted in ((packed, "cp 2 with packed documents"), (odd, "in chunks of")):
        layout = Layout(cp=2, zero=0, cp_parts=None if workload is packed else 4)
        with pytest.raises(LayoutError, match=wanted):
            plan_pipeline(Job.of_step(SMALL, workload, CLIPS, layout), load_machine("cpu"))


def fed_another_slice(part: RankSchedule) -> RankSchedule:
    later = next(op.op_id for op in part.ops if op.kind == "feed" and op.index)
    return changed(part, later, index=0)


@pytest.mark.parametrize(
    "change",
    [
        dropped("cp.kv.low"), dropped("cp.kv_again.high"), dropped("cp.d_kv.low"),
        dropped("reduce.loss"), dropped("reduce.0"),
        said("cp.kv.high", last_first=None), said("cp.kv.low", last_first=True),
        said("cp.d_kv.high", last_first=None), said("cp.d_kv.low", reduction="rank_order"),
        said("cp.kv.low", axes=("dp",)), said("cp.kv_again", sequence=99),
        said("reduce.0", reduction="rank_order"), said("reduce.loss", axes=("pp",)),
        of_other_tensor("cp.kv.low", "context.0.tp0.low", "context.0.tp0.high"),
        attribute("kv_part_forward", chunk_start=(4, 0)),
        attribute("context_part_forward", chunk_start=(0, 4)),
        attribute("qkv_part_backward", kv_start=0), fed_another_slice,
    ],
)  # fmt: skip
def test_a_damaged_exchange_or_slice_is_seen(change):
    assert_seen(planned(), change)


@pytest.mark.parametrize(
    "change",
    [
        dropped("reduce.lora.0.tp0"), said("reduce.lora.0", reduction="rank_order"),
        attribute("kv_part_forward", lora_rank=2), attribute("qkv_part_backward", frozen=False),
    ],
)  # fmt: skip
def test_a_damaged_sum_of_adapters_is_seen(change):
    assert_seen(planned(ADAPTERS), change)


@pytest.mark.parametrize(
    "change",
    [
        dropped("cp.kv.0"), dropped("cp.kv_again.0"), dropped("cp.d_kv.0"), dropped("reduce.loss"),
        said("cp.kv.0", collective="all_to_all"), said("cp.kv.0", axes=("dp",)),
        said("cp.d_kv.0", sequence=99), said("cp.kv.0", reduction="pairwise"),
        of_other_tensor("cp.kv.0", "ring.0.tp0.1", "ring.0.tp0.2"),
        of_other_tensor("cp.d_kv.0", "d_ring.0.tp0.1", "d_ring.0.tp0.2"),
        of_other_tensor("cp.kv_again.0", "kv.0.0.tp0", "kv.0.1.tp0"),
        attribute("context_part_recompute", num_seen=4),
        attribute("ring_part_backward", num_seen=8),
        attribute("ring_part_forward", num_seen=(16, 16, 16, 0)),
        attribute("ring_part_forward", chunk_start=(0, 0, 0, 0)),
        attribute("ring_part_forward", not_causal=None), fed_another_slice,
    ],
)  # fmt: skip
def test_a_damaged_ring_is_seen(change):
    assert_seen(planned(**RING), change)


def test_steps_of_a_ring_in_another_order_are_seen():
    document = planned(**RING)
    part = document.schedules["stage 0"]
    first, second = (f"r0.cp.kv.0.0.tp0.{step}" for step in (0, 1))
    ops = {op.op_id: op for op in part.ops}
    swapped = {first: ops[second].operands, second: ops[first].operands}
    after = part.model_copy(
        update={
            "ops": tuple(
                op.model_copy(update={"operands": swapped.get(op.op_id, op.operands)})
                if op.op_id in swapped else op
                for op in part.ops
            )
        }
    )  # fmt: skip
    damaged = document.model_copy(update={"schedules": {"stage 0": after}})
    assert verify(damaged) and conforms(damaged)


def test_a_rank_of_a_ring_has_no_keys_of_a_whole_sequence():
    sizes = [
        {t.tensor_id: t.size_bytes for t in planned(**fields).schedules["stage 0"].tensors}
        for fields in ({**RING, "cp_exchange": "all_gather"}, RING)
    ]
    assert sizes[0]["context.0.tp0"] == 4 * sizes[1]["ring.0.tp0.1"]
    assert max(size for name, size in sizes[1].items() if name.startswith(("kv.", "ring."))) == (
        sizes[0]["context.0.tp0"] // 4
    )


def test_swapped_exchanges_and_other_meshes_are_seen():
    document = planned()
    order = list(document.order)
    order[0], order[1] = order[1], order[0]
    assert verify(document.model_copy(update={"order": tuple(order)}))
    ring = {"cp_parts": None, "cp_exchange": "ring"}
    for other in ({"cp": 1}, {"cp_parts": 2}, {"cp": 2, "cp_parts": None}, ring):
        layout = {name: v for name, v in (document.layout | other).items() if v is not None}
        assert conforms(document.model_copy(update={"layout": layout}))


@pytest.mark.parametrize("block", range(4))
def test_none_of_many_random_damages_is_accepted(block):
    exchange = {"cp_parts": None, "cp_exchange": "ring"} if block % 2 else {"cp_parts": 2}
    tried, wrongly = judged(planned(dp=2, **exchange), range(1 + 6 * block, 7 + 6 * block))
    assert sum(tried.values()) > 140
    assert not wrongly
