"""Tensor parallel ranks that each have some columns of every expert: bits of one process."""

from dataclasses import replace

import pytest
import torch

from tests.executor.ranks import test_context_parallel
from tests.executor.ranks.test_context_parallel import laid as cp_laid
from tests.executor.ranks.test_context_parallel import rings
from tests.executor.ranks.test_expert_parallel import (
    BIASED,
    EXPERTS_FROZEN,
    GATED,
    OTHERS_FROZEN,
    WIDE,
)
from tests.executor.ranks.test_tensor_parallel import (
    CLIPS,
    LION,
    MASTER,
    assert_as_one_process,
    assert_near_whole_blocks,
    case_of,
    laid,
    trained,
)
from tests.executor.ranks.trained import WORKLOAD, Case, planned_ranks
from twinstream.models.layouts.layout import Layout
from twinstream.models.options import Experts
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.document import Caps

ADAPTERS = Recipe(kernels=KernelChoice(), lora=lora_of("r=2,targets=q,v,experts"))
ALL_ADAPTERS = Recipe(kernels=KernelChoice(), lora=lora_of("r=2,targets=q,o,gate,down,experts"))
OF_ATTENTION = Recipe(kernels=KernelChoice(), lora=lora_of("r=2,targets=q,v"))
NF4_OF_ATTENTION = OF_ATTENTION.model_copy(update={"base": "nf4"})
NF4 = ADAPTERS.model_copy(update={"base": "nf4"})


def of(layout: Layout, recipe: Recipe = CLIPS, experts: Experts = WIDE, **fields: object) -> Case:
    case = case_of(layout, recipe, preset="tiny-experts", experts=experts, **fields)
    few = recipe.frozen == OTHERS_FROZEN.frozen
    return replace(case, max_norm=case.max_norm / 100) if few else case


@pytest.mark.parametrize(
    ("layout", "recipe", "experts"),
    [(laid(2, parts=4), CLIPS, GATED), (laid(2, parts=2), ALL_ADAPTERS, GATED)],
    ids=["gated", "adapters"],
)
def test_two_ranks_of_parts_of_experts_have_the_bits_of_one_process(two, layout, recipe, experts):
    assert_as_one_process(of(layout, recipe, experts), two)


LAYOUTS = (
    laid(1, parts=4), laid(4, parts=4), laid(2, parts=4, recompute="experts"),
    laid(2, parts=4, recompute="attention"), laid(2, parts=4, recompute="full"),
    laid(2, parts=4, pp=2), laid(2, parts=4, pp=2, virtual_stages=2, pipeline="ring"),
    *(laid(2, parts=4, dp=2, zero=zero) for zero in (0, 1, 3)),
)  # fmt: skip
RECIPES = {
    "gated-master": (MASTER, GATED), "biased-lion": (LION, BIASED),
    "experts-frozen": (EXPERTS_FROZEN, GATED), "others-frozen": (OTHERS_FROZEN, WIDE),
    "adapters": (ADAPTERS, WIDE),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.text.replace(" ", "-"))
def test_every_layout_has_the_bits_of_one_process(one, two, four, layout, name):
    recipe, experts = RECIPES[name]
    recipe = recipe.model_copy(update={"kernels": KernelChoice()})
    assert_as_one_process(of(layout, recipe, experts), {1: one, 2: two, 4: four}[layout.num_gpus])


@pytest.mark.parametrize("layout", [laid(2, parts=2), laid(2, parts=2, dp=2, zero=3)])
@pytest.mark.parametrize("experts", [WIDE, GATED], ids=["wide", "gated"])
def test_parts_of_a_base_in_few_bits_have_the_bits_of_one_process(two, four, layout, experts):
    """A part has 64 columns of attention's output, and of each network."""
    wide = experts.model_copy(update={"shared_d_ff": 128 if experts.shared_d_ff else 0})
    case = replace(of(layout, NF4, wide), heads=16)
    assert_as_one_process(case, two if layout.num_gpus == 2 else four)


@pytest.mark.parametrize("layout", [laid(2), laid(4), laid(2, dp=2, zero=1)])
def test_the_transports_sums_are_near_a_whole_block_s(two, four, layout):
    assert_near_whole_blocks(
        of(layout, experts=GATED, dtype="float32"), two if layout.num_gpus == 2 else four
    )


def shared(tp: int, ep: int = 2, **fields: object) -> Layout:
    return laid(tp, **{"parts": tp, "dp": ep, "ep": ep, **fields})


@pytest.mark.parametrize(
    ("layout", "recipe", "experts"),
    [
        (shared(1), CLIPS, GATED), (shared(2), CLIPS, WIDE), (shared(2), MASTER, GATED),
        (shared(2, zero=3), LION, BIASED), (shared(2), EXPERTS_FROZEN, GATED),
        (shared(2, zero=1), OTHERS_FROZEN, WIDE), (shared(1, dp=4, zero=1), CLIPS, BIASED),
        (shared(1, pp=2), CLIPS, GATED), (shared(1, ep=4), CLIPS, WIDE),
        (shared(1, zero=3), NF4_OF_ATTENTION, WIDE),
    ],
    ids=lambda one: one.text.replace(" ", "-") if isinstance(one, Layout) else "",
)  # fmt: skip
def test_parts_with_shared_experts_have_the_bits_of_parts_with_all(
    two, four, layout, recipe, experts
):
    recipe = recipe.model_copy(update={"kernels": KernelChoice()})
    assert_as_one_process(of(layout, recipe, experts), two if layout.num_gpus == 2 else four)


@pytest.mark.parametrize(
    ("layout", "recipe", "experts"),
    [
        (cp_laid(1, 2, dp=2, ep=2), CLIPS, WIDE), (cp_laid(2, 2, dp=2, ep=2), MASTER, GATED),
        (cp_laid(2, 4, dp=2, ep=2, zero=3), LION, BIASED), (cp_laid(2, 4), CLIPS, GATED),
        (cp_laid(2, 2, tp=2, parts=2), CLIPS, BIASED),
    ],
    ids=lambda one: one.text.replace(" ", "-") if isinstance(one, Layout) else "",
)  # fmt: skip
def test_slices_with_experts_have_the_bits_of_one_process(two, four, layout, recipe, experts):
    case = test_context_parallel.case_of(layout, recipe, preset="tiny-experts", experts=experts)
    test_context_parallel.assert_as_one_process(case, two if layout.num_gpus == 2 else four)


@pytest.mark.parametrize("ep", [2, 4])
def test_pairs_of_replicas_with_shared_experts_have_the_bits_of_those_with_all(four, ep):
    cases = [
        replace(
            test_context_parallel.case_of(cp_laid(1, 2, dp=4, ep=one), preset="tiny-experts"),
            experts=WIDE, workload=WORKLOAD,
        )
        for one in (1, ep)
    ]  # fmt: skip
    (losses, norms, state), found = (trained(case, four) for case in cases)
    assert found[:2] == (losses, norms)
    assert all(torch.equal(found[2][name], flat) for name, flat in state.items())


@pytest.mark.parametrize("recipe", [CLIPS, OF_ATTENTION], ids=["all", "adapters"])
def test_shared_experts_beside_a_ring_have_the_bits_of_experts_on_each_rank(four, recipe):
    cases = [
        replace(
            test_context_parallel.case_of(rings(2, dp=2, ep=ep), recipe, preset="tiny-experts"),
            experts=WIDE,
        )
        for ep in (1, 2)
    ]
    (losses, norms, state), found = (trained(case, four) for case in cases)
    assert found[:2] == (losses, norms)
    assert all(torch.equal(found[2][name], flat) for name, flat in state.items())


def test_parts_of_experts_move_to_the_host_and_keep_their_bits(two):
    case = of(laid(2, parts=4), caps=Caps(device_bytes=3_500_000))
    moved = [op for op in planned_ranks(case).schedules["stage 0"].ops if op.kind == "copy"]
    assert len(moved) > 20
    assert_as_one_process(case, two)
