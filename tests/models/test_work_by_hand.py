"""Elements that each part of a step reads and writes, counted tensor by tensor."""

import pytest

from tests.helpers.tiny_chains import small
from twinstream.models.kernel_costs.triton_work import TritonChunkWork
from twinstream.models.kernel_costs.update_work import host_accumulate_work
from twinstream.models.kernel_costs.work import (
    ChunkWork,
    adamw_work,
    add_gradients_work,
    gradient_norm_work,
    gradient_squares_work,
)
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.cost import Work
from twinstream.schedule.workload import Packing, Workload

# Tokens of a chunk, and the widths of the model, of Q, of K, of the FFN and of the vocabulary.
T, D, Q, K, F, V = 24, 32, 48, 16, 56, 256
SPEC = small("tiny", dtype="bfloat16", num_heads=6, num_kv_heads=2, d_ff=F)
PACKED = Workload(seq_len=8, chunk_tokens=T, chunks_per_round=1, rounds_per_step=1)
ROWS = 6  # of a slice of the head
HEAD_DIM = 8
HEAD = 2 * D * 4 * ROWS  # float32 shares of a slice's sums, written and read: a row has its own
SUMS = 2 * D * 4 * T  # of a chunk's


def units(works: tuple[Work, ...]) -> dict[str, tuple[int, int]]:
    """Bytes and launches by unit, of all but products and attention."""
    found: dict[str, tuple[int, int]] = {}
    for work in works:
        if work.unit != "matmul" and not work.unit.startswith("attention"):
            moved, launches = found.get(work.unit, (0, 0))
            found[work.unit] = (moved + work.hbm_bytes, launches + work.launches)
    return found


def test_of_eager_kernels() -> None:
    work = ChunkWork(SPEC, PACKED, 0)
    assert (SPEC.d_model, SPEC.d_q, SPEC.d_kv, SPEC.d_ff, SPEC.vocab_size) == (D, Q, K, F, V)
    # a norm reads and writes a row; RoPE Q and K in place; SwiGLU reads gate and up
    assert units(work.block_forward()) == {
        "rms_norm": (2 * 2 * 2 * T * D, 2), "rope": (2 * 2 * T * (Q + K), 1),
        "swiglu": (2 * 3 * T * F, 1),
    }  # fmt: skip
    assert units(work.recompute_attention()) == {"rms_norm": (2 * 2 * 2 * T * D, 2)}
    assert units(work.recompute_input()) == {
        "rms_norm": (2 * 2 * 2 * T * D, 2), "rope": (2 * 2 * T * Q, 1),
    }  # fmt: skip
    # norms: again (2), x, gradient and stream read, one written (4), twice what is added (2)
    assert units(work.block_backward()) == {
        "swiglu_backward": (2 * 6 * T * F, 2), "rms_norm_backward": (2 * (8 + 4) * T * D, 4),
        "rope_backward": (2 * 3 * T * (Q + K), 1),
    }  # fmt: skip
    assert units(work.head_loss(ROWS)) == {
        "rms_norm": (2 * 6 * T * D, 3), "cross_entropy": (2 * 4 * T * V, 2 * T // ROWS),
    }  # fmt: skip
    assert units(work.head_evaluate(ROWS)) == {
        "rms_norm": (2 * 2 * T * D, T // ROWS), "cross_entropy": (2 * 4 * T * V, 2 * T // ROWS),
    }  # fmt: skip
    assert units(work.embed_forward()) == {"embedding": (2 * 2 * T * D, 1)}
    assert units(work.embed_backward()) == {"embedding_backward": (2 * 4 * T * D, 1)}


def test_a_last_slice_of_the_head_counts_whole() -> None:
    for kind in (ChunkWork, TritonChunkWork):
        logits, *_ = [w for w in kind(SPEC, PACKED, 0).head_loss(T - 1) if w.unit == "matmul"]
        assert (logits.launches, logits.flops) == (2, 2 * 2 * (T - 1) * V * D)


@pytest.mark.parametrize(
    ("is_tied", "frozen", "count"),
    [(True, "embedding", 2), (True, "0", 3), (False, "embedding", 3), (False, "head", 2)],
)
def test_a_head_that_is_frozen_or_shares_a_frozen_embedding_has_no_gradient(
    is_tied: bool, frozen: str, count: int
) -> None:
    spec = SPEC.model_copy(update={"tied_embeddings": is_tied})
    work = ChunkWork(spec, PACKED, 0, Recipe(frozen=(frozen,)))
    assert len(work.head_matmuls(ROWS)) == count


TRITON = Recipe(kernels=KernelChoice(vector="triton"))


def triton(spec=SPEC, workload=PACKED, **recipe) -> TritonChunkWork:
    return TritonChunkWork(spec, workload, 0, TRITON.model_copy(update=recipe))


def test_of_tritons_kernels() -> None:
    work = triton()
    # the second norm reads x and what is added, and writes their sum and it normed
    assert units(work.block_forward()) == {
        "rms_norm": (2 * (2 + 4) * T * D, 2), "rope": (2 * 2 * T * (Q + K), 2),
        "swiglu": (2 * 3 * T * F, 1), "copy": (2 * 2 * T * D, 1),
    }  # fmt: skip
    assert units(work.recompute_attention()) == {"rms_norm": (2 * 6 * T * D, 2)}
    # SwiGLU: gate, up and a gradient in, two gradients and the product out. RoPE: Q turned, its
    # gradient and K's turned back
    assert units(work.block_backward()) == {
        "swiglu": (2 * 6 * T * F, 1), "rms_norm": (2 * (2 * 6 * T * D) + 2 * SUMS, 6),
        "rope": (2 * T * (2 * Q + 2 * Q + 2 * K), 3),
    }  # fmt: skip
    # a slice: normed (2); x and its gradient read, one written (3). Logits in, their gradient out
    slices = T // ROWS
    assert units(work.head_loss(ROWS)) == {
        "rms_norm": (2 * 5 * T * D + slices * HEAD, 3 * slices),
        "cross_entropy": (2 * 2 * T * V, slices),
    }  # fmt: skip
    assert units(work.head_evaluate(ROWS)) == {
        "rms_norm": (2 * 2 * T * D, slices), "cross_entropy": (2 * 2 * T * V, slices),
    }  # fmt: skip
    assert units(work.embed_backward()) == {"embedding_backward": (2 * 3 * T * D, 5)}


def test_of_tritons_backward_with_less_to_train_and_more_in_it() -> None:
    # frozen: no sums of norms, no norm again, no product of SwiGLU
    frozen = units(triton().block_backward(frozen=True))
    assert frozen["rms_norm"] == (2 * (2 * 4 * T * D), 2)
    assert frozen["swiglu"] == (2 * 5 * T * F, 1) and "copy" not in frozen
    # norms of heads: Q normed and turned again (2); of Q and K the gradient and what was normed
    # read, a gradient written (3 each); sums of both weights
    normed = SPEC.model_copy(update={"qk_norm": True})
    rope = 2 * T * (5 * Q + 3 * K)
    assert units(triton(normed).block_backward())["rope"] == (rope + 2 * 2 * HEAD_DIM * 4 * T, 5)
    again = units(triton(normed).block_backward(frozen=True))
    assert again["rope"] == (rope, 3)
    assert again["rms_norm"] == (2 * (4 + 6) * T * D, 3)  # Q and K are made again of a normed row
    # biases: gradients of QKV read, float32 shares of a token each written and read
    biased = units(triton(SPEC.model_copy(update={"qkv_bias": True})).block_backward())
    assert biased["bias"] == ((2 + 8) * T * (Q + 2 * K), 2)
    frozen_head = units(triton(frozen=("head",)).head_loss(ROWS))
    assert frozen_head["rms_norm"] == (2 * 5 * T * D, 2 * T // ROWS)
    # slices of a sequence: gradients of K and V from float32
    sliced = Workload(seq_len=2 * T, chunk_tokens=T, chunks_per_round=2, rounds_per_step=1)
    assert units(triton(workload=sliced).block_backward())["copy"] == ((4 + 2) * 2 * T * K, 1)


def test_of_attention() -> None:
    """4 FLOPs a query, key and element in forward and 10 in backward, over half of the square."""
    forward, backward = (
        ChunkWork(SPEC, PACKED, 0).attention_forward(),
        ChunkWork(SPEC, PACKED, 0).attention_backward(),
    )
    assert forward.flops == 3 * 4 * Q * 8 * 8 // 2 and backward.flops == forward.flops * 5 // 2
    # Q, K and V in, an output out; those, its gradient, and three gradients out
    assert forward.hbm_bytes == 2 * T * (2 * Q + 2 * K)
    assert backward.hbm_bytes == 2 * forward.hbm_bytes
    assert forward.shape == (8, 8, 6, 8, 3)
    sliced = Workload(seq_len=2 * T, chunk_tokens=T, chunks_per_round=2, rounds_per_step=1)
    second = ChunkWork(SPEC, sliced, T).attention_forward()
    # queries see the first slice and half of their own
    assert second.flops == 4 * Q * (T * T + T * T // 2)
    assert second.hbm_bytes == 2 * (2 * T * Q + 2 * 2 * T * K)
    assert second.shape == (T, 2 * T, 6, 8, 1)
    lengths = Packing(most_sequences=3, expected_lengths=(4, 20))
    unequal = PACKED.model_copy(update={"seq_len": 20, "packing": lengths})
    one = ChunkWork(SPEC, unequal, 0).attention_forward()
    assert one.flops == 4 * Q * (4 * 4 + 20 * 20) // 2 and one.launches == 2
    assert one.hbm_bytes == 2 * T * (2 * Q + 2 * K)
    assert one.shape[:2] == (17, 17)  # (16 + 400) / 24


@pytest.mark.parametrize(
    ("state", "gradients", "bytes_each"),
    [
        # parameter and state read and written, the gradient read
        ("model", None, 2 * 2 + 2 + 2 * 2 * 2), ("model", "float32", 2 * 2 + 4 + 2 * 2 * 2),
        ("float32", None, 2 * 4 + 4 + 2 * 2 * 4),
        # m, v and master; the parameter is written
        ("float32_master", None, 2 + 2 + 2 * 3 * 4),
        ("8bit", None, 2 * 2 + 2 + 2 * 2 * (1 + 4 / 256)),
    ],
)  # fmt: skip
def test_of_an_update(state, gradients, bytes_each) -> None:
    dtype, state = ("float32", "model") if state == "float32" else ("bfloat16", state)
    [work] = adamw_work(1024, dtype, gradients, state)
    assert work.hbm_bytes == 1024 * bytes_each
    # beside a float32 master nothing is rounded by chance: it is work of float32
    computed = "float32" if state == "float32_master" else dtype
    assert (work.launches, work.dtype, work.shape) == (1, computed, (1024,))


def test_of_sums() -> None:
    [squares] = gradient_squares_work(3 * 2**16 + 1, "bfloat16")
    # shares of 64 rows of 1,024 lanes, a float32 of each written and read
    assert squares.hbm_bytes == 2 * (3 * 2**16 + 1) + 2 * 4 * 4
    assert (squares.flops, squares.launches) == (2 * (3 * 2**16 + 1), 2)
    [norm] = gradient_norm_work(7)
    assert (norm.hbm_bytes, norm.flops, norm.launches) == (4 * 7 + 4, 7, 1)
    [added] = add_gradients_work(100, "float32")
    assert (added.hbm_bytes, added.flops, added.launches) == (3 * 4 * 100, 100, 1)
    [host] = host_accumulate_work(100, "bfloat16", 4)
    assert (host.host_dram_bytes, host.hbm_bytes, host.flops) == (3 * 4 * 100, 0, 100)
