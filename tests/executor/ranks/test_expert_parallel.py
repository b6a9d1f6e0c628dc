"""Replicas that share experts: the bits of one process that has all of them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.executor.ranks.trained import (
    Case,
    assert_as_reference,
    planned_ranks,
    train_ranks,
)
from twinstream.clusters.conforms import require_conforming
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.models.layouts.layout import Layout
from twinstream.models.options import Experts
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import Caps

MAX_NORM = 0.25
# Matrices of a rank are whole stretches of 65,536 elements, by which norms are summed.
WIDE = Experts(count=8, per_token=2, d_ff=256)
GATED = WIDE.model_copy(update={"shared_d_ff": 32, "shared_gate": True})
BIASED = Experts(
    count=8, per_token=2, d_ff=256, shared_d_ff=32, scores="sigmoid", correction_bias=True,
    dense_layers=(0,),
)  # fmt: skip
CLIPS = Recipe(clips=True)
MASTER = Recipe(clips=True, optimizer_state="float32_master", gradients="float32")
LION = Recipe(clips=True, update="lion")
EXPERTS_FROZEN = Recipe(frozen=tuple(f"{layer}.experts" for layer in range(4)), clips=True)
OTHERS_FROZEN = Recipe(frozen=("embedding", *map(str, range(4)), "head"), clips=True)


@pytest.fixture(scope="module")
def two() -> Iterator[RankProcesses]:
    with RankProcesses(2, start_method="forkserver") as processes:
        yield processes


def shared(ep: int, **fields: object) -> Layout:
    return Layout.model_validate({"dp": ep, "ep": ep, "zero": 0, **fields})


def case_of(layout: Layout, recipe: Recipe = CLIPS, experts: Experts = WIDE) -> Case:
    few = recipe.frozen == OTHERS_FROZEN.frozen  # whose gradients are small
    norm = MAX_NORM / (100 if few else 1) if recipe.clips else 0.0
    return Case(layout, recipe, norm, preset="tiny-experts", experts=experts)


def assert_bits(case: Case, processes: RankProcesses) -> None:
    require_conforming(planned_ranks(case))
    assert_as_reference(case, train_ranks(case, processes))


@pytest.mark.parametrize(
    ("layout", "recipe", "experts"),
    [(shared(2), CLIPS, GATED), (shared(2, zero=3), LION, BIASED)],
    ids=["gated", "zero3-lion-biased"],
)
def test_ranks_that_share_experts_have_the_bits_of_one_process(two, layout, recipe, experts):
    assert_bits(case_of(layout, recipe, experts), two)


@pytest.mark.parametrize(
    ("recipe", "experts"),
    [
        (CLIPS, WIDE), (CLIPS, BIASED), (MASTER, WIDE), (LION, GATED), (EXPERTS_FROZEN, WIDE),
        (OTHERS_FROZEN, GATED),
    ],
    ids=["wide", "biased", "master", "lion", "experts-frozen", "others-frozen"],
)  # fmt: skip
@pytest.mark.parametrize(
    "layout",
    [
        *(shared(2, zero=zero) for zero in (0, 1, 2, 3)),
        *(shared(4, zero=zero) for zero in (0, 3)),
        *(shared(2, pp=2, zero=zero) for zero in (0, 3)),
        shared(2, pp=2, virtual_stages=2, pipeline="ring"),
    ],
    ids=lambda layout: layout.text.replace(" ", "-"),
)
def test_every_layout_has_the_bits_of_one_process(two, four, layout, recipe, experts):
    assert_bits(case_of(layout, recipe, experts), two if layout.num_gpus == 2 else four)


@pytest.mark.parametrize("experts", [WIDE, GATED], ids=["wide", "gated"])
def test_adapters_beside_shared_experts_have_the_bits_of_one_process(two, experts):
    recipe = Recipe(lora=lora_of("r=2,targets=q,k,v,o,gate,up,down"))
    assert_bits(case_of(shared(2), recipe, experts), two)


def test_shared_experts_move_to_the_host_and_keep_their_bits(two):
    case = replace(case_of(shared(2)), caps=Caps(device_bytes=4_500_000))
    moved = [op for op in planned_ranks(case).schedules["stage 0"].ops if op.kind == "copy"]
    assert len(moved) > 20
    assert_bits(case, two)
