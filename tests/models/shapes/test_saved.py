"""Saved bytes: those of Korthikanti et al., arXiv:2205.05198, exactly, and lists by hand."""

import pytest

from tests.models.shapes.shapes import GATED, PLAIN, ROUTED
from twinstream.models.layouts.rank_sizes import RankSizes
from twinstream.models.layouts.saved import (
    head_peak_bytes,
    head_saved_tensors,
    hidden_bytes,
    saved_bytes,
    saved_tensors,
    stored_hidden_bytes,
)
from twinstream.models.presets import load_model

S, B, H, A, T = 2048, 4, 6144, 64, 8


def split(tp: int = 1, *, sp: bool = False, attention: str | None = "unfused") -> RankSizes:
    return RankSizes(
        shape=load_model("megatron-22b"),
        seq_len=S,
        micro_batch=B,
        tp=tp,
        sequence_parallel=sp,
        attention_implementation=attention,
        dtype="float16",
    )


def test_a_layer_without_parallelism() -> None:
    assert saved_bytes(split(), "none") == S * B * (34 * H + 5 * A * S)


def test_a_layer_with_tensor_parallelism() -> None:
    assert saved_bytes(split(T), "none") == S * B * (10 * H + 24 * H // T + 5 * A * S // T)


def test_a_layer_with_sequence_parallelism() -> None:
    assert saved_bytes(split(T, sp=True), "none") == S * B * (34 * H + 5 * A * S) // T


def test_a_layer_with_selective_recompute() -> None:
    assert saved_bytes(split(T, sp=True), "selective") == S * B * H * 34 // T
    assert saved_bytes(split(T), "selective") == S * B * (10 * H + 24 * H // T)


def test_a_layer_with_full_recompute_keeps_its_input() -> None:
    assert saved_bytes(split(T), "full") == 2 * S * B * H
    assert saved_bytes(split(T, sp=True), "full") == 2 * S * B * H // T
    assert saved_tensors(split(T), "mlp", "full") == ()


def test_outside_the_layers() -> None:
    # section 4.3: at the end 4 s b h / t (1 + v / h)
    sizes = split(T, sp=True)
    kept = sum(one.size_bytes for one in head_saved_tensors(sizes))
    assert kept == 4 * S * B * (H + 51200) // T
    assert head_peak_bytes(sizes) == kept + 2 * S * B * 51200 // T


def test_fused_attention_keeps_a_log_sum_exp_for_its_scores() -> None:
    fused = split(T, sp=True, attention="flash2")
    assert saved_bytes(fused, "none") == S * B * (34 * H + 4 * A) // T
    assert saved_bytes(fused, "selective") == S * B * 34 * H // T


def test_scores_without_dropout_are_kept_once() -> None:
    calm = PLAIN.model_copy(update={"dropout": False})
    kept = {}
    for shape in (PLAIN, calm):
        sizes = RankSizes(shape=shape, seq_len=16, attention_implementation="unfused")
        kept[shape.dropout] = saved_bytes(sizes, "none")
    # masks of both residuals, 48 wide; mask and product of the scores of 8 heads
    assert kept[True] - kept[False] == 16 * (2 * 48 + 8 * 16 * 3)


def test_the_tensors_of_a_llama_layer() -> None:
    sizes = RankSizes(shape=GATED, seq_len=32, cp=2, tp=2, sequence_parallel=True)
    # 16 tokens, 8 of them between the products; widths of a rank: Q 24, K 6, FFN 28
    assert dict(saved_tensors(sizes, "attention", "none")) == {
        "attention norm input": 2 * 8 * 40,
        "QKV input": 2 * 8 * 40,
        "Q": 2 * 16 * 24,
        "K": 2 * 16 * 6,
        "V": 2 * 16 * 6,
        "output projection input": 2 * 16 * 24,
        "log-sum-exp": 4 * 16 * 4,
    }
    assert dict(saved_tensors(sizes, "mlp", "none")) == {
        "MLP norm input": 2 * 8 * 40,
        "MLP input": 2 * 8 * 40,
        "MLP gate": 2 * 16 * 28,
        "MLP up": 2 * 16 * 28,
        "MLP down input": 2 * 16 * 28,
    }


def test_recompute_of_the_mlp_keeps_no_input_of_a_norm_or_of_the_core() -> None:
    sizes = RankSizes(shape=GATED, seq_len=16)
    assert dict(saved_tensors(sizes, "attention", "mlp")) == {
        "attention norm input": 2 * 16 * 40, "Q": 2 * 16 * 48, "K": 2 * 16 * 12, "V": 2 * 16 * 12,
    }  # fmt: skip
    assert dict(saved_tensors(sizes, "mlp", "mlp")) == {"MLP norm input": 2 * 16 * 40}


def test_the_tensors_of_experts() -> None:
    sizes = RankSizes(shape=ROUTED, seq_len=16, ep=4, expert_imbalance=1.5)
    assert dict(saved_tensors(sizes, "mlp", "none")) == {
        "router norm input": 2 * 16 * 40,
        "router input": 2 * 16 * 40,
        "router probabilities": 4 * 16 * 8,
        "dispatched tokens": 2 * 48 * 40,
        "experts gate": 2 * 48 * 24,
        "experts up": 2 * 48 * 24,
        "experts down input": 2 * 48 * 24,
        "experts' outputs": 2 * 32 * 40,
        "shared expert gate": 2 * 16 * 16,
        "shared expert up": 2 * 16 * 16,
        "shared expert down input": 2 * 16 * 16,
    }
    attention = dict(saved_tensors(sizes, "attention", "none"))
    assert attention["Q and K before their norms"] == 2 * 16 * (48 + 12)


def test_inputs_of_fp8_products_are_kept_in_fp8() -> None:
    wide = RankSizes(shape=GATED, seq_len=16)
    narrow = RankSizes(shape=GATED, seq_len=16, matmul_dtype="fp8")
    saved = saved_bytes(wide, "none") - saved_bytes(narrow, "none")
    # inputs of QKV, up and down a byte less each; attention's output is kept beside its fp8 copy
    assert saved == 16 * (40 + 40 + 56) - 16 * 48


def test_a_shared_expert_keeps_its_fp8_input_beside_the_routed_tokens() -> None:
    """Of the tokens between the products: with sequence parallelism those of this rank."""
    for tp, sp in ((1, False), (2, True)):
        more = {"shape": ROUTED, "seq_len": 16, "tp": tp, "sequence_parallel": sp}
        kept = dict(saved_tensors(RankSizes(matmul_dtype="fp8", **more), "mlp", "none"))
        assert kept["shared expert input"] == 16 // tp * 40
        assert kept["shared expert down input"] == 16 * 16 // tp
        wide = dict(saved_tensors(RankSizes(**more), "mlp", "none"))
        assert "shared expert input" not in wide  # the router's input is the same


@pytest.mark.parametrize("sp", [False, True])
def test_hidden_bytes_whole_and_as_stored(sp) -> None:
    sizes = RankSizes(
        shape=GATED, seq_len=32, micro_batch=3, cp=2, tp=4, sequence_parallel=sp, dtype="float32"
    )
    assert hidden_bytes(sizes) == 4 * 3 * 16 * 40
    assert stored_hidden_bytes(sizes) == hidden_bytes(sizes) // (4 if sp else 1)
