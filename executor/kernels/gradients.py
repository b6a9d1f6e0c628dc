"""Weight gradients: the first contribution is written, later ones are added in place."""

import torch

from twinstream.executor.kernels.operand import KernelOperand
from twinstream.models.layout import Layout
from twinstream.schedule.ops import Mode


def weight_views(
    operand: KernelOperand, layout: Layout, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The inner tensors of a flat operand, by name."""
    return {
        tensor.name: operand.view(dtype, tensor.shape, tensor.offset_bytes)
        for tensor in layout.tensors
    }


def gradient_views(
    operand: KernelOperand, layout: Layout, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The inner tensors of a flat gradient; the padding between them is zeroed on `write`."""
    if operand.mode == "write":
        starts = [tensor.offset_bytes for tensor in layout.tensors[1:]] + [operand.bytes.numel()]
        for tensor, next_start in zip(layout.tensors, starts, strict=True):
            operand.bytes[tensor.offset_bytes + tensor.size_bytes : next_start].zero_()
    return weight_views(operand, layout, dtype)


def add_matmul(gradient: torch.Tensor, a: torch.Tensor, b: torch.Tensor, mode: Mode) -> None:
    """gradient (+)= a @ b, rounded once."""
    if mode == "write":
        torch.mm(a, b, out=gradient)
    else:
        torch.addmm(gradient, a, b, out=gradient)


def add_vector(gradient: torch.Tensor, value: torch.Tensor, mode: Mode) -> None:
    """gradient (+)= value in float32, rounded once; changes `value`."""
    if mode == "update":
        value.add_(gradient)
    gradient.copy_(value)
