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
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.workload import Packing, Workload

SAVES = {"lora": Lora(rank=4, alpha=8.0, saved=("lm_head",))}
ADAPTERS = Recipe(lora=Lora(rank=4, alpha=8.0), clips=True)
PAIRS = {"loss": Dpo()}


@cache
def planned(recipe: Recipe = CLIPS, **fields: object) -> Schedule:
    """Of cp 2 ranks that have two parts of each sequence, four slices of four tokens."""
    layout = Layout.model_validate({"cp": 2, "cp_parts": 4, "zero": 0, **fields})
    spec = SMALL.model_copy(update={"num_layers": layout.pp})
    return plan_pipeline(Job.of_step(spec, WORKLOAD, recipe, layout), load_machine("cpu"))


def test_its_evaluation_is_proven_too():
    found = cluster_evaluation_of(planned(pp=2))
    assert verify(found) == []
    assert conforms(found) == []


@pytest.mark.parametrize(
    ("recipe", "fields", "wanted"),
    [
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


def test_swapped_exchanges_and_other_meshes_are_seen():
    document = planned()
    order = list(document.order)
    order[0], order[1] = order[1], order[0]
    assert verify(document.model_copy(update={"order": tuple(order)}))
    for other in ({"cp": 1}, {"cp_parts": 2}, {"cp": 2, "cp_parts": None}):
        layout = {name: v for name, v in (document.layout | other).items() if v is not None}
        assert conforms(document.model_copy(update={"layout": layout}))


@pytest.mark.parametrize("block", range(4))
def test_none_of_many_random_damages_is_accepted(block):
    tried, wrongly = judged(planned(cp_parts=2, dp=2), range(1 + 6 * block, 7 + 6 * block))
    assert sum(tried.values()) > 140
    assert not wrongly
