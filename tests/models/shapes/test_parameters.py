"""Parameters of parts, and what ranks hold of them."""

import pytest

from tests.models.active_parameters import active_parameters
from tests.models.shapes.shapes import GATED, PLAIN, ROUTED
from twinstream.models.decoders.sizes import layer_parameters, norm_parameters, rank_parameters
from twinstream.models.layout import padded_vocab

LAYER_PARTS = ("attention", "mlp", "router", "experts")


def test_a_plain_layer_by_hand() -> None:
    layer = layer_parameters(PLAIN)
    # two norms with biases, QKV, output; both FFN matrices
    assert layer.attention == 2 * 48 + (3 * 48 * 48 + 3 * 48) + (48 * 48 + 48)
    assert layer.mlp == 2 * 48 + (48 * 192 + 192) + (192 * 48 + 48)
    assert layer.total == 12 * 48**2 + 13 * 48
    assert PLAIN.num_parameters == 3 * layer.total + 2 * 48 + (200 + 64) * 48


def test_a_routed_layer_by_hand() -> None:
    layer = layer_parameters(ROUTED)
    assert layer.attention == 40 + 40 * (48 + 12 + 12) + 48 * 40 + 2 * 6
    assert layer.mlp == 0
    assert layer.router == 40 + 8 * 40
    assert (layer.num_experts, layer.expert, layer.shared_expert) == (8, 3 * 40 * 24, 3 * 40 * 16)
    idle = 6 * 3 * 40 * 24
    assert ROUTED.num_parameters - active_parameters(ROUTED) == 3 * idle


def test_all_parameters_of_a_dense_shape_are_active() -> None:
    assert active_parameters(GATED) == GATED.num_parameters


def test_a_bias_of_qkv_alone() -> None:
    biased = layer_parameters(GATED.model_copy(update={"qkv_bias": True}))
    assert biased.total - layer_parameters(GATED).total == 48 + 12 + 12


@pytest.mark.parametrize("shape", [GATED, PLAIN, ROUTED])
def test_one_rank_holds_all(shape) -> None:
    held = sum(rank_parameters(shape, 1, 1, part) for part in LAYER_PARTS)
    assert held == layer_parameters(shape).total


def test_a_rank_of_two_holds_half_of_what_is_split_and_all_that_is_not() -> None:
    norm, row_bias = 2 * 48, 48
    whole, half = (rank_parameters(PLAIN, tp, 1, "mlp") for tp in (1, 2))
    assert half == (whole - norm - row_bias) // 2 + norm + row_bias
    whole, half = (rank_parameters(PLAIN, tp, 1, "attention") for tp in (1, 2))
    assert half == (whole - norm - row_bias) // 2 + norm + row_bias


def test_key_heads_fewer_than_ranks_are_replicated() -> None:
    # of 8 query heads and 2 key heads, 2 and 1
    assert rank_parameters(GATED, 4, 1, "attention") == 40 + 40 * (12 + 6 + 6) + 12 * 40


def test_experts_are_split_over_ep_and_each_over_tp_or_etp() -> None:
    shared = 3 * 40 * 16
    assert rank_parameters(ROUTED, 1, 4, "experts") == 2 * 3 * 40 * 24 + shared
    assert rank_parameters(ROUTED, 2, 4, "experts") == 2 * 3 * 40 * 12 + shared // 2
    assert rank_parameters(ROUTED, 2, 4, "experts", etp=1) == 2 * 3 * 40 * 24 + shared // 2
    assert rank_parameters(ROUTED, 2, 4, "router") == layer_parameters(ROUTED).router


def test_the_vocabulary_is_padded_and_split() -> None:
    assert [padded_vocab(50257, tp) for tp in (1, 2, 8)] == [50304, 50432, 51200]
    assert rank_parameters(GATED, 2, 1, "embedding") == 128 * 40
    assert rank_parameters(GATED, 2, 1, "head") == 128 * 40
    assert rank_parameters(PLAIN, 2, 1, "head") == 0
    assert rank_parameters(PLAIN, 2, 1, "positions") == 64 * 48
    assert rank_parameters(PLAIN, 2, 1, "final_norm") == 2 * 48


def test_only_a_layer_norm_with_biases_has_two_parameters_a_column() -> None:
    for norm, biases, each in (("layer", True, 2), ("layer", False, 1), ("rms", True, 1)):
        shape = PLAIN.model_copy(update={"norm": norm, "biases": biases})
        assert norm_parameters(shape) == each * 48
