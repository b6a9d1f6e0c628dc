"""Model FLOPs, MFU, HFU and bytes of saved activations."""

from collections.abc import Callable

import pytest

from twinstream.models.flops import (
    SavedLevel,
    attention_backward_flops,
    attention_forward_flops,
    flash_backward_recompute_flops,
    hardware_flops_utilization,
    head_flops,
    layer_matmul_flops,
    model_flops_per_sequence,
    model_flops_per_token,
    model_flops_utilization,
    saved_bytes_per_token,
)
from twinstream.models.presets import load_preset
from twinstream.models.spec import ModelSpec

# d_q = 24 and d_kv = 12 differ from d_model = 10
SMALL = ModelSpec(
    name="small",
    num_layers=3,
    d_model=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    d_ff=7,
    vocab_size=11,
)


def test_flops_of_a_small_model_by_hand() -> None:
    # S = 5. Q and output 10 x 24, K and V 10 x 12, gate, up and down 10 x 7, 2 FLOPs each, 5 rows.
    assert layer_matmul_flops(SMALL, 5) == 2 * 5 * (2 * 240 + 2 * 120 + 3 * 70) == 9300
    # two products of 5 x 5 x 24, 2 FLOPs each, half of them masked; four in backward
    assert attention_forward_flops(SMALL, 5) == 2 * (2 * 600) // 2 == 1200
    assert attention_backward_flops(SMALL, 5) == 4 * (2 * 600) // 2 == 2400
    assert flash_backward_recompute_flops(SMALL, 5) == 1 * (2 * 600) // 2 == 600
    assert head_flops(SMALL, 5) == 3 * 2 * 5 * 110 == 3300
    assert model_flops_per_sequence(SMALL, 5) == 3 * (3 * 9300 + 1200 + 2400) + 3300 == 97_800
    assert model_flops_per_token(SMALL, 5) == 97_800 / 5


def test_8b_at_8192_tokens_takes_51_47_gflop_per_token() -> None:
    # 32 layers: 3 x 2 x 4096 (2 x 4096 + 2 x 1024 + 3 x 14336), attention 6 x 8192 x 4096;
    # head 6 x 4096 x 128256
    expected = 32 * (24576 * 53248 + 201_326_592) + 3_152_019_456
    assert expected == 51_470_401_536
    assert model_flops_per_token(load_preset("8b"), 8192) == expected
    assert round(expected / 1e9, 2) == 51.47


def test_only_attention_grows_faster_than_the_sequence() -> None:
    spec = load_preset("1b")
    assert layer_matmul_flops(spec, 2048) == 2 * layer_matmul_flops(spec, 1024)
    assert head_flops(spec, 2048) == 2 * head_flops(spec, 1024)
    assert attention_forward_flops(spec, 2048) == 4 * attention_forward_flops(spec, 1024)


def test_tying_the_embeddings_changes_no_flops() -> None:
    tied = SMALL.model_copy(update={"tied_embeddings": True})
    assert model_flops_per_sequence(tied, 5) == model_flops_per_sequence(SMALL, 5)


def test_flops_are_whole_numbers_without_rounding() -> None:
    flops = model_flops_per_sequence(load_preset("32b"), 1_048_576)
    assert isinstance(flops, int)
    # d 5120, k 1024, f 27648, V 152064, 64 layers, S = 2**20
    matmul = 2 * 5120 * (2 * 5120 + 2 * 1024 + 3 * 27648)
    assert flops == 2**20 * (64 * (3 * matmul + 6 * 2**20 * 5120) + 6 * 5120 * 152064)


def test_mfu_is_model_flops_over_time_and_peak() -> None:
    # 400 TFLOP in half a second on a peak of 1,000 TFLOP/s
    mfu = model_flops_utilization(model_flops=400e12, time_ns=500_000_000, peak_flop_per_s=1e15)
    assert mfu == pytest.approx(0.8)


def test_hfu_adds_what_was_recomputed() -> None:
    hfu = hardware_flops_utilization(
        model_flops=400e12, recomputed_flops=50e12, time_ns=500_000_000, peak_flop_per_s=1e15
    )
    assert hfu == pytest.approx(0.9)


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
    saved = [saved_bytes_per_token(spec, level) for level in SavedLevel]
    assert saved == [input_bytes, attention_bytes, full_bytes]


def test_saved_bytes_use_the_query_width_and_the_dtype() -> None:
    # d 10, d_q 24, d_kv 12, 4 heads, f 7
    assert saved_bytes_per_token(SMALL, SavedLevel.INPUT) == 2 * (10 + 24) + 8 == 76
    assert saved_bytes_per_token(SMALL, SavedLevel.ATTENTION) == 76 + 4 * 4 + 2 * 24 == 140
    assert saved_bytes_per_token(SMALL, SavedLevel.FULL) == 140 + 2 * (24 + 10 + 14) == 236
    wide = SMALL.model_copy(update={"dtype": "float32"})
    # norm scalars (8) and log-sum-exp (16) are float32 already
    assert saved_bytes_per_token(wide, SavedLevel.FULL) == 2 * (236 - 24) + 24


@pytest.mark.parametrize(
    "count",
    [
        layer_matmul_flops,
        attention_forward_flops,
        attention_backward_flops,
        flash_backward_recompute_flops,
        head_flops,
        model_flops_per_sequence,
        model_flops_per_token,
    ],
)
@pytest.mark.parametrize("seq_len", [0, -1])
def test_a_sequence_without_tokens_is_refused(
    count: Callable[[ModelSpec, int], float], seq_len: int
) -> None:
    with pytest.raises(ValueError, match="is not positive"):
        count(SMALL, seq_len)


@pytest.mark.parametrize(("time_ns", "peak_flop_per_s"), [(0, 1e15), (1, 0), (float("nan"), 1e15)])
def test_a_utilization_without_time_or_peak_is_refused(
    time_ns: float, peak_flop_per_s: float
) -> None:
    with pytest.raises(ValueError, match="is not positive"):
        model_flops_utilization(model_flops=1, time_ns=time_ns, peak_flop_per_s=peak_flop_per_s)
