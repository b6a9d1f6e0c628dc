"""Attention between its projections: fused, or with its scores in HBM.

Under context parallelism a rank's queries meet the keys of each rank in turn, in a ring of cp steps
of equal work (zigzag slices): in each step seq_len / cp queries and as many keys, half masked.
"""

from dataclasses import replace
from typing import NamedTuple

from twinstream.models.layouts.kernels import Kernels, times
from twinstream.models.layouts.rank_sizes import BITS_OF_DTYPE, RankSizes
from twinstream.schedule.cost import Work

_MASK_BYTES = 1


class CoreWork(NamedTuple):
    """Forward and backward of attention's core."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]


def core_steps(sizes: RankSizes, kernels: Kernels, num_steps: int) -> CoreWork:
    """So many steps of the ring; `cp` steps are the whole."""
    one = _unfused_step(sizes, kernels) if sizes.unfused else _fused_step(sizes, kernels)
    return CoreWork(*(tuple(times(work, num_steps) for work in works) for works in one))


def _fused_step(sizes: RankSizes, kernels: Kernels) -> CoreWork:
    """Forward two matrix products, backward five, since it computes the scores again."""
    q, k, v, tokens = sizes.d_q, sizes.d_kv, sizes.d_v, sizes.tokens
    out = sizes.d_o
    casting = replace(kernels, linear_dtype=sizes.dtype_of("attention"))
    casts, casts_back = casting.casts(tokens * (q + k + v)), casting.casts(tokens * out)
    forward = (*casts, _fused(sizes, "attention_forward", 2 * (q + out), times_moved=1))
    back = _fused(sizes, "attention_backward", 2 * (3 * q + 2 * out), times_moved=2)
    backward = (*casts_back, back)
    if sizes.cp == 1:
        return CoreWork(forward, backward)
    # partial outputs, and gradients, of a step are added to those of the steps before it
    merge = kernels.vector("accumulate", 3 * tokens * out)
    add = kernels.vector("accumulate", 3 * tokens * (q + k + v), launches=2)
    return CoreWork((*forward, merge), (*backward, add))


def _fused(sizes: RankSizes, unit: str, flops_per_pair: int, *, times_moved: int) -> Work:
    """Q, K, V and output are moved so many times.

    A window w of n tokens is like n / w sequences of w queries, each with w keys in the mean.
    """
    queries = context = sizes.slice_tokens
    batch, window = sizes.micro_batch, sizes.shape.window
    doubled_pairs = batch * sizes.shape.doubled_pairs(sizes.seq_len) // sizes.cp**2
    if window is not None and window.tokens < queries:
        batch *= -(-queries // window.tokens)
        queries = window.tokens
        context = queries + queries // 2
    rows = sizes.tokens * (sizes.d_qkv + sizes.d_o)
    return Work(
        unit=unit,
        shape=(queries, context, sizes.heads, sizes.shape.head_dim, batch),
        flops=flops_per_pair * doubled_pairs // 2,
        hbm_bytes=times_moved * rows * BITS_OF_DTYPE[sizes.dtype_of("attention")] // 8,
        launches=1,
        dtype=sizes.dtype_of("attention"),
        implementation=sizes.attention_implementation,
    )


def _unfused_step(sizes: RankSizes, kernels: Kernels) -> CoreWork:
    """Batched products over all S x S scores, which a mask does not save; softmax between them."""
    width, out = sizes.shape.head_dim, sizes.shape.v_dim
    keys = sizes.slice_tokens
    rows = sizes.micro_batch * sizes.heads * sizes.slice_tokens
    scores = rows * keys
    heads = sizes.micro_batch * sizes.heads

    def product(n: int, k: int) -> Work:
        """[queries, k] x [k, n] of each head, as one of as many rows; each head reads its own."""
        one = kernels.matmul(rows, n, k)
        return one.model_copy(
            update={"hbm_bytes": one.hbm_bytes + (heads - 1) * k * n * sizes.itemsize}
        )

    masked = kernels.vector("dropout", 2 * scores, extra_bytes=_MASK_BYTES * scores)
    masks = (masked,) if sizes.shape.dropout else ()
    softmax = kernels.vector("softmax", 2 * scores)
    softmax_backward = kernels.vector("softmax", 3 * scores)
    forward = (product(keys, width), softmax, *masks, product(out, keys))
    d_probs, d_values = product(keys, out), product(out, keys)
    d_queries, d_keys = product(width, keys), product(width, keys)
    return CoreWork(forward, (d_values, d_probs, *masks, softmax_backward, d_queries, d_keys))
