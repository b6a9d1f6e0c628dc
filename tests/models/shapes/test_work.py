"""Work of a rank: sizes by hand, and totals that no split may change."""

import pytest

from tests.models.shapes.shapes import GATED, PLAIN, ROUTED
from twinstream.models.layouts.work import PartWork, ShapeWork, joined
from twinstream.models.providers.flops import model_flops_per_sequence
from twinstream.schedule.cost import Work

COMPUTE = ("matmul", "attention_forward", "attention_backward")


def matmuls(works) -> list[tuple[int, ...]]:
    return [work.shape for work in works if work.unit == "matmul"]


def vectors(works) -> dict[str, int]:
    return {work.unit: work.hbm_bytes for work in works if work.unit not in COMPUTE}


def flops(part: PartWork) -> int:
    """Of the model: fused backward computes the scores again, a fifth of its FLOPs."""
    total = 0
    for work in (*part.forward, *part.backward):
        if work.unit in COMPUTE:
            total += work.flops * 4 // 5 if work.unit == "attention_backward" else work.flops
    return total


@pytest.mark.parametrize("shape", [GATED, PLAIN, ROUTED])
@pytest.mark.parametrize("sp", [False, True])
def test_the_work_of_all_ranks_is_the_models(shape, sp) -> None:
    shape = shape.model_copy(update={"num_kv_heads": 8, "vocab_size": 512})
    tp, cp, seq_len = 4, 2, 64
    work = ShapeWork(shape=shape, seq_len=seq_len, tp=tp, cp=cp, ep=2, sequence_parallel=sp)
    per_rank = shape.num_layers * flops(work.layer()) + flops(work.head())
    model = model_flops_per_sequence(shape, seq_len)
    if shape.experts and not sp:  # each rank of tp routes all tokens
        again = 3 * shape.num_layers * 2 * seq_len * shape.d_model * shape.experts.count
        model += (tp - 1) * again
    assert per_rank * tp * cp == model


def test_the_products_of_a_layer_have_the_ranks_sizes() -> None:
    work = ShapeWork(shape=GATED, seq_len=32, micro_batch=3, tp=4)
    attention, mlp = work.attention(), work.mlp()
    # 96 tokens; 2 of 8 heads of 6, the whole of 1 key head, 14 of 56
    assert matmuls(attention.forward) == [(96, 24, 40), (96, 40, 12)]
    assert matmuls(attention.backward_input) == [(96, 12, 40), (96, 40, 24)]
    assert matmuls(attention.backward_weight) == [(40, 12, 96), (24, 40, 96)]
    assert matmuls(mlp.forward) == [(96, 28, 40), (96, 40, 14)]
    assert matmuls(mlp.backward_input) == [(96, 14, 40), (96, 40, 28)]
    assert matmuls(mlp.backward_weight) == [(40, 14, 96), (28, 40, 96)]


def test_units_of_a_layer_in_their_order() -> None:
    work = ShapeWork(shape=GATED, seq_len=32)
    attention = work.attention()
    assert [one.unit for one in attention.forward] == [
        "rms_norm", "matmul", "rope", "attention_forward", "matmul", "residual",
    ]  # fmt: skip
    assert [one.unit for one in attention.backward_input] == [
        "matmul", "attention_backward", "rope_backward", "matmul", "rms_norm_backward",
    ]  # fmt: skip
    assert [one.unit for one in work.mlp().forward] == [
        "rms_norm", "matmul", "swiglu", "matmul", "residual",
    ]  # fmt: skip


def test_sequence_parallelism_splits_norms_and_residuals() -> None:
    one, other = (
        ShapeWork(shape=PLAIN, seq_len=32, tp=4, sequence_parallel=sp).layer() for sp in (0, 1)
    )
    whole, split = vectors(one.forward), vectors(other.forward)
    assert {unit: whole[unit] // split[unit] for unit in whole} == {
        "layer_norm": 4, "residual": 4, "gelu": 1,
    }  # fmt: skip
    whole, split = vectors(one.backward_input), vectors(other.backward_input)
    assert {unit: whole[unit] // split[unit] for unit in whole} == {
        "dropout": 4, "gelu_backward": 1, "layer_norm_backward": 4,
    }  # fmt: skip


def test_bytes_of_passes_by_hand() -> None:
    passes = vectors(ShapeWork(shape=PLAIN, seq_len=32).mlp().forward)
    # two bytes an element; the residual's mask one
    assert passes == {
        "layer_norm": 2 * 2 * 32 * 48, "gelu": 2 * 2 * 32 * 192, "residual": 7 * 32 * 48,
    }  # fmt: skip
    gated = vectors(ShapeWork(shape=GATED, seq_len=32, dtype="float32").mlp().backward_input)
    assert gated["swiglu_backward"] == 4 * 5 * 32 * 56


def passes(works) -> list[tuple[str, int]]:
    return [(work.unit, work.hbm_bytes) for work in works if work.unit not in COMPUTE]


def test_every_pass_of_a_layer_with_experts_by_hand() -> None:
    """Two bytes an element: what is read, and what is written."""
    work = ShapeWork(shape=ROUTED, seq_len=32)
    row, heads = 2 * 32 * 40, 2 * 32 * (48 + 12)  # of the stream; of Q and K
    shared, routed = 2 * 32 * 16, 2 * 64 * 24  # of the shared FFN; of the experts, 2 a token
    norm_back = (
        "rms_norm_backward",
        6 * row,
    )  # normed again (2), added to the stream's gradient (4)
    attention, router, experts = work.attention(), work.router(), work.experts()
    assert passes(attention.forward) == [
        ("rms_norm", 2 * row), ("rms_norm", 2 * heads), ("rope", 2 * heads), ("residual", 3 * row),
    ]  # fmt: skip
    assert passes(attention.backward) == [
        ("rope_backward", 2 * heads), ("rms_norm_backward", 3 * heads), norm_back,
    ]  # fmt: skip
    # softmax, top-k, counts and positions of 8 scores a token; a row in, two out
    scores, sorting = ("router", 4 * 2 * 32 * 8), ("permute", (1 + 2) * row)
    assert passes(router.forward) == [("rms_norm", 2 * row), scores, sorting]
    assert passes(router.backward) == [sorting, scores, norm_back]
    sort = ("permute", 2 * 2 * row)  # two rows a token, read and written
    assert passes(experts.forward) == [
        sort, ("swiglu", 3 * routed), sort, sorting, ("swiglu", 3 * shared),
        ("residual", 3 * row), ("residual", 3 * row),
    ]  # fmt: skip
    assert passes(experts.backward) == [
        ("residual", 3 * row), ("swiglu_backward", 5 * shared), sorting, sort,
        ("swiglu_backward", 5 * routed), sort,
    ]  # fmt: skip


def test_every_pass_of_a_gpt_by_hand() -> None:
    work = ShapeWork(shape=PLAIN, seq_len=32)
    row, mask = 2 * 32 * 48, 32 * 48  # a byte an element of a mask
    norm_back, dropout = ("layer_norm_backward", 6 * row), ("dropout", 2 * row + mask)
    mlp, attention, embedding = work.mlp(), work.attention(), work.embedding()
    assert passes(attention.forward) == [("layer_norm", 2 * row), ("residual", 3 * row + mask)]
    assert passes(attention.backward_input) == [dropout, norm_back]
    assert passes(attention.backward_weight) == [("bias", row), ("bias", 3 * row)]  # out, Q K V
    assert passes(mlp.backward_input) == [dropout, ("gelu_backward", 3 * 4 * row), norm_back]
    assert passes(mlp.backward_weight) == [("bias", row), ("bias", 4 * row)]
    assert passes(embedding.backward_input) == [dropout]
    # rows of tokens read and added in place; those of positions summed over sequences
    assert passes(embedding.backward_weight) == [
        ("embedding_backward", 4 * row), ("embedding_backward", row),
    ]  # fmt: skip


def test_attention_is_half_masked_and_shaped_for_its_curve() -> None:
    (forward,), (backward,) = ShapeWork(
        shape=GATED, seq_len=32, micro_batch=3, tp=2
    ).core_attention()
    assert forward.shape == backward.shape == (32, 32, 4, 6, 3)
    assert forward.flops == 3 * 2 * 32 * 32 * 24
    assert backward.flops == forward.flops * 5 // 2
    assert forward.hbm_bytes == 2 * 3 * 32 * (2 * 24 + 2 * 6)


def test_a_ring_of_attention_has_equal_steps_that_add_up() -> None:
    whole = ShapeWork(shape=GATED, seq_len=64)
    ring = ShapeWork(shape=GATED, seq_len=64, cp=4)
    steps = ring.core_attention_steps()
    assert len(steps) == 4 and len(set(steps)) == 1
    (step, merge), (_, add) = steps[0]
    assert step.shape == (16, 16, 8, 6, 1)
    assert 4 * 4 * step.flops == whole.core_attention().forward[0].flops
    assert merge.hbm_bytes == 2 * 3 * 16 * 48
    assert add.hbm_bytes == 2 * 3 * 16 * (48 + 2 * 12)
    total = ring.core_attention()
    for kind in ("forward", "backward"):
        for works in zip(getattr(total, kind), *(getattr(s, kind) for s in steps), strict=True):
            assert works[0].hbm_bytes == sum(one.hbm_bytes for one in works[1:])
            assert works[0].launches == sum(one.launches for one in works[1:])


def test_unfused_attention_passes_over_all_scores() -> None:
    work = ShapeWork(shape=PLAIN, seq_len=32, tp=2, attention_implementation="unfused")
    core = work.core_attention()
    scores = 4 * 32 * 32  # of 4 heads of 6
    assert matmuls(core.forward) == [(4 * 32, 32, 6), (4 * 32, 6, 32)]
    assert sum(one.flops for one in core.forward if one.unit == "matmul") == 2 * 2 * scores * 6
    assert len(matmuls(core.backward)) == 4
    assert vectors(core.forward) == {"softmax": 4 * scores, "dropout": 5 * scores}
    assert vectors(core.backward) == {"softmax": 6 * scores, "dropout": 5 * scores}
    # Q and K read, scores written
    assert core.forward[0].hbm_bytes == 2 * (2 * 32 * 24 + scores)
    assert work.core_attention_again() == core.forward


def test_experts_take_the_expected_tokens_in_groups() -> None:
    work = ShapeWork(shape=ROUTED, seq_len=30, tp=2, ep=4, expert_imbalance=1.1)
    part = work.experts()
    # 30 tokens to 2 experts each, times 1.1, among 2 of 8 experts, 12 of 24 wide; then the shared
    assert matmuls(part.forward) == [(33, 24, 40), (33, 40, 12), (30, 16, 40), (30, 40, 8)]
    assert [one.launches for one in part.forward if one.unit == "matmul"] == [2, 2, 1, 1]
    up = part.forward[1]
    assert up.flops == 2 * 66 * 24 * 40
    assert up.hbm_bytes == 2 * (66 * 40 + 2 * 40 * 24 + 66 * 24)
    assert matmuls(part.backward_weight)[-2:] == [(40, 12, 33), (24, 40, 33)]
    # sorted on arrival and back, then those of a token summed
    permuted = [one.hbm_bytes for one in part.forward if one.unit == "permute"]
    assert permuted == [2 * 2 * 66 * 40, 2 * 2 * 66 * 40, 2 * (30 + 60) * 40]
    assert [one.hbm_bytes for one in part.backward if one.unit == "permute"] == permuted[::-1]


def test_experts_that_tp_does_not_split_take_fewer_tokens() -> None:
    work = ShapeWork(shape=ROUTED, seq_len=32, tp=4, ep=8, etp=1)
    assert matmuls(work.experts().forward)[:2] == [(16, 48, 40), (16, 40, 24)]


def test_the_router_sees_the_tokens_that_lie_on_the_rank() -> None:
    work = ShapeWork(shape=ROUTED, seq_len=32, tp=4, sequence_parallel=True)
    part = work.router()
    assert matmuls(part.forward) == [(8, 8, 40)]
    assert vectors(part.forward)["permute"] == 2 * (8 + 16) * 40


def test_a_shape_has_an_mlp_or_experts() -> None:
    dense, routed = ShapeWork(shape=GATED, seq_len=32), ShapeWork(shape=ROUTED, seq_len=32)
    assert dense.router() == dense.experts() == routed.mlp() == PartWork()
    assert dense.layer() == joined(dense.attention(), dense.mlp())


def test_the_head_has_the_padded_vocabulary_and_float32_losses() -> None:
    part = ShapeWork(shape=GATED, seq_len=32, tp=2).head()
    assert matmuls(part.forward) == [(32, 128, 40)]
    assert matmuls(part.backward_input) == [(32, 40, 128)]
    assert matmuls(part.backward_weight) == [(128, 40, 32)]
    logits = 32 * 128
    # read in 2 bytes and written in 4; read for the maximum; read and written for exponentials
    assert vectors(part.forward)["cross_entropy"] == logits * (2 + 4 + 4 + 8)
    assert vectors(part.backward_input)["cross_entropy"] == logits * (8 + 4 + 2)


def test_the_embedding_has_positions_and_dropout() -> None:
    plain = ShapeWork(shape=PLAIN, seq_len=32).embedding()
    assert vectors(plain.forward) == {
        "embedding": 4 * 32 * 48, "residual": 6 * 32 * 48, "dropout": 5 * 32 * 48,
    }  # fmt: skip
    rope = ShapeWork(shape=GATED, seq_len=32).embedding()
    assert [one.unit for one in rope.forward + rope.backward] == ["embedding", "embedding_backward"]
    assert rope.backward_weight[0].hbm_bytes == 2 * 4 * 32 * 40


def test_biases_have_gradients_of_sums_over_tokens() -> None:
    work = ShapeWork(shape=PLAIN, seq_len=32, tp=2, sequence_parallel=True)
    sums = [
        [one.hbm_bytes for one in part.backward_weight if one.unit == "bias"]
        for part in (work.attention(), work.mlp())
    ]
    # those of row-parallel layers from half of the tokens, 16
    assert sums == [[2 * 16 * 48, 2 * 32 * 72], [2 * 16 * 48, 2 * 32 * 96]]


def test_gradients_are_summed_in_their_own_dtype() -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        work = ShapeWork(shape=GATED, seq_len=32, gradient_dtype=dtype)
        down = work.mlp().backward_weight[0]
        assert down.hbm_bytes == 2 * 32 * (40 + 56) + 2 * size * 40 * 56
        assert work.optimizer(1000)[0].hbm_bytes == 1000 * (24 + size + 2)
        assert work.gradient_norm(1000)[0].hbm_bytes == 1000 * size


def test_fp8_products_read_bytes_and_their_inputs_are_cast() -> None:
    work = ShapeWork(shape=GATED, seq_len=32, matmul_dtype="fp8")
    up = next(one for one in work.mlp().forward if one.unit == "matmul")
    assert up.dtype == "fp8"
    assert up.hbm_bytes == 32 * 40 + 40 * 112 + 2 * 32 * 112
    # read in two bytes, written twice in one
    assert [one.hbm_bytes for one in work.mlp().forward if one.unit == "cast"] == [
        4 * 32 * 40, 4 * 32 * 56,
    ]  # fmt: skip
    # of backward, the gradients that products read: down's, then those of gate and up
    assert [one.hbm_bytes for one in work.mlp().backward_input if one.unit == "cast"] == [
        4 * 32 * 40, 4 * 32 * 2 * 56,
    ]  # fmt: skip
    assert [one.unit for one in work.mlp_again()] == ["rms_norm", "cast", "matmul", "swiglu"]
    assert {one.dtype for one in work.core_attention().forward} == {"bfloat16"}
    assert {one.dtype for one in work.head().backward} == {"bfloat16"}


def test_a_norm_of_heads_and_no_rope() -> None:
    routed = [one.unit for one in ShapeWork(shape=ROUTED, seq_len=32).attention().forward]
    assert routed[:4] == ["rms_norm", "matmul", "rms_norm", "rope"]
    back = [one.unit for one in ShapeWork(shape=ROUTED, seq_len=32).attention().backward_input]
    assert back[2:5] == ["rope_backward", "rms_norm_backward", "matmul"]
    plain = [one.unit for one in ShapeWork(shape=PLAIN, seq_len=32).attention().forward]
    assert "rope" not in plain


def test_works_are_documents() -> None:
    for work in ShapeWork(shape=ROUTED, seq_len=32).layer().forward:
        assert Work.model_validate_json(work.model_dump_json()) == work
