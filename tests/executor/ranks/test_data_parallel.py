"""Replicas, and pipelines of them: the bits of one process that adds up their gradients alike."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.executor.ranks.trained import (
    Case,
    assert_as_reference,
    numbers,
    planned_ranks,
    reference,
    states,
    train_ranks,
)
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.models.layouts.layout import Layout
from twinstream.models.recipes.lora import Lora
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import Caps
from twinstream.schedule.ops import Communicate

MAX_NORM = 0.25  # of gradients whose norm is about 1
EIGHT_BIT = Recipe(optimizer_state="8bit", gradients="float32")
MASTER = Recipe(optimizer_state="float32_master", gradients="float32")


@pytest.fixture(scope="module")
def three() -> Iterator[RankProcesses]:
    with RankProcesses(3) as processes:
        yield processes


@pytest.fixture(scope="module")
def four() -> Iterator[RankProcesses]:
    with RankProcesses(4) as processes:
        yield processes


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_replicas_have_the_bits_of_one_process(two, zero):
    case = Case(Layout(dp=2, zero=zero))
    assert_as_reference(case, train_ranks(case, two))


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("recipe", [EIGHT_BIT, MASTER], ids=["8bit", "master"])
def test_shards_of_other_states_have_the_bits_of_whole_ones(two, zero, recipe):
    case = Case(Layout(dp=2, zero=zero), recipe)
    assert_as_reference(case, train_ranks(case, two))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_clipped_replicas_have_the_norm_of_one_process(two, zero):
    case = Case(Layout(dp=2, zero=zero), Recipe(clips=True), MAX_NORM)
    assert_as_reference(case, train_ranks(case, two))


def test_shards_move_to_the_host_and_keep_their_bits(two):
    caps = Caps(device_bytes=4_300_000)  # of 9.9 MB that it would use
    case = Case(Layout(dp=2, zero=3), Recipe(clips=True), MAX_NORM, caps)
    assert_as_reference(case, train_ranks(case, two))


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_sums_apart_in_little_memory_have_the_bits_of_those_beside(two, zero):
    case = Case(Layout(dp=2, zero=zero), caps=Caps(device_bytes=2_000_000))
    assert not planned_ranks(case).layout["dp_overlap"]
    assert planned_ranks(replace(case, caps=None)).layout["dp_overlap"]
    assert_as_reference(case, train_ranks(case, two))


def by_library(case: Case) -> Case:
    layout = case.layout.model_copy(update={"reduction": "library"})
    ops = planned_ranks(replace(case, layout=layout)).schedules["stage 0"].ops
    sums = [op for op in ops if isinstance(op, Communicate) and op.op_id.startswith("reduce.")]
    assert {op.reduction for op in sums if op.axes == ("dp",)} == {"library"}
    assert {op.reduction for op in sums if op.axes == ("pp",)} <= {"rank_order"}
    return replace(case, layout=layout)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_summands_have_one_sum_by_the_library_too(two, zero):
    case = by_library(Case(Layout(dp=2, zero=zero), Recipe(clips=True), MAX_NORM))
    outcomes = train_ranks(case, two)
    assert_as_reference(case, outcomes)
    assert {outcome.scratch_bytes for outcome in outcomes} == {0}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_the_librarys_sums_of_four_are_near_those_in_rank_order(four, zero, dtype, tolerance):
    """Every addition rounds to the model's type; of AdamW's state that leaves so much."""
    case = by_library(Case(Layout(dp=4, zero=zero), dtype=dtype))
    outcomes = train_ranks(case, four)
    expected, found = reference(case), states(case, outcomes)
    for state in found:
        assert all(torch.equal(flat, found[0][name]) for name, flat in state.items())
    for replica, losses in enumerate(expected.losses):
        assert numbers(outcomes[replica], "loss") == pytest.approx(losses, rel=tolerance / 10)
    apart = []
    for name in (name for name in expected.state if name.startswith("opt.")):
        both = (state[name].view(getattr(torch, dtype)) for state in (found[0], expected.state))
        one, other = (flat.float() for flat in both)
        apart.append(float((one - other).norm() / other.norm()))
    assert 0 < max(apart) < tolerance


@pytest.mark.parametrize("zero", [0, 3])
def test_a_pipelines_norm_is_summed_in_rank_order_whatever_its_gradients_are(four, zero):
    case = Case(Layout(pp=2, dp=2, zero=zero), Recipe(clips=True), MAX_NORM, preset="tiny-qwen3")
    assert_as_reference(case, train_ranks(by_library(case), four))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2),
        Layout(pp=2, pipeline="gpipe"),
        Layout(pp=2, virtual_stages=2, pipeline="interleaved"),
        Layout(pp=2, virtual_stages=2, pipeline="ring"),
    ],
    ids=lambda layout: layout.pipeline,
)
@pytest.mark.parametrize("max_norm", [0.0, MAX_NORM])
def test_a_pipeline_has_the_bits_of_one_device(two, layout, max_norm):
    case = Case(layout, Recipe(clips=max_norm > 0), max_norm)
    assert_as_reference(case, train_ranks(case, two))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("max_norm", [0.0, MAX_NORM])
def test_a_pipeline_of_replicas_has_the_bits_of_one_process(four, zero, max_norm):
    case = Case(Layout(pp=2, dp=2, zero=zero), Recipe(clips=max_norm > 0), max_norm)
    assert_as_reference(case, train_ranks(case, four))


def test_stages_of_shards_move_to_the_host_and_keep_their_bits(four):
    caps = Caps(device_bytes=2_700_000)  # of 6.5 MB that a stage would use
    case = Case(Layout(pp=2, dp=2, zero=3), Recipe(clips=True), MAX_NORM, caps)
    assert_as_reference(case, train_ranks(case, four))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_four_replicas_have_the_bits_of_one_process(four, zero):
    case = Case(Layout(dp=4, zero=zero), Recipe(clips=True), MAX_NORM)
    assert_as_reference(case, train_ranks(case, four))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shards_that_do_not_divide_are_padded(three, zero):
    case = Case(Layout(dp=3, zero=zero), EIGHT_BIT)
    assert_as_reference(case, train_ranks(case, three))


def test_a_ring_of_shards_has_the_bits_of_one_process(four):
    case = Case(Layout(pp=2, dp=2, zero=3, virtual_stages=2, pipeline="ring"))
    assert_as_reference(case, train_ranks(case, four))


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=4), Layout(pp=2, virtual_stages=2, pipeline="ring")]
    + [Layout(pp=2, dp=2, zero=zero) for zero in (0, 1, 2, 3)],
    ids=lambda layout: f"{layout.pipeline}-pp{layout.pp}-zero{layout.zero}",
)
@pytest.mark.parametrize("max_norm", [0.0, MAX_NORM])
def test_a_tied_embedding_has_one_sum_on_both_ends(two, four, layout, max_norm):
    case = Case(layout, Recipe(clips=max_norm > 0), max_norm, preset="tiny-qwen3")
    assert_as_reference(case, train_ranks(case, four if layout.num_gpus == 4 else two))


@pytest.mark.parametrize("zero", [0, 3])
def test_replicas_of_a_whole_tied_model_have_the_bits_of_one_process(two, zero):
    case = Case(Layout(dp=2, zero=zero), preset="tiny-qwen3")
    assert_as_reference(case, train_ranks(case, two))


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(lora=Lora(rank=4, alpha=8.0)),
        Recipe(lora=Lora(rank=4, alpha=8.0), clips=True),
        Recipe(frozen=("embedding", "0", "2"), clips=True),
        Recipe(frozen=("embedding", "0", "1", "head")),
    ],
    ids=["lora", "lora-clips", "some-frozen", "a-stage-frozen"],
)
@pytest.mark.parametrize("preset", ["tiny", "tiny-qwen3"])
@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2), Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(pp=2, dp=2, zero=3)],
    ids=lambda layout: f"pp{layout.pp}-dp{layout.dp}-zero{layout.zero}",
)
def test_frozen_weights_stay_and_adapters_have_the_bits_of_one_process(
    two, four, layout, preset, recipe
):
    case = Case(layout, recipe, MAX_NORM / 100 if recipe.clips else 0.0, preset=preset)
    assert_as_reference(case, train_ranks(case, four if layout.num_gpus == 4 else two))


def test_four_stages_have_the_norm_of_one_device(four):
    case = Case(Layout(pp=4), Recipe(clips=True), MAX_NORM)
    assert_as_reference(case, train_ranks(case, four))
