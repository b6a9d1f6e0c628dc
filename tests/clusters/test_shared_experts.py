"""Documents of ranks that share experts: what they hold, what is refused, that damage is seen."""

from functools import cache

import pytest

from tests.clusters.changes import (
    assert_seen,
    attribute,
    communication,
    dropped,
    judged,
    of_other_tensor,
    said,
)
from twinstream.clusters.conforms import conforms
from twinstream.clusters.kernel_sets import run_refusal
from twinstream.clusters.pipeline import cluster_evaluation_of, plan_pipeline
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, LayoutError
from twinstream.models.options import Experts
from twinstream.models.presets import load_preset
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.projecting import rank_part
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Communicate
from twinstream.schedule.workload import Workload

WORKLOAD = Workload(seq_len=32, chunk_tokens=32, chunks_per_round=2, rounds_per_step=2)
D_MODEL, COUNT, PER_TOKEN, D_FF = 128, 8, 2, 256
EXPERTS = Experts(count=COUNT, per_token=PER_TOKEN, d_ff=D_FF, shared_d_ff=32, shared_gate=True)
SMALL = load_preset("tiny").model_copy(update={"num_layers": 2, "experts": EXPERTS})
CLIPS = Recipe(clips=True)
ADAPTERS = Recipe(lora=lora_of("r=2,targets=q,experts"))


def planned(recipe: Recipe = CLIPS, **fields: object) -> Schedule:
    return _planned(recipe, Layout.model_validate({"dp": 2, "ep": 2, "zero": 0, **fields}))


@cache
def _planned(recipe: Recipe, layout: Layout) -> Schedule:
    return plan_pipeline(Job.of_step(SMALL, WORKLOAD, recipe, layout), load_machine("cpu"))


def test_ranks_together_hold_each_expert_once():
    sizes = {t.tensor_id: t.size_bytes for t in planned().schedules["stage 0"].tensors}
    matrices = 3 * COUNT * D_FF * D_MODEL
    assert 2 * sizes["param.0.experts"] == matrices * SMALL.itemsize
    assert sizes["grad_pieces.0.experts"] == matrices * SMALL.itemsize
    by_library = planned(reduction="library").schedules["stage 0"].tensors
    assert "grad_pieces.0.experts" not in {tensor.tensor_id for tensor in by_library}


def test_rows_that_come_have_room_for_those_of_all_ranks():
    """A token goes to two experts of one rank at the most: 2 x 32 x 2 rows can come."""
    part = planned().schedules["stage 0"]
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in part.tensors}
    rows = WORKLOAD.chunk_tokens * PER_TOKEN
    assert sizes["rows.0"] == rows * D_MODEL * SMALL.itemsize
    assert sizes["came_rows.0"] == 2 * sizes["rows.0"]
    assert not any(name.startswith("experts.") for name in sizes)  # nothing of them is kept


def test_each_rank_has_experts_of_its_own_and_their_random_numbers():
    document = planned()
    firsts, places = [], []
    for rank in range(2):
        calls = rank_part(document, rank).schedule.calls
        firsts.append(calls["experts_forward@0"].attributes["first_expert"])
        names = [f"adamw.0.experts.part{number}" for number in range(2)]
        places.append([calls[name].attributes["element_offset"] for name in names])
    gate_up, down = 2 * COUNT * D_FF * D_MODEL, COUNT * D_FF * D_MODEL
    assert firsts == [0, COUNT // 2]
    assert places == [[0, gate_up], [gate_up // 2, gate_up + down // 2]]


@pytest.mark.parametrize(
    "fields", [{}, {"pp": 2, "zero": 3}, {"tp": 2, "sequence_parallel": False}, {"cp": 2}]
)
def test_its_evaluation_is_proven_too(fields):
    found = cluster_evaluation_of(planned(**fields))
    assert verify(found) == []
    assert conforms(found) == []


@pytest.mark.parametrize(
    ("recipe", "fields", "told"),
    [
        ({}, {"dp": 3}, "experts shared by 2 of 3 replicas (as many in each group)"),
        ({}, {"dp": 3, "ep": 3}, "8 experts on 3 ranks"),
        ({}, {"expert_nodes": 2}, "tokens sent once to each of 2 nodes (to ranks, here)"),
        ({}, {"capacity_factor": 1.2}, "a capacity of 1.2 (no row is dropped here)"),
        ({"lora": ADAPTERS.lora, "clips": True}, {}, "clipped gradients of LoRA of experts"),
        ({"lora": ADAPTERS.lora}, {"tp": 2, "sequence_parallel": False},
         "LoRA of experts beside tp 2 beside ep 2"),
        ({"update": "muon"}, {}, "Muon, whose state is by matrix beside ep 2"),
        ({"optimizer_state": "8bit"}, {}, "8-bit optimizer state"),
        ({}, {"tp": 2, "parts": 4, "sequence_parallel": False}, "ep 2 beside 4 parts on tp 2"),
        ({}, {"cp": 2, "dp": 6, "ep": 3}, "ep 3 beside cp 2 (a power of two: sums are of pairs)"),
        ({}, {"tp": 2, "etp": 1, "sequence_parallel": False}, "ep 2 of whole experts beside tp 2"),
        ({"clips": True}, {"dp": 8, "ep": 8}, "32,768 elements a rank (--max-grad-norm 0)"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused_by_name(recipe, fields, told):
    layout = Layout.model_validate({"dp": 2, "ep": 2, "zero": 0, **fields})
    assert told in str(run_refusal(SMALL, Recipe(**recipe), layout))
    with pytest.raises(LayoutError) as caught:
        planned(Recipe(**recipe), **fields)
    assert told in str(caught.value)


def _without_counts(named: str):
    def change(part):
        op = communication(part, named)
        operands = [one for one in op.operands if one.name != "counts"]
        return said(named, operands=tuple(operands))(part)

    return change


def _turned_round(named: str):
    """What is read is written, and the other way round."""

    def change(part):
        given, taken, counts = communication(part, named).operands
        ends = (given.model_copy(update={"mode": "write", "version": given.version + 1}),
                taken.model_copy(update={"mode": "read"}))  # fmt: skip
        return said(named, operands=(*ends, counts))(part)

    return change


@pytest.mark.parametrize(
    "change",
    [
        dropped("ep.counts"), dropped("ep.dispatch.rows"), dropped("ep.combine.rows"),
        dropped("ep.dispatch_backward.row_weights"), dropped("ep.combine_backward.d_rows"),
        dropped("gather.squares.0.experts"), dropped("reduce.0.experts"),
        dropped("gather.grad.0.experts"), said("reduce.0.experts", reduction="library"),
        said("ep.dispatch.rows", collective="all_gather"), said("ep.combine.rows", axes=("pp",)),
        said("ep.dispatch.rows", sequence=99),
        of_other_tensor("ep.dispatch.rows.0.0", "rows.0", "rows.1"),
        of_other_tensor("ep.combine.rows.0.0", "counts.0.0", "counts.0.1"),
        of_other_tensor("ep.dispatch.rows.0.0", "counts.0.0", "own_counts.0"),
        _without_counts("ep.dispatch.rows"), _turned_round("ep.dispatch.rows"),
        attribute("experts_forward", first_expert=(4, 0)),
        attribute("experts_backward", num_pieces=1), attribute("experts_backward", ep=4),
        attribute("adamw.0.experts.part1", element_offset=0),
        attribute("block_forward", ep=1),
    ],
)  # fmt: skip
def test_a_damaged_exchange_or_share_is_seen(change):
    assert_seen(planned(dp=4), change)


IN_PARTS = {"tp": 2, "parts": 2, "sequence_parallel": False}


@pytest.mark.parametrize(
    "change",
    [
        dropped("ep.counts"), dropped("ep.combine.rows"), dropped("tp.mlp."),
        dropped("ep.combine_backward.row_weights"), dropped("gather.squares.0.experts"),
        said("ep.dispatch.rows", axes=("tp",)), said("tp.mlp_backward", axes=("ep",)),
        of_other_tensor("ep.combine.rows.0.0", "counts.0.0", "counts.0.1"),
        attribute("experts_forward", first_expert=(4, 0)),
        attribute("experts_forward", **{"experts.d_ff": D_FF}),
        attribute("mlp_part_dispatch_forward", ep=1), attribute("mlp_part_combine_forward", ep=4),
        attribute("adamw.0.experts.tp0.part1", element_offset=0),
    ],
)  # fmt: skip
def test_a_damaged_exchange_or_share_in_parts_is_seen(change):
    assert_seen(planned(**IN_PARTS), change)


@pytest.mark.parametrize(
    "change",
    [
        dropped("reduce.lora.0.experts"), dropped("gather.grad.lora.0.experts"),
        attribute("experts_forward", lora_rank=4), attribute("experts_backward", num_pieces=1),
        attribute("adamw.lora.0.experts.part1", element_offset=0),
        attribute("adamw.lora.0.experts.part0", tensor_seed=1),
    ],
)  # fmt: skip
def test_a_damaged_share_of_adapters_is_seen(change):
    assert_seen(planned(ADAPTERS, dp=4), change)


@pytest.mark.parametrize(
    "change",
    [
        dropped("reduce.cp.0.experts"), said("reduce.cp.0.experts", reduction="rank_order"),
        said("ep.dispatch.rows", axes=("cp",)), attribute("sum_pieces", pairwise=False),
    ],
)  # fmt: skip
def test_a_damaged_sum_of_experts_of_slices_is_seen(change):
    assert_seen(planned(cp=2), change)


def test_swapped_exchanges_and_other_meshes_are_seen():
    document = planned()
    order = list(document.order)
    order[0], order[1] = order[1], order[0]
    assert verify(document.model_copy(update={"order": tuple(order)}))
    ops = list(document.schedules["stage 0"].ops)
    at = [i for i, op in enumerate(ops) if isinstance(op, Communicate) and op.axes == ("ep",)]
    first, second = at[1], at[2]
    numbers = ops[first].sequence, ops[second].sequence
    ops[first], ops[second] = (
        ops[second].model_copy(update={"sequence": numbers[0]}),
        ops[first].model_copy(update={"sequence": numbers[1]}),
    )
    part = document.schedules["stage 0"].model_copy(update={"ops": tuple(ops)})
    swapped = document.model_copy(update={"schedules": {"stage 0": part}})
    assert verify(swapped) or conforms(swapped)
    for fields in ({"ep": 1}, {"dp": 4}, {"reduction": "library"}):
        assert conforms(document.model_copy(update={"layout": document.layout | fields}))


@pytest.mark.parametrize("fields", [{"dp": 4}, {"tp": 2, "sequence_parallel": False}, {"cp": 2}])
def test_no_random_damage_that_brute_force_refuses_is_accepted(fields):
    tried, wrongly = judged(planned(**fields), range(1))
    assert sum(tried.values()) > 20
    assert not wrongly


def test_none_of_many_random_damages_is_accepted():
    tried, wrongly = judged(planned(), range(1, 9))
    assert sum(tried.values()) > 150
    assert not wrongly
