"""Weight gradients: the first contribution is written, later ones are added in place.

They have the model's dtype, or float32 (`gradient_dtype`): bf16 gradients are rounded once a
contribution, float32 ones never.
"""

from math import prod

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.operand import DTYPES, KernelOperand
from twinstream.executor.kernels.vector.row_blocks import row_blocks
from twinstream.executor.kernels.vector.vector_ops import VectorGradient
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attributes import Attributes, gradient_dtype_name
from twinstream.models.layout import FlatLayout
from twinstream.schedule.ops import Mode


def gradient_dtype(attributes: Attributes) -> torch.dtype:
    return DTYPES[gradient_dtype_name(attributes)]


def weight_views(
    operand: KernelOperand, layout: FlatLayout, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The inner tensors of a flat operand of the model's dtype, by name; not those in few bits."""
    return {
        tensor.name: operand.view(dtype, tensor.shape, tensor.offset_bytes)
        for tensor in layout.tensors
        if tensor.size_bytes == prod(tensor.shape) * dtype.itemsize
    }


def gradient_views(
    operand: KernelOperand, layout: FlatLayout, attributes: Attributes, calls: Calls
) -> dict[str, torch.Tensor]:
    """The inner tensors of a flat gradient; calls zero the padding between them on `write`.

    A gradient of wider elements has each at the same element as the weights.
    """
    dtype = gradient_dtype(attributes)
    wider = dtype.itemsize // DTYPES[str(attributes["dtype"])].itemsize
    ends = [wider * tensor.offset_bytes for tensor in layout.tensors[1:]] + [operand.bytes.numel()]
    views = {}
    for tensor, next_start in zip(layout.tensors, ends, strict=True):
        start, size = wider * tensor.offset_bytes, wider * tensor.size_bytes
        views[tensor.name] = operand.view(dtype, tensor.shape, start)
        if operand.mode == "write":
            calls.add(operand.bytes[start + size : next_start].zero_)
    return views


def add_matmul(gradient: torch.Tensor, a: torch.Tensor, b: torch.Tensor, mode: Mode) -> None:
    """gradient (+)= a @ b, accumulated in float32 and rounded once."""
    if gradient.dtype != a.dtype:
        _add_wider_matmul(gradient, a, b, mode)
    elif mode == "write":
        torch.mm(a, b, out=gradient)
    else:
        torch.addmm(gradient, a, b, out=gradient)


def _add_wider_matmul(gradient: torch.Tensor, a: torch.Tensor, b: torch.Tensor, mode: Mode) -> None:
    """A float32 gradient of bf16 factors; only CUDA's matmuls take both at once."""
    if gradient.is_cuda:
        if mode == "write":
            torch.mm(a, b, out_dtype=gradient.dtype, out=gradient)
        else:
            torch.addmm(gradient, a, b, out_dtype=gradient.dtype, out=gradient)
        return
    if mode == "write":
        gradient.zero_()
    for inner in row_blocks(b.shape[0], max(gradient.shape)):
        gradient.addmm_(a[:, inner].to(gradient.dtype), b[inner].to(gradient.dtype))


def add_vector(gradient: torch.Tensor, value: torch.Tensor, mode: Mode) -> None:
    """gradient (+)= value in float32, rounded once; changes `value`."""
    if mode == "update":
        value.add_(gradient)
    gradient.copy_(value)


def add_column_sums(x_TD: torch.Tensor, gradient: VectorGradient, workspace: Workspace) -> None:
    sums = torch.zeros(x_TD.shape[1], dtype=torch.float32, device=x_TD.device)
    for rows in row_blocks(*x_TD.shape):
        sums += x_TD[rows].sum(0, dtype=torch.float32)
    add_vector(gradient.tensor, sums, gradient.mode)
