"""silu(gate) * up, in float32, rounded once. Legend: T tokens, F FFN width."""

import torch

from twinstream.executor.kernels.vector.row_blocks import float32_copy, row_blocks


def write_swiglu(gate_up_T2F: torch.Tensor, out_TF: torch.Tensor) -> None:
    d_ff = out_TF.shape[1]
    for rows in row_blocks(*out_TF.shape):
        gate = float32_copy(gate_up_T2F[rows, :d_ff])
        product = torch.sigmoid(gate).mul_(gate).mul_(gate_up_T2F[rows, d_ff:])
        out_TF[rows].copy_(product)


def swiglu_backward(
    gate_up_T2F: torch.Tensor, d_T2F: torch.Tensor, product_TF: torch.Tensor | None
) -> None:
    if product_TF is not None:
        write_swiglu(gate_up_T2F, product_TF)
    num_tokens, d_ff = d_T2F.shape[0], d_T2F.shape[1] // 2
    for rows in row_blocks(num_tokens, d_ff):
        d_product = float32_copy(d_T2F[rows, d_ff:])
        gate = float32_copy(gate_up_T2F[rows, :d_ff])
        sigmoid = torch.sigmoid(gate)
        silu = sigmoid * gate
        d_T2F[rows, d_ff:].copy_(d_product * silu)
        # silu' = sigmoid + silu * (1 - sigmoid)
        d_silu = torch.rsub(sigmoid, 1.0).mul_(silu).add_(sigmoid)
        d_T2F[rows, :d_ff].copy_(d_silu.mul_(d_product).mul_(gate_up_T2F[rows, d_ff:]))
