"""Replicas that share experts: the bits of one process that has all of them."""

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
    [(shared(2), CLIPS, GATED), (shared(2, dp=4, zero=3), LION, BIASED)],
    ids=["gated", "of-four-zero3-lion-biased"],
)
def test_ranks_that_share_experts_have_the_bits_of_one_process(two, four, layout, recipe, experts):
    case = case_of(layout, recipe, experts)
    assert_bits(case, two if layout.num_gpus == 2 else four)


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
        *(shared(2, dp=4, zero=zero) for zero in (0, 1, 3)),
    ],
    ids=lambda layout: layout.text.replace(" ", "-"),
)
def test_every_layout_has_the_bits_of_one_process(two, four, layout, recipe, experts):
    assert_bits(case_of(layout, recipe, experts), two if layout.num_gpus == 2 else four)


@pytest.mark.parametrize(
    "layout",
    [shared(4, dp=8), shared(2, dp=4, pp=2, zero=3)],
    ids=lambda layout: layout.text.replace(" ", "-"),
)
def test_eight_ranks_have_the_bits_of_one_process(layout):
    with RankProcesses(8, start_method="forkserver") as eight:
        assert_bits(case_of(layout, CLIPS, GATED), eight)


@pytest.mark.parametrize("experts", [WIDE, GATED], ids=["wide", "gated"])
@pytest.mark.parametrize("base", ["model", "nf4"])
def test_adapters_beside_shared_experts_have_the_bits_of_one_process(two, experts, base):
    targets = "q,k,v,o" if experts is WIDE else "q,k,v,o,gate,up,down"
    recipe = Recipe(lora=lora_of(f"r=2,targets={targets}"), base=base)
    assert_bits(case_of(shared(2, zero=3), recipe, experts), two)


@pytest.mark.parametrize("experts", [WIDE, BIASED], ids=["wide", "biased"])
@pytest.mark.parametrize(
    ("targets", "base", "fields"),
    [
        ("experts", "model", {}), ("q,experts", "model", {"zero": 3}),
        ("q,o,gate,experts", "model", {"dp": 4, "zero": 1}), ("v,experts", "nf4", {"pp": 2}),
    ],
)  # fmt: skip
def test_adapters_of_shared_experts_have_the_bits_of_one_process(
    two, four, targets, base, fields, experts
):
    layout = shared(2, **fields)
    case = case_of(layout, Recipe(lora=lora_of(f"r=2,targets={targets}"), base=base), experts)
    if base == "nf4":  # a row has whole blocks of 64 elements
        case = replace(case, experts=WIDE)
    assert_bits(case, two if layout.num_gpus == 2 else four)


@pytest.mark.parametrize("layout", [shared(2), shared(2, dp=4, zero=1)])
def test_the_transports_sums_are_near_those_in_rank_order(two, four, layout):
    """Float32; of AdamW's state sums in another order leave so much."""
    by_library = layout.model_copy(update={"reduction": "library"})
    case = replace(case_of(by_library), dtype="float32")
    outcomes = train_ranks(case, two if layout.num_gpus == 2 else four)
    expected = reference(replace(case, layout=layout))
    (found,) = states(case, outcomes)
    for replica, losses in enumerate(expected.losses):
        assert numbers(outcomes[replica], "loss") == pytest.approx(losses, rel=1e-6)
    for name in (name for name in expected.state if name.startswith("opt.")):
        one, other = (flat.view(torch.float32) for flat in (found[name], expected.state[name]))
        assert float((one - other).norm() / other.norm()) < 1e-5, name


def test_shared_experts_move_to_the_host_and_keep_their_bits(two):
    case = replace(case_of(shared(2)), caps=Caps(device_bytes=4_500_000))
    moved = [op for op in planned_ranks(case).schedules["stage 0"].ops if op.kind == "copy"]
    assert len(moved) > 20
    assert_bits(case, two)
