"""Rows in the order of the experts that they go to, and back. Nothing is added atomically.

Legend: T tokens, K experts for each, S = T K rows, E experts, D width.
"""

from dataclasses import dataclass

import torch

from twinstream.executor.kernels.vector.row_blocks import row_blocks
from twinstream.executor.kernels.workspace import Workspace


@dataclass(frozen=True)
class Permutation:
    """Where each row of a chunk goes: S rows whatever the choice, only `ends` tell who has them."""

    tokens: torch.Tensor  # int64: the token of each permuted row
    places: torch.Tensor  # int64: the permuted row of a token's each expert, token by token
    ends: torch.Tensor  # int32: where an expert's rows end
    in_order: torch.Tensor  # int64, of use to `write_permutation` alone

    @classmethod
    def take(cls, workspace: Workspace, num_rows: int, num_experts: int) -> "Permutation":
        tokens, places, ordered = (workspace.take((num_rows,), torch.int64) for _ in range(3))
        return cls(tokens, places, workspace.take((num_experts,), torch.int32), ordered)


def write_permutation(chosen: torch.Tensor, to: Permutation) -> None:
    """Sort the rows by expert; those of an expert stay in the order of tokens."""
    num_rows, num_experts = to.tokens.numel(), to.ends.numel()
    device = chosen.device
    torch.sort(chosen.reshape(-1).to(torch.int64), stable=True, out=(to.in_order, to.tokens))
    numbers = torch.arange(num_experts, device=device)
    torch.searchsorted(to.in_order, numbers, right=True, out_int32=True, out=to.ends)
    to.places.scatter_(0, to.tokens, torch.arange(num_rows, device=device))
    to.tokens.div_(chosen.shape[1], rounding_mode="floor")


def gather_rows(x_TD: torch.Tensor, to: Permutation, out_SD: torch.Tensor) -> None:
    torch.index_select(x_TD, 0, to.tokens, out=out_SD)


def add_rows(
    x_SD: torch.Tensor, weights: torch.Tensor | None, to: Permutation,
    residual_TD: torch.Tensor | None, out_TD: torch.Tensor,
) -> None:  # fmt: skip
    """out = residual + each token's rows, weighted, in the order of its experts; rounded once."""
    per_token = x_SD.shape[0] // out_TD.shape[0]
    places_TK = to.places.view(-1, per_token)
    for rows in row_blocks(out_TD.shape[0], per_token * out_TD.shape[1]):
        each_RKD = x_SD[places_TK[rows]].float()
        if weights is not None:
            each_RKD.mul_(weights[rows][:, :, None])
        total = each_RKD.sum(1)
        out_TD[rows].copy_(total if residual_TD is None else total.add_(residual_TD[rows]))


def weigh_rows(
    d_SF: torch.Tensor, product_SF: torch.Tensor, weights: torch.Tensor, to: Permutation,
    d_weights_TK: torch.Tensor,
) -> None:  # fmt: skip
    """The weights' gradients from that of a product which is not weighted yet; then weigh both.

    What an expert makes of a product is linear in it, so that the gradient of an output's weight is
    the product times its gradient before the weight.
    """
    weights_S = torch.empty_like(to.tokens, dtype=torch.float32)
    weights_S.scatter_(0, to.places, weights.reshape(-1))
    d_weights_S = torch.empty_like(weights_S)
    for rows in row_blocks(*d_SF.shape):
        weights_R1 = weights_S[rows, None]
        d, product = d_SF[rows].float(), product_SF[rows].float()
        torch.sum(d * product, 1, out=d_weights_S[rows])
        d_SF[rows].copy_(d.mul_(weights_R1))
        product_SF[rows].copy_(product.mul_(weights_R1))
    torch.index_select(d_weights_S, 0, to.places, out=d_weights_TK.view(-1))


def weigh_by_gate(
    d_TF: torch.Tensor, product_TF: torch.Tensor, gate_T1: torch.Tensor, d_logit_T1: torch.Tensor
) -> None:
    """The same of a product that all tokens have, weighted by the sigmoid of a gate's logit."""
    for rows in row_blocks(*d_TF.shape):
        gate_R1, d, product = gate_T1[rows], d_TF[rows].float(), product_TF[rows].float()
        d_gate_R1 = (d * product).sum(1, keepdim=True)
        d_logit_T1[rows].copy_(d_gate_R1 * gate_R1 * (1.0 - gate_R1))
        d_TF[rows].copy_(d.mul_(gate_R1))
        product_TF[rows].copy_(product.mul_(gate_R1))
