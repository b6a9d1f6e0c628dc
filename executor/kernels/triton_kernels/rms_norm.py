"""RMSNorm, forward and backward. One row fits a program; D is its width.

Forward: a program a row, with all loads of a thread in flight before the first use. Backward:
`SUM_PROGRAMS` programs, each for consecutive rows, keep their share of the weight's gradient in
registers; a second kernel adds the shares up in a fixed order.
"""

import torch
import triton
import triton.language as tl

from twinstream.executor.kernels.triton_kernels.column_sums import add_partial_sums
from twinstream.executor.kernels.triton_kernels.launch import launch, warps_for
from twinstream.executor.kernels.triton_kernels.rounding import rounded
from twinstream.executor.kernels.vector.vector_ops import NormGradients, RmsNorm
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.scratch_sizes import partial_sums


def write_normed(
    norm: RmsNorm, out_TD: torch.Tensor, *, eps: float | None = None,
    residual_TD: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """One pass: the residual's addition, rstd and the normed rows, as far as asked for."""
    num_rows, width = norm.x.shape
    block = triton.next_power_of_2(width)
    launch(
        _normed_kernel, (num_rows,), norm.x, norm.x if residual_TD is None else residual_TD,
        norm.rstd, norm.weight, out_TD, norm.x.stride(0), out_TD.stride(0), width,
        0.0 if eps is None else eps, HAS_RESIDUAL=residual_TD is not None,
        HAS_RSTD=eps is None, BLOCK=block, num_warps=warps_for(block, 16),
    )  # fmt: skip


def rms_norm_backward(norm: RmsNorm, gradients: NormGradients, workspace: Workspace) -> None:
    num_rows, width = norm.x.shape
    num_programs, block = partial_sums(num_rows), triton.next_power_of_2(width)
    d_weight, shares = gradients.d_weight, norm.rstd  # which are not written unless asked for
    with workspace.frame():
        if d_weight is not None:
            shares = workspace.take((num_programs, width), torch.float32)
        launch(
            _norm_backward_kernel, (num_programs,), norm.x, norm.rstd, norm.weight,
            gradients.d_out, gradients.d_x, shares, norm.x.stride(0),
            gradients.d_out.stride(0), gradients.d_x.stride(0), num_rows, width,
            ACCUMULATE=gradients.accumulate, HAS_D_WEIGHT=d_weight is not None, BLOCK=block,
            num_warps=warps_for(block, 16),
        )  # fmt: skip
        if d_weight is not None:
            add_partial_sums(shares, d_weight)


@triton.jit
def _normed_kernel(
    x_ptr, residual_ptr, rstd_ptr, weight_ptr, out_ptr, x_stride, out_stride, width, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_RSTD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    dtype = x_ptr.dtype.element_ty
    x_row = x_ptr + row * x_stride
    x = tl.load(x_row + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(residual_ptr + row * x_stride + columns, mask=inside, other=0.0)
        sums = rounded(x + added.to(tl.float32), dtype)
        tl.store(x_row + columns, sums, mask=inside)
        x = sums.to(tl.float32)
    if HAS_RSTD:
        rstd = tl.load(rstd_ptr + row)
    else:
        rstd = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
        tl.store(rstd_ptr + row, rstd)
    normed = rounded(x * rstd, dtype).to(tl.float32)
    out = rounded(normed * weight, dtype)
    tl.store(out_ptr + row * out_stride + columns, out, mask=inside)


@triton.jit
def _norm_backward_kernel(
    x_ptr, rstd_ptr, weight_ptr, d_out_ptr, d_x_ptr, partial_ptr, x_stride, d_out_stride,
    d_x_stride, num_rows, width, ACCUMULATE: tl.constexpr, HAS_D_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], dtype=tl.float32)
    rows_each = tl.cdiv(num_rows, tl.num_programs(0))
    first = program * rows_each
    for row_index in range(first, tl.minimum(first + rows_each, num_rows)):
        row = tl.cast(row_index, tl.int64)
        x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        d_out = tl.load(d_out_ptr + row * d_out_stride + columns, mask=inside, other=0.0)
        d_out = d_out.to(tl.float32)
        d_x_row = d_x_ptr + row * d_x_stride + columns
        rstd = tl.load(rstd_ptr + row)
        if ACCUMULATE:
            before = tl.load(d_x_row, mask=inside, other=0.0).to(tl.float32)
        x_hat = x * rstd
        if HAS_D_WEIGHT:
            d_weight += d_out * x_hat
        d_x_hat = d_out * weight
        mean = tl.sum(d_x_hat * x_hat, axis=0) / width
        d_x = (d_x_hat - x_hat * mean) * rstd
        if ACCUMULATE:
            d_x += before
        tl.store(d_x_row, rounded(d_x, d_x_ptr.dtype.element_ty), mask=inside)
    if HAS_D_WEIGHT:
        share = partial_ptr + program.to(tl.int64) * width + columns
        tl.store(share, d_weight, mask=inside)
