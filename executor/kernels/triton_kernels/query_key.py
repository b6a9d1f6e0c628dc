"""The norm of each head and RoPE. A program takes some tokens, all heads of one at a time.

A head is held in two halves. T tokens, H heads, E head_dim.
"""

from math import log2, pi

import torch
import triton
import triton.language as tl

from twinstream.executor.kernels.triton_kernels.column_sums import add_partial_sums
from twinstream.executor.kernels.triton_kernels.launch import (
    device_function,
    launch,
    warps_for,
)
from twinstream.executor.kernels.triton_kernels.rounding import rounded
from twinstream.executor.kernels.vector.rope import Rope
from twinstream.executor.kernels.vector.vector_ops import HeadNorm, HeadNormBackward
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.scratch_sizes import partial_sums

# A program rotates so many tokens, whose frequencies it computes once, where so many programs are
# left to occupy a device.
_TOKENS_EACH = 8
_PROGRAMS = 1024


def write_rotated(
    x_THE: torch.Tensor, norm: HeadNorm | None, rope: Rope, out_THE: torch.Tensor
) -> None:
    _rotate(x_THE, norm, rope, out_THE, backward=False)


def rotated_backward(
    d_THE: torch.Tensor, rope: Rope, norm: HeadNormBackward | None, workspace: Workspace
) -> None:
    if norm is None:
        _rotate(d_THE, None, rope, d_THE, backward=True)
        return
    num_tokens, num_heads, head_dim = d_THE.shape
    num_programs, x, d_weight = partial_sums(num_tokens), norm.x, norm.d_weight
    heads, half = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim // 2)
    width = norm.norm.weight.shape[0]
    with workspace.frame():
        shares = x  # which is not written unless shares are asked for
        if d_weight is not None:
            shares = workspace.take((num_programs, width), torch.float32)
        launch(
            _normed_rotated_backward_kernel, (num_programs,), d_THE, x, norm.norm.weight,
            shares, _positions(rope, d_THE), d_THE.stride(0), d_THE.stride(1), x.stride(0),
            x.stride(1), num_tokens, num_heads, rope.seq_len, rope.chunk_start, norm.norm.eps,
            LOG2_THETA=log2(rope.theta), **_scaling(rope), HAS_POSITIONS=rope.positions is not None,
            HAS_D_WEIGHT=d_weight is not None, OVER_HEADS=width > head_dim, HALF=head_dim // 2,
            HEADS=heads, BLOCK=half, num_warps=warps_for(heads * half, 8),
        )  # fmt: skip
        if d_weight is not None:
            add_partial_sums(shares, d_weight)


def _rotate(
    x_THE: torch.Tensor, norm: HeadNorm | None, rope: Rope, out_THE: torch.Tensor, *,
    backward: bool,
) -> None:  # fmt: skip
    num_tokens, num_heads, head_dim = x_THE.shape
    heads, half = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim // 2)
    weight, eps = (x_THE, 0.0) if norm is None else (norm.weight, norm.eps)
    tokens_each = max(1, min(_TOKENS_EACH, num_tokens // _PROGRAMS))
    launch(
        _rotate_kernel, (-(-num_tokens // tokens_each),), x_THE, weight, out_THE,
        _positions(rope, x_THE), x_THE.stride(0), x_THE.stride(1), out_THE.stride(0),
        out_THE.stride(1), num_tokens, tokens_each, num_heads, rope.seq_len, rope.chunk_start, eps,
        LOG2_THETA=log2(rope.theta), **_scaling(rope),
        BACKWARD=backward, HAS_NORM=norm is not None, HAS_POSITIONS=rope.positions is not None,
        OVER_HEADS=norm is not None and norm.weight.shape[0] > head_dim,
        HALF=head_dim // 2, HEADS=heads, BLOCK=half, num_warps=warps_for(heads * half, 8),
    )  # fmt: skip


def _scaling(rope: Rope) -> dict[str, float]:
    """Constants of the kernels; a factor of 1 scales nothing."""
    scaling = rope.scaling
    if scaling is None:
        return {"FACTOR": 1.0, "LOW": 0.0, "HIGH": 1.0, "CONTEXT": 1.0}
    return {
        "FACTOR": scaling.factor,
        "LOW": scaling.low_freq_factor,
        "HIGH": scaling.high_freq_factor,
        "CONTEXT": scaling.original_max_position_embeddings / (2.0 * pi),
    }


def _positions(rope: Rope, unread: torch.Tensor) -> torch.Tensor:
    """Those of packed sequences; without any the kernel is given a tensor it does not read."""
    return unread if rope.positions is None else rope.positions


@device_function
def _position(token, positions_ptr, seq_len, chunk_start, HAS_POSITIONS: tl.constexpr):
    if HAS_POSITIONS:
        return tl.load(positions_ptr + token)
    return token % seq_len + chunk_start


@device_function
def _turns_per_position(
    LOG2_THETA: tl.constexpr, FACTOR: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    CONTEXT: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each frequency, in 2**-64 of a turn: float64 once a program, integers from then on."""
    exponent = tl.arange(0, BLOCK).to(tl.float64) * (LOG2_THETA / HALF)
    frequency = tl.exp2(-exponent)
    if FACTOR != 1.0:
        kept = (frequency * CONTEXT - LOW) / (HIGH - LOW)
        kept = tl.minimum(tl.maximum(kept, 0.0), 1.0)
        frequency = frequency * ((1.0 - kept) / FACTOR + kept)
    return (frequency * (18446744073709551616.0 / 6.283185307179586)).to(tl.int64)


@device_function
def _cos_and_sin(position, turns):
    """Of a position's angles, within 2e-7 at any position: whole turns overflow and are gone.

    Within an eighth of a turn of each quarter, by the polynomials of Cephes' sinf and cosf.
    """
    angle = ((tl.cast(position, tl.int64) * turns) >> 32).to(tl.int32)  # in 2**-32 of a turn
    quarter = (angle + 536870912) >> 30
    x = (angle - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2**32
    z = x * x
    sin = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x
    cos = (2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2
    cos = cos * z * z - 0.5 * z + 1.0
    odd = (quarter & 1) != 0
    turned_cos, turned_sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    turned_cos = tl.where(((quarter + 1) & 2) != 0, -turned_cos, turned_cos)
    return turned_cos, tl.where((quarter & 2) != 0, -turned_sin, turned_sin)


@triton.jit
def _rotate_kernel(
    x_ptr, weight_ptr, out_ptr, positions_ptr, x_stride, x_head_stride, out_stride,
    out_head_stride, num_tokens, tokens_each, num_heads, seq_len, chunk_start, eps,
    LOG2_THETA: tl.constexpr, FACTOR: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    CONTEXT: tl.constexpr, BACKWARD: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, OVER_HEADS: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    heads, columns = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (heads < num_heads)[:, None] & (columns < HALF)[None, :]
    x_offsets = heads[:, None] * x_head_stride + columns[None, :]
    out_offsets = heads[:, None] * out_head_stride + columns[None, :]
    turns = _turns_per_position(LOG2_THETA, FACTOR, LOW, HIGH, CONTEXT, HALF, BLOCK)
    first_token = tl.program_id(0) * tokens_each
    for token in range(first_token, tl.minimum(first_token + tokens_each, num_tokens)):
        x_token = x_ptr + tl.cast(token, tl.int64) * x_stride
        out_token = out_ptr + tl.cast(token, tl.int64) * out_stride
        first = tl.load(x_token + x_offsets, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_token + x_offsets + HALF, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares = tl.sum(first * first + second * second, axis=1)
            if OVER_HEADS:
                mean = tl.sum(squares, axis=0) / (2 * HALF * num_heads)
                weights = weight_ptr + heads[:, None] * (2 * HALF) + columns[None, :]
                first *= tl.rsqrt(mean + eps)
                second *= tl.rsqrt(mean + eps)
                first *= tl.load(weights, mask=inside, other=0.0).to(tl.float32)
                second *= tl.load(weights + HALF, mask=inside, other=0.0).to(tl.float32)
            else:
                rstd = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
                weights = weight_ptr + columns
                weight = tl.load(weights, mask=columns < HALF, other=0.0).to(tl.float32)
                first = first * rstd * weight[None, :]
                weight = tl.load(weights + HALF, mask=columns < HALF, other=0.0).to(tl.float32)
                second = second * rstd * weight[None, :]
        position = _position(token, positions_ptr, seq_len, chunk_start, HAS_POSITIONS)
        cos, sin = _cos_and_sin(position, turns)
        if BACKWARD:
            sin = -sin
        out_first = first * cos[None, :] - second * sin[None, :]
        out_second = second * cos[None, :] + first * sin[None, :]
        dtype = out_ptr.dtype.element_ty
        tl.store(out_token + out_offsets, rounded(out_first, dtype), mask=inside)
        tl.store(out_token + out_offsets + HALF, rounded(out_second, dtype), mask=inside)


@triton.jit
def _normed_rotated_backward_kernel(
    d_ptr, x_ptr, weight_ptr, partial_ptr, positions_ptr, d_stride, d_head_stride, x_stride,
    x_head_stride, num_tokens, num_heads, seq_len, chunk_start, eps, LOG2_THETA: tl.constexpr,
    FACTOR: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, CONTEXT: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_D_WEIGHT: tl.constexpr, OVER_HEADS: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    heads, columns = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (heads < num_heads)[:, None] & (columns < HALF)[None, :]
    x_offsets = heads[:, None] * x_head_stride + columns[None, :]
    d_offsets = heads[:, None] * d_head_stride + columns[None, :]
    if OVER_HEADS:
        weights = weight_ptr + heads[:, None] * (2 * HALF) + columns[None, :]
        weight_1 = tl.load(weights, mask=inside, other=0.0).to(tl.float32)
        weight_2 = tl.load(weights + HALF, mask=inside, other=0.0).to(tl.float32)
    else:
        weights = weight_ptr + columns
        weight_1 = tl.load(weights, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
        weight_2 = tl.load(weights + HALF, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    sums_1 = tl.zeros([HEADS, BLOCK], dtype=tl.float32)
    sums_2 = tl.zeros([HEADS, BLOCK], dtype=tl.float32)
    turns = _turns_per_position(LOG2_THETA, FACTOR, LOW, HIGH, CONTEXT, HALF, BLOCK)
    tokens_each = tl.cdiv(num_tokens, tl.num_programs(0))
    first_token = program * tokens_each
    for token in range(first_token, tl.minimum(first_token + tokens_each, num_tokens)):
        x_token = x_ptr + tl.cast(token, tl.int64) * x_stride + x_offsets
        d_token = d_ptr + tl.cast(token, tl.int64) * d_stride + d_offsets
        x_1 = tl.load(x_token, mask=inside, other=0.0).to(tl.float32)
        x_2 = tl.load(x_token + HALF, mask=inside, other=0.0).to(tl.float32)
        d_1 = tl.load(d_token, mask=inside, other=0.0).to(tl.float32)
        d_2 = tl.load(d_token + HALF, mask=inside, other=0.0).to(tl.float32)
        position = _position(token, positions_ptr, seq_len, chunk_start, HAS_POSITIONS)
        cos, sin = _cos_and_sin(position, turns)
        d_normed_1 = d_1 * cos[None, :] + d_2 * sin[None, :]
        d_normed_2 = d_2 * cos[None, :] - d_1 * sin[None, :]
        squares = tl.sum(x_1 * x_1 + x_2 * x_2, axis=1)
        if OVER_HEADS:
            squares = tl.sum(squares, axis=0) / num_heads + tl.zeros([HEADS], dtype=tl.float32)
        rstd = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        x_1 *= rstd
        x_2 *= rstd
        if HAS_D_WEIGHT:
            sums_1 += d_normed_1 * x_1
            sums_2 += d_normed_2 * x_2
        d_normed_1 *= weight_1
        d_normed_2 *= weight_2
        mean = tl.sum(d_normed_1 * x_1 + d_normed_2 * x_2, axis=1)
        if OVER_HEADS:
            mean = tl.sum(mean, axis=0) / num_heads + tl.zeros([HEADS], dtype=tl.float32)
        mean = mean[:, None] / (2 * HALF)
        dtype = d_ptr.dtype.element_ty
        tl.store(d_token, rounded((d_normed_1 - x_1 * mean) * rstd, dtype), mask=inside)
        tl.store(d_token + HALF, rounded((d_normed_2 - x_2 * mean) * rstd, dtype), mask=inside)
    if HAS_D_WEIGHT:
        if OVER_HEADS:
            width = num_heads * (2 * HALF)
            share = partial_ptr + program.to(tl.int64) * width
            share += heads[:, None] * (2 * HALF) + columns[None, :]
            tl.store(share, sums_1, mask=inside)
            tl.store(share + HALF, sums_2, mask=inside)
        else:
            share = partial_ptr + program.to(tl.int64) * (2 * HALF) + columns
            tl.store(share, tl.sum(sums_1, axis=0), mask=columns < HALF)
            tl.store(share + HALF, tl.sum(sums_2, axis=0), mask=columns < HALF)
