"""From a Q or K projection to what attention takes: an RMSNorm of each head (Qwen3), then RoPE.

In float32 throughout, rounded once. Legend: T tokens, H heads, E head_dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from twinstream.executor.kernels.vector.rms_norm import normed_backward, rstd
from twinstream.executor.kernels.vector.rope import Rope, rotate
from twinstream.executor.kernels.vector.row_blocks import float32_copy, row_blocks


@dataclass(frozen=True)
class HeadNorm:
    """The RMSNorm that all heads of Q, or all of K, share."""

    weight: torch.Tensor  # [E]
    eps: float


def write_rotated(
    x_THE: torch.Tensor, norm: HeadNorm | None, rope: Rope, out_THE: torch.Tensor
) -> None:
    """out = RoPE(norm(x)); out may be x."""
    for rows in _token_blocks(x_THE):
        x = float32_copy(x_THE[rows])
        if norm is not None:
            x.mul_(rstd(x, norm.eps)).mul_(norm.weight)
        rotate(x, rope.angles(rows, x.device))
        out_THE[rows].copy_(x)


def rotated_backward(d_THE: torch.Tensor, rope: Rope) -> None:
    """Turn the gradient of RoPE(x) into that of x, in place."""
    for rows in _token_blocks(d_THE):
        gradient = float32_copy(d_THE[rows])
        rotate(gradient, rope.angles(rows, d_THE.device).neg_())
        d_THE[rows].copy_(gradient)


def normed_rotated_backward(
    d_THE: torch.Tensor, x_THE: torch.Tensor, norm: HeadNorm, rope: Rope
) -> torch.Tensor:
    """Turn the gradient of RoPE(norm(x)) into that of x, in place.

    Returns the float32 gradient of the norm's weight.
    """
    weight_E = norm.weight.float()
    d_weight_E = torch.zeros_like(weight_E)
    for rows in _token_blocks(d_THE):
        gradient = float32_copy(d_THE[rows])
        rotate(gradient, rope.angles(rows, d_THE.device).neg_())
        x_hat = float32_copy(x_THE[rows])
        rstd_TH1 = rstd(x_hat, norm.eps)
        d_weight_E += normed_backward(gradient, x_hat.mul_(rstd_TH1), rstd_TH1, weight_E)
        d_THE[rows].copy_(gradient)
    return d_weight_E


def _token_blocks(x_THE: torch.Tensor) -> Iterator[slice]:
    return row_blocks(x_THE.shape[0], x_THE[0].numel())
