"""From a Q or K projection to attention's input: an RMSNorm of each head (Qwen3), then RoPE.

A norm whose weight is as wide as all heads together is one over all of them (OLMoE). In float32
throughout, rounded once. Legend: T tokens, H heads, E head_dim.
"""

from collections.abc import Iterator

import torch

from twinstream.executor.kernels.vector.gradients import add_vector
from twinstream.executor.kernels.vector.rms_norm import normed_backward, rstd
from twinstream.executor.kernels.vector.rope import Rope, rotate
from twinstream.executor.kernels.vector.row_blocks import float32_copy, row_blocks
from twinstream.executor.kernels.vector.vector_ops import HeadNorm, HeadNormBackward
from twinstream.executor.kernels.workspace import Workspace


def write_rotated(
    x_THE: torch.Tensor, norm: HeadNorm | None, rope: Rope, out_THE: torch.Tensor
) -> None:
    for rows in _token_blocks(x_THE):
        x = float32_copy(x_THE[rows])
        if norm is not None:
            normed = _as_normed(x, norm)
            normed.mul_(rstd(normed, norm.eps)).mul_(norm.weight)
        rotate(x, rope.angles(rows, x.device))
        out_THE[rows].copy_(x)


def rotated_backward(
    d_THE: torch.Tensor, rope: Rope, norm: HeadNormBackward | None, workspace: Workspace
) -> None:
    width = d_THE.shape[2] if norm is None else norm.norm.weight.shape[0]
    d_weight_W = torch.zeros(width, dtype=torch.float32, device=d_THE.device)
    for rows in _token_blocks(d_THE):
        gradient = float32_copy(d_THE[rows])
        rotate(gradient, rope.angles(rows, d_THE.device).neg_())
        if norm is not None:
            x_hat = _as_normed(float32_copy(norm.x[rows]), norm.norm)
            rstds = rstd(x_hat, norm.norm.eps)
            x_hat.mul_(rstds)
            weight_W, normed = norm.norm.weight.float(), _as_normed(gradient, norm.norm)
            d_weight_W += normed_backward(normed, x_hat, rstds, weight_W)
        d_THE[rows].copy_(gradient)
    if norm is not None and norm.d_weight is not None:
        add_vector(norm.d_weight.tensor, d_weight_W, norm.d_weight.mode)


def _as_normed(x_THE: torch.Tensor, norm: HeadNorm) -> torch.Tensor:
    """[T, H, E], or [T, H E] where one norm is over all heads."""
    return x_THE if norm.weight.shape[0] == x_THE.shape[2] else x_THE.flatten(1)


def _token_blocks(x_THE: torch.Tensor) -> Iterator[slice]:
    return row_blocks(x_THE.shape[0], x_THE[0].numel())
