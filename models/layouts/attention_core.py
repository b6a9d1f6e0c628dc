"""Attention between its projections: fused, or with its scores in HBM.

Under context parallelism a rank's queries meet the keys of each rank in turn, in a ring of cp steps
of equal work (zigzag slices): in each step seq_len / cp queries and as many keys, half masked.
"""

from typing import NamedTuple

from twinstream.models.layouts.kernels import Kernels, times
from twinstream.models.layouts.rank_sizes import RankSizes
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
    q, kv, tokens = sizes.d_q, sizes.d_kv, sizes.tokens
    forward = (_fused(sizes, "attention_forward", flops_per_pair=4, tensors_moved=2),)
    backward = (_fused(sizes, "attention_backward", flops_per_pair=10, tensors_moved=4),)
    if sizes.cp == 1:
        return CoreWork(forward, backward)
    # partial outputs, and gradients, of a step are added to those of the steps before it
    merge = kernels.vector("accumulate", 3 * tokens * q)
    add = kernels.vector("accumulate", 3 * tokens * (q + 2 * kv), launches=2)
    return CoreWork((*forward, merge), (*backward, add))


def _fused(sizes: RankSizes, unit: str, *, flops_per_pair: int, tensors_moved: int) -> Work:
    queries = sizes.slice_tokens
    doubled_pairs = sizes.micro_batch * queries * queries
    rows = sizes.tokens * (sizes.d_q + sizes.d_kv)
    return Work(
        unit=unit,
        shape=(queries, queries, sizes.heads, sizes.shape.head_dim, sizes.micro_batch),
        flops=flops_per_pair * sizes.d_q * doubled_pairs // 2,
        hbm_bytes=tensors_moved * rows * sizes.itemsize,
        launches=1,
        dtype=sizes.dtype,
        implementation=sizes.attention_implementation,
    )


def _unfused_step(sizes: RankSizes, kernels: Kernels) -> CoreWork:
    """Batched products over all S x S scores, which a mask does not save; softmax between them."""
    width = sizes.shape.head_dim
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
    forward = (product(keys, width), softmax, *masks, product(width, keys))
    d_probs, d_values = product(keys, width), product(width, keys)
    d_queries, d_keys = product(width, keys), product(width, keys)
    return CoreWork(forward, (d_values, d_probs, *masks, softmax_backward, d_queries, d_keys))
