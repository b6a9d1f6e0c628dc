"""Sums over rows in a fixed order: shares of consecutive rows first, then the shares."""

import torch
import triton
import triton.language as tl

from twinstream.executor.kernels.triton_kernels.launch import launch
from twinstream.executor.kernels.triton_kernels.rounding import rounded
from twinstream.executor.kernels.vector.vector_ops import VectorGradient
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.scratch_sizes import partial_sums

_COLUMNS = 512
# 128 bytes of every row of shares, so that also narrow gradients keep many programs busy.
_SHARE_COLUMNS, _SHARE_ROWS = 32, 32


def add_column_sums(x_TD: torch.Tensor, gradient: VectorGradient, workspace: Workspace) -> None:
    num_rows, width = x_TD.shape
    num_programs = partial_sums(num_rows)
    with workspace.frame():
        partial_PD = workspace.take((num_programs, width), torch.float32)
        launch(
            _column_sums_kernel, (num_programs, triton.cdiv(width, _COLUMNS)), x_TD, partial_PD,
            x_TD.stride(0), num_rows, width, BLOCK=_COLUMNS, num_warps=2,
        )  # fmt: skip
        add_partial_sums(partial_PD, gradient)


def add_partial_sums(partial_PD: torch.Tensor, gradient: VectorGradient) -> None:
    """gradient (+)= the sum of all rows, in float32, rounded once."""
    num_rows, width = partial_PD.shape
    launch(
        _partial_sums_kernel, (triton.cdiv(width, _SHARE_COLUMNS),), partial_PD, gradient.tensor,
        num_rows, width, ACCUMULATE=gradient.mode == "update", ROWS=_SHARE_ROWS,
        COLUMNS=_SHARE_COLUMNS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _column_sums_kernel(
    x_ptr, partial_ptr, x_stride, num_rows, width, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    rows_each = tl.cdiv(num_rows, tl.num_programs(0))
    first = program * rows_each
    for row_index in range(first, tl.minimum(first + rows_each, num_rows)):
        row = tl.cast(row_index, tl.int64)
        sums += tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(partial_ptr + program.to(tl.int64) * width + columns, sums, mask=inside)


@triton.jit
def _partial_sums_kernel(
    partial_ptr, gradient_ptr, num_rows, width, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        both = (rows < num_rows)[:, None] & inside[None, :]
        shares = partial_ptr + rows[:, None] * width + columns[None, :]
        sums += tl.load(shares, mask=both, other=0.0)
    total = tl.sum(sums, axis=0)
    if ACCUMULATE:
        total += tl.load(gradient_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(gradient_ptr + columns, rounded(total, gradient_ptr.dtype.element_ty), mask=inside)
