"""Matmuls of the rows of every expert with that expert's matrix, and the gradients of matrices.

On the CPU, and where torch has no grouped matmul, one product for each expert that has rows, with
its offsets read by the host; on CUDA in bfloat16 `torch.nn.functional.grouped_mm`, which nobody
waits for. Legend: S rows in the order of experts, E experts, I and O widths.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

from twinstream.executor.kernels.vector.gradients import add_matmul
from twinstream.schedule.ops import Mode


def grouped_matmul(
    x_SI: torch.Tensor, matrices_EIO: torch.Tensor, ends_E: torch.Tensor, out_SO: torch.Tensor,
    *, scale: float = 1.0, accumulate: bool = False,
) -> None:  # fmt: skip
    """out = scale x M of each row's expert; with `accumulate` added to what is there."""
    if _has_grouped_mm(x_SI):
        product = functional.grouped_mm(x_SI.contiguous(), matrices_EIO, offs=ends_E)
        if accumulate:
            out_SO.add_(product, alpha=scale)
        else:
            torch.mul(product, scale, out=out_SO)
        return
    for expert, rows in _rows_of_experts(ends_E):
        x, matrix, out = x_SI[rows], matrices_EIO[expert], out_SO[rows]
        torch.addmm(out, x, matrix, beta=float(accumulate), alpha=scale, out=out)


def add_grouped_gradient(
    gradient_EOI: torch.Tensor, d_SO: torch.Tensor, x_SI: torch.Tensor, ends_E: torch.Tensor,
    mode: Mode,
) -> None:  # fmt: skip
    """gradient (+)= d^T x of each expert's rows; exact zeros of one without any."""
    if _has_grouped_mm(x_SI):
        found = functional.grouped_mm(d_SO.contiguous().t(), x_SI.contiguous(), offs=ends_E)
        if mode == "write":
            gradient_EOI.copy_(found)
        else:
            gradient_EOI.add_(found)
        return
    for expert, rows in _rows_of_experts(ends_E, with_empty=mode == "write"):
        add_matmul(gradient_EOI[expert], d_SO[rows].t(), x_SI[rows], mode)


def _has_grouped_mm(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and hasattr(functional, "grouped_mm")


def _rows_of_experts(
    ends_E: torch.Tensor, *, with_empty: bool = False
) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start or with_empty:
            yield expert, slice(start, end)
        start = end
