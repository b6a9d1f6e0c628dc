"""From a Q or K projection to what attention takes: an RMSNorm of each head (Qwen3), then RoPE.

In float32 throughout, rounded once. Legend: T tokens, H heads, D head_dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from twinstream.executor.kernels.rms_norm import normed_backward, rstd
from twinstream.executor.kernels.rope import Rope, rotate
from twinstream.executor.kernels.row_blocks import float32_copy, row_blocks


@dataclass(frozen=True)
class HeadNorm:
    """The RMSNorm that all heads of Q, or all of K, share."""

    weight: torch.Tensor  # [D]
    eps: float


def write_rotated(
    x_THD: torch.Tensor, norm: HeadNorm | None, rope: Rope, out_THD: torch.Tensor
) -> None:
    """out = RoPE(norm(x)); out may be x."""
    for rows in _token_blocks(x_THD):
        x = float32_copy(x_THD[rows])
        if norm is not None:
            x.mul_(rstd(x, norm.eps)).mul_(norm.weight)
        rotate(x, rope.angles(rows, x.device))
        out_THD[rows].copy_(x)


def rotated_backward(d_THD: torch.Tensor, rope: Rope) -> None:
    """Turn the gradient of RoPE(x) into that of x, in place."""
    for rows in _token_blocks(d_THD):
        gradient = float32_copy(d_THD[rows])
        rotate(gradient, rope.angles(rows, d_THD.device).neg_())
        d_THD[rows].copy_(gradient)


def normed_rotated_backward(
    d_THD: torch.Tensor, x_THD: torch.Tensor, norm: HeadNorm, rope: Rope
) -> torch.Tensor:
    """Turn the gradient of RoPE(norm(x)) into that of x, in place.

    Returns the float32 gradient of the norm's weight.
    """
    weight_D = norm.weight.float()
    d_weight_D = torch.zeros_like(weight_D)
    for rows in _token_blocks(d_THD):
        gradient = float32_copy(d_THD[rows])
        rotate(gradient, rope.angles(rows, d_THD.device).neg_())
        x_hat = float32_copy(x_THD[rows])
        rstd_TH1 = rstd(x_hat, norm.eps)
        d_weight_D += normed_backward(gradient, x_hat.mul_(rstd_TH1), rstd_TH1, weight_D)
        d_THD[rows].copy_(gradient)
    return d_weight_D


def _token_blocks(x_THD: torch.Tensor) -> Iterator[slice]:
    return row_blocks(x_THD.shape[0], x_THD[0].numel())
