"""RMSNorm as in Hugging Face: normalised in float32, rounded, then multiplied by the weight.

Only rstd = 1 / rms is saved; the backward normalises again. Legend: T tokens, D width.
"""

import torch

from twinstream.executor.kernels.vector.gradients import add_vector
from twinstream.executor.kernels.vector.row_blocks import float32_copy, row_blocks
from twinstream.executor.kernels.vector.vector_ops import NormGradients, RmsNorm
from twinstream.executor.kernels.workspace import Workspace


def rstd(x_TD: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / rms of float32 rows, keeping the last dimension."""
    return x_TD.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def write_normed(
    norm: RmsNorm, out_TD: torch.Tensor, *, eps: float | None = None,
    residual_TD: torch.Tensor | None = None,
) -> None:  # fmt: skip
    if residual_TD is not None:
        norm.x.add_(residual_TD)
    for rows in row_blocks(*norm.x.shape):
        x_hat = float32_copy(norm.x[rows])
        if eps is not None:
            norm.rstd[rows].copy_(rstd(x_hat, eps).squeeze(-1))
        x_hat.mul_(norm.rstd[rows, None])
        torch.mul(x_hat.to(out_TD.dtype), norm.weight, out=out_TD[rows])


def rms_norm_backward(norm: RmsNorm, gradients: NormGradients, workspace: Workspace) -> None:
    weight_D = norm.weight.float()
    d_weight_D = torch.zeros_like(weight_D)
    for rows in row_blocks(*norm.x.shape):
        rstd_T1 = norm.rstd[rows, None]
        x_hat = float32_copy(norm.x[rows]).mul_(rstd_T1)
        gradient = float32_copy(gradients.d_out[rows])
        d_weight_D += normed_backward(gradient, x_hat, rstd_T1, weight_D)
        if gradients.accumulate:
            gradient.add_(gradients.d_x[rows])
        gradients.d_x[rows].copy_(gradient)
    if gradients.d_weight is not None:
        add_vector(gradients.d_weight.tensor, d_weight_D, gradients.d_weight.mode)


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
