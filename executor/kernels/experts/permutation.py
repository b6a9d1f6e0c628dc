"""Rows in the order of the experts that they go to, and the weight of a gated shared expert.

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


def write_counts(to: Permutation, out_E: torch.Tensor) -> None:
    """How many rows each expert has."""
    out_E.copy_(to.ends)
    out_E[1:].sub_(to.ends[:-1])


def write_row_weights(weights_TK: torch.Tensor, to: Permutation, out_S: torch.Tensor) -> None:
    """What each permuted row's output counts."""
    out_S.scatter_(0, to.places, weights_TK.reshape(-1))


def take_row_weights(rows_S: torch.Tensor, to: Permutation, out_TK: torch.Tensor) -> None:
    """The same of each token's experts, from permuted rows."""
    torch.index_select(rows_S, 0, to.places, out=out_TK.view(-1))


def weigh_by_gate(
    d_TF: torch.Tensor, product_TF: torch.Tensor, gate_T1: torch.Tensor, d_logit_T1: torch.Tensor
) -> None:
    """The gradient of the logit of a gate, whose sigmoid weighs a product of all tokens; then weigh
    the product and its gradient, which are not weighted yet."""
    for rows in row_blocks(*d_TF.shape):
        gate_R1, d, product = gate_T1[rows], d_TF[rows].float(), product_TF[rows].float()
        d_gate_R1 = (d * product).sum(1, keepdim=True)
        d_logit_T1[rows].copy_(d_gate_R1 * gate_R1 * (1.0 - gate_R1))
        d_TF[rows].copy_(d.mul_(gate_R1))
        product_TF[rows].copy_(product.mul_(gate_R1))
