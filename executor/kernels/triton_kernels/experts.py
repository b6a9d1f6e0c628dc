"""What experts do with their rows, in one launch each: matmuls, weights and sums.

How many rows an expert has is known on the device alone: as many programs are launched as there can
be tiles at most, and each finds its expert from where the experts' rows end. Sums are float32, in
an order that follows from the shapes, rounded once. Legend as in `vector.experts`.
"""

import torch
import triton
import triton.language as tl

from twinstream.executor.kernels.triton_kernels.launch import device_function, launch
from twinstream.executor.kernels.triton_kernels.rounding import INTERPRETED, rounded
from twinstream.schedule.cost import GROUPED_TILE_ROWS
from twinstream.schedule.ops import Mode

_COLUMNS, _DEPTH = 128, 64
_ROW_COLUMNS = 1024  # of a token's output, or of a row's product, that a program has at a time
_GRADIENT_TILE, _GRADIENT_DEPTH = 128, 64


def grouped_matmul(
    x_SI: torch.Tensor, matrices_EIO: torch.Tensor, ends_E: torch.Tensor, out_SO: torch.Tensor,
    *, scale: float = 1.0, accumulate: bool = False,
) -> None:  # fmt: skip
    """out = scale x M of each row's expert; with `accumulate` added to what is there."""
    num_rows, depth = x_SI.shape
    num_experts, _, width = matrices_EIO.shape
    tiles = num_rows // GROUPED_TILE_ROWS + min(num_experts, num_rows)
    launch(
        _matmul_kernel, (tiles, triton.cdiv(width, _COLUMNS)), x_SI, matrices_EIO, ends_E, out_SO,
        x_SI.stride(0), x_SI.stride(1), *matrices_EIO.stride(), out_SO.stride(0), num_experts,
        depth, width, scale, ACCUMULATE=accumulate,
        EXPERTS=triton.next_power_of_2(num_experts), ROWS=GROUPED_TILE_ROWS, COLUMNS=_COLUMNS,
        DEPTH=_DEPTH, num_warps=8, num_stages=3,
    )  # fmt: skip


def add_grouped_gradient(
    gradient_EOI: torch.Tensor, d_SO: torch.Tensor, x_SI: torch.Tensor, ends_E: torch.Tensor,
    mode: Mode,
) -> None:  # fmt: skip
    """gradient (+)= d^T x of each expert's rows; exact zeros of one without any."""
    num_experts, out_width, in_width = gradient_EOI.shape
    tiles = triton.cdiv(out_width, _GRADIENT_TILE) * triton.cdiv(in_width, _GRADIENT_TILE)
    launch(
        _gradient_kernel, (tiles, num_experts), d_SO, x_SI, ends_E, gradient_EOI, d_SO.stride(0),
        x_SI.stride(0), *gradient_EOI.stride(), out_width, in_width,
        ACCUMULATE=mode == "update", TILE=_GRADIENT_TILE, DEPTH=_GRADIENT_DEPTH, num_warps=8,
        num_stages=3,
    )  # fmt: skip


def add_rows(
    x_SO: torch.Tensor, weights_TK: torch.Tensor | None, places_S: torch.Tensor,
    residual_TO: torch.Tensor | None, out_TO: torch.Tensor,
) -> None:  # fmt: skip
    num_tokens, width = out_TO.shape
    launch(
        _add_rows_kernel, (num_tokens, triton.cdiv(width, _ROW_COLUMNS)), x_SO,
        places_S if weights_TK is None else weights_TK, places_S,
        out_TO if residual_TO is None else residual_TO, out_TO, x_SO.stride(0),
        0 if residual_TO is None else residual_TO.stride(0), out_TO.stride(0), width,
        PER_TOKEN=x_SO.shape[0] // num_tokens, HAS_WEIGHTS=weights_TK is not None,
        HAS_RESIDUAL=residual_TO is not None, COLUMNS=_ROW_COLUMNS, num_warps=4,
    )  # fmt: skip


def weigh_rows(
    d_SI: torch.Tensor, product_SI: torch.Tensor, weights_TK: torch.Tensor, places_S: torch.Tensor,
    d_weights_TK: torch.Tensor,
) -> None:  # fmt: skip
    num_rows, width = d_SI.shape
    launch(
        _weigh_rows_kernel, (num_rows,), d_SI, product_SI, weights_TK, places_S, d_weights_TK,
        d_SI.stride(0), product_SI.stride(0), width, COLUMNS=_ROW_COLUMNS, num_warps=4,
    )  # fmt: skip


@device_function
def _product(a, b):
    """a b in float32; the interpreter multiplies the bits of bfloat16, unless it is widened."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _matmul_kernel(
    x_ptr, matrices_ptr, ends_ptr, out_ptr, x_stride, x_column_stride, matrix_stride, in_stride,
    out_column_stride, out_stride, num_experts, depth, width, scale, ACCUMULATE: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    numbers = tl.arange(0, EXPERTS)
    is_there = numbers < num_experts
    ends = tl.load(ends_ptr + numbers, mask=is_there, other=0)
    starts = tl.load(ends_ptr + numbers - 1, mask=is_there & (numbers > 0), other=0)
    tiles = tl.where(is_there, (ends - starts + ROWS - 1) // ROWS, 0)
    tile_ends = tl.cumsum(tiles, 0)
    expert = tl.sum((is_there & (tile_ends <= tile)).to(tl.int32), 0)
    if expert < num_experts:
        mine = numbers == expert
        start = tl.sum(tl.where(mine, starts, 0), 0)
        end = tl.sum(tl.where(mine, ends, 0), 0)
        before = tl.sum(tl.where(mine, tile_ends - tiles, 0), 0)
        rows = start + (tile - before) * ROWS + tl.arange(0, ROWS)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside_rows, inside_columns = rows < end, columns < width
        x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
        matrix = matrices_ptr + expert.to(tl.int64) * matrix_stride
        sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for first in range(0, depth, DEPTH):
            inner = first + tl.arange(0, DEPTH)
            x = tl.load(
                x_rows + inner[None, :] * x_column_stride,
                mask=inside_rows[:, None] & (inner < depth)[None, :], other=0.0,
            )  # fmt: skip
            weights = tl.load(
                matrix + inner.to(tl.int64)[:, None] * in_stride
                + columns.to(tl.int64)[None, :] * out_column_stride,
                mask=(inner < depth)[:, None] & inside_columns[None, :], other=0.0,
            )  # fmt: skip
            sums += _product(x, weights)
        sums *= scale
        out = out_ptr + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        inside = inside_rows[:, None] & inside_columns[None, :]
        if ACCUMULATE:
            sums += tl.load(out, mask=inside, other=0.0).to(tl.float32)
        tl.store(out, rounded(sums, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_kernel(
    d_ptr, x_ptr, ends_ptr, gradient_ptr, d_stride, x_stride, expert_stride, row_stride,
    column_stride, out_width, in_width, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    across = tl.cdiv(in_width, TILE)
    outs = (tl.program_id(0) // across) * TILE + tl.arange(0, TILE)
    ins = (tl.program_id(0) % across) * TILE + tl.arange(0, TILE)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    sums = tl.zeros([TILE, TILE], dtype=tl.float32)
    for first in range(start, end, DEPTH):
        rows = first + tl.arange(0, DEPTH)
        inside = rows < end
        places = rows.to(tl.int64)
        d = tl.load(
            d_ptr + places[None, :] * d_stride + outs[:, None],
            mask=inside[None, :] & (outs < out_width)[:, None], other=0.0,
        )  # fmt: skip
        x = tl.load(
            x_ptr + places[:, None] * x_stride + ins[None, :],
            mask=inside[:, None] & (ins < in_width)[None, :], other=0.0,
        )  # fmt: skip
        sums += _product(d, x)
    gradient = (
        gradient_ptr + expert.to(tl.int64) * expert_stride + outs.to(tl.int64)[:, None] * row_stride
        + ins[None, :] * column_stride
    )  # fmt: skip
    inside = (outs < out_width)[:, None] & (ins < in_width)[None, :]
    if ACCUMULATE:
        sums += tl.load(gradient, mask=inside, other=0.0).to(tl.float32)
    tl.store(gradient, rounded(sums, gradient_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_rows_kernel(
    x_ptr, weights_ptr, places_ptr, residual_ptr, out_ptr, x_stride, residual_stride, out_stride,
    width, PER_TOKEN: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    sums = tl.zeros([COLUMNS], dtype=tl.float32)
    for number in range(PER_TOKEN):
        place = tl.load(places_ptr + token * PER_TOKEN + number)
        row = tl.load(x_ptr + place * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            row *= tl.load(weights_ptr + token * PER_TOKEN + number)
        sums += row
    if HAS_RESIDUAL:
        residual = residual_ptr + token * residual_stride + columns
        sums += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + token * out_stride + columns
    tl.store(out, rounded(sums, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weigh_rows_kernel(
    d_ptr, product_ptr, weights_ptr, places_ptr, d_weights_ptr, d_stride, product_stride, width,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    place = tl.load(places_ptr + number)
    weight = tl.load(weights_ptr + number)
    sums = tl.zeros([COLUMNS], dtype=tl.float32)
    for first in range(0, width, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < width
        d_places = d_ptr + place * d_stride + columns
        product_places = product_ptr + place * product_stride + columns
        d = tl.load(d_places, mask=inside, other=0.0).to(tl.float32)
        product = tl.load(product_places, mask=inside, other=0.0).to(tl.float32)
        sums += d * product
        tl.store(d_places, rounded(d * weight, d_ptr.dtype.element_ty), mask=inside)
        weighted = rounded(product * weight, product_ptr.dtype.element_ty)
        tl.store(product_places, weighted, mask=inside)
    tl.store(d_weights_ptr + number, tl.sum(sums, axis=0))
