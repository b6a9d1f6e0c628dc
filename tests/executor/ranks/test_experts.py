"""A model with experts on ranks: pipelines and replicas have the bits of one process."""

import pytest

from tests.executor.ranks.trained import Case, assert_as_reference, train_ranks
from twinstream.models.layouts.layout import Layout
from twinstream.models.options import Experts
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.recipe import Recipe

EXPERTS = Recipe(lora=lora_of("r=2,targets=q,experts"))


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [(Layout(dp=2, zero=0), Recipe()), (Layout(dp=2, zero=1), Recipe()),
     (Layout(dp=2, zero=3), Recipe()), (Layout(dp=2, zero=3), EXPERTS), (Layout(pp=2), Recipe()),
     (Layout(pp=2), EXPERTS)],
    ids=["dp", "zero1", "zero3", "zero3 adapters", "pp", "pp adapters"],
)  # fmt: skip
def test_experts_have_the_bits_of_one_process(two, layout, recipe):
    case = Case(layout, recipe, preset="tiny-experts")
    assert_as_reference(case, train_ranks(case, two))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_biases_of_routers_are_whole_beside_shards(two, zero):
    biased = Experts(
        count=8, per_token=2, d_ff=64, shared_d_ff=32, scores="sigmoid", correction_bias=True,
        dense_layers=(0,),
    )  # fmt: skip
    case = Case(Layout(dp=2, zero=zero), experts=biased)
    assert_as_reference(case, train_ranks(case, two))
