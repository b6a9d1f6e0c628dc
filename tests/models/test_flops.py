"""Model FLOPs and bytes of saved activations."""

import pytest

from tests.models.shapes.shapes import GATED, PLAIN, ROUTED
from tests.models.small_model import SMALL
from twinstream.models.presets import load_preset
from twinstream.models.providers.flops import (
    SavedLevel,
    model_flops_per_sequence,
    saved_bytes_per_token,
)


def test_flops_of_a_small_model_by_hand() -> None:
    # S = 5. Q and output 10 x 24, K and V 10 x 12, gate, up and down 10 x 7, 2 FLOPs each, 5 rows.
    matmul = 2 * 5 * (2 * 240 + 2 * 120 + 3 * 70)
    # two products of 5 x 5 x 24, 2 FLOPs each, half of them masked; four in backward
    forward, backward = 2 * (2 * 600) // 2, 4 * (2 * 600) // 2
    head = 3 * 2 * 5 * 110
    assert 3 * (3 * matmul + forward + backward) + head == 97_800
    assert model_flops_per_sequence(SMALL, 5) == 97_800


def test_tying_the_embeddings_changes_no_flops() -> None:
    tied = SMALL.model_copy(update={"tied_embeddings": True})
    assert model_flops_per_sequence(tied, 5) == model_flops_per_sequence(SMALL, 5)


def test_flops_are_whole_numbers_without_rounding() -> None:
    flops = model_flops_per_sequence(load_preset("32b"), 1_048_576)
    assert isinstance(flops, int)
    # d 5120, k 1024, f 27648, V 152064, 64 layers, S = 2**20
    matmul = 2 * 5120 * (2 * 5120 + 2 * 1024 + 3 * 27648)
    assert flops == 2**20 * (64 * (3 * matmul + 6 * 2**20 * 5120) + 6 * 5120 * 152064)


@pytest.mark.parametrize(
    ("name", "input_bytes", "attention_bytes", "full_bytes"),
    [
        ("8b", 12_296, 20_616, 94_344),
        ("32b", 14_344, 24_744, 155_816),
        ("1b", 6_152, 10_376, 51_336),
    ],
)
def test_saved_bytes_per_token_and_layer_of_the_presets(
    name: str, input_bytes: int, attention_bytes: int, full_bytes: int
) -> None:
    spec = load_preset(name)
    levels = [level for level in SavedLevel if level is not SavedLevel.EXPERTS]
    saved = [saved_bytes_per_token(spec, level) for level in levels]
    assert saved == [input_bytes, attention_bytes, full_bytes]


def test_saved_bytes_use_the_query_width_and_the_dtype() -> None:
    # d 10, d_q 24, d_kv 12, 4 heads, f 7
    assert saved_bytes_per_token(SMALL, SavedLevel.INPUT) == 2 * (10 + 24) + 8 == 76
    assert saved_bytes_per_token(SMALL, SavedLevel.ATTENTION) == 76 + 4 * 4 + 2 * 24 == 140
    assert saved_bytes_per_token(SMALL, SavedLevel.FULL) == 140 + 2 * (24 + 10 + 14) == 236
    wide = SMALL.model_copy(update={"dtype": "float32"})
    # norm scalars (8) and log-sum-exp (16) are float32 already
    assert saved_bytes_per_token(wide, SavedLevel.FULL) == 2 * (236 - 24) + 24


def test_flops_of_a_plain_shape_are_korthikantis_less_the_masked_half() -> None:
    # arXiv:2205.05198, appendix A: 72 B L s h^2 (1 + s / 6h + v / 12hL), attention not causal
    s, h, layers, v = 16, 48, 3, 200
    published = 72 * layers * s * h**2 + 12 * layers * s**2 * h + 6 * s * h * v
    assert model_flops_per_sequence(PLAIN, s) == published - 6 * layers * s**2 * h


def test_a_gate_is_a_third_matrix() -> None:
    plain = GATED.model_copy(update={"mlp": "gelu"})
    gate = 3 * 3 * 2 * 16 * 40 * 56
    assert model_flops_per_sequence(GATED, 16) - model_flops_per_sequence(plain, 16) == gate


def test_only_a_tokens_own_experts_count_and_the_router() -> None:
    columns = 8 + 3 * (2 * 24 + 16) - 3 * 56
    more = 3 * 3 * 2 * 16 * 40 * columns
    assert model_flops_per_sequence(ROUTED, 16) - model_flops_per_sequence(GATED, 16) == more
