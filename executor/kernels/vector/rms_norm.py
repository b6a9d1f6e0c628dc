"""RMSNorm as in Hugging Face: normalised in float32, rounded, then multiplied by the weight.

Only rstd = 1 / rms is saved; the backward normalises again. Legend: T tokens, D width.
"""

from dataclasses import dataclass

import torch

from twinstream.executor.kernels.vector.row_blocks import float32_copy, row_blocks


@dataclass(frozen=True)
class RmsNorm:
    """The inputs of one normalisation."""

    x: torch.Tensor  # [T, D]
    rstd: torch.Tensor  # [T]
    weight: torch.Tensor  # [D]


def rstd(x_TD: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / rms of float32 rows, keeping the last dimension."""
    return x_TD.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def write_rstd(x_TD: torch.Tensor, eps: float, rstd_T: torch.Tensor) -> None:
    for rows in row_blocks(*x_TD.shape):
        rstd_T[rows].copy_(rstd(x_TD[rows].float(), eps).squeeze(-1))


def write_normed(norm: RmsNorm, out_TD: torch.Tensor) -> None:
    for rows in row_blocks(*norm.x.shape):
        x_hat = float32_copy(norm.x[rows]).mul_(norm.rstd[rows, None])
        torch.mul(x_hat.to(out_TD.dtype), norm.weight, out=out_TD[rows])


def rms_norm_backward(
    norm: RmsNorm, d_out_TD: torch.Tensor, d_x_TD: torch.Tensor, *, accumulate: bool
) -> torch.Tensor:
    """Set d_x, or add to it, and return the float32 gradient of the weight.

    d_out and d_x may be the same tensor.
    """
    weight_D = norm.weight.float()
    d_weight_D = torch.zeros_like(weight_D)
    for rows in row_blocks(*norm.x.shape):
        rstd_T1 = norm.rstd[rows, None]
        x_hat = float32_copy(norm.x[rows]).mul_(rstd_T1)
        gradient = float32_copy(d_out_TD[rows])
        d_weight_D += normed_backward(gradient, x_hat, rstd_T1, weight_D)
        if accumulate:
            gradient.add_(d_x_TD[rows])
        d_x_TD[rows].copy_(gradient)
    return d_weight_D


def normed_backward(
    gradient: torch.Tensor, x_hat: torch.Tensor, rstd: torch.Tensor, weight_D: torch.Tensor
) -> torch.Tensor:
    """Turn the gradient of x_hat * weight into that of x, in place; return that of the weight.

    All float32, contiguous; the leading dimensions are summed over in the returned gradient.
    """
    width = weight_D.shape[0]
    d_weight_D = (gradient * x_hat).view(-1, width).sum(0)
    gradient.mul_(weight_D)
    mean = (gradient * x_hat).mean(-1, keepdim=True)
    gradient.sub_(x_hat * mean).mul_(rstd)
    return d_weight_D
