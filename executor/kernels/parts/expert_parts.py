"""Experts of which a part has some columns: their backward, and the router's from sums over parts.

What a token's expert, and a gate, count in the output have gradients that are sums over the columns
of all parts. Each part leaves its own behind its piece of the normed input's gradient; whoever adds
up the pieces takes the sums through router and gate. Legend as in `block_operands`; N pieces.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from twinstream.executor.kernels.block.block_backward import (
    BlockGradients,
    gate_up_backward,
    swiglu_backward,
)
from twinstream.executor.kernels.block.block_operands import BlockOperands
from twinstream.executor.kernels.block.experts_backward import ExpertGradients, ExpertsBackward
from twinstream.executor.kernels.block.experts_forward import RoutedRows, write_rows
from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.experts.routing import Routes, logit_gradients
from twinstream.executor.kernels.vector.gradients import add_matmul
from twinstream.models.options import Experts


def experts_part_backward(
    block: BlockOperands, gradients: BlockGradients, of_experts: ExpertGradients,
    piece_TD: torch.Tensor, behind: torch.Tensor,
) -> None:  # fmt: skip
    """Write a part's piece of the normed input's gradient, and behind it its shares of routes'."""
    rows, normed_TD, calls = (
        RoutedRows.take(block),
        block.take(block.call.spec.d_model),
        block.calls,
    )
    eps = block.call.eps_again
    calls.add(block.vector.write_normed, block.norm("ffn_norm"), normed_TD, eps=eps)
    write_rows(block, rows, normed_TD)
    d_weights_TK, d_gate_T1 = route_shares(behind, block.experts, block.call.num_tokens)
    with block.workspace.frame():
        sums_TK = block.workspace.take(tuple(d_weights_TK.shape), torch.float32)
        backward = ExpertsBackward(block, rows, of_experts, gradients.adapters)
        backward.through_experts(gradients.d_hidden, normed_TD, piece_TD, sums_TK)
        calls.add(d_weights_TK.copy_, sums_TK)
    if not block.call.dense_width:
        return
    d_gate_up_T2F = block.take(2 * block.call.dense_width)
    gate = None if rows.shared is None else (rows.shared, d_gate_T1)
    swiglu_backward(block, gradients, d_gate_up_T2F, gate)
    block.adapters.write_low_again("gate_up", normed_TD)
    gate_up_backward(block, gradients, d_gate_up_T2F, normed_TD, normed_TD)
    calls.add(piece_TD.add_, normed_TD)


def route_shares(
    behind: torch.Tensor, experts: Experts, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of what is last behind pieces, [..., P], the gradients of what a token's experts count,
    [..., T, K], and of a gate's logit, [..., T, 1] if there is a gate."""
    width = experts.per_token + experts.shared_gate
    shares = torch.unflatten(behind[..., : tokens * width], -1, (tokens, width))
    return shares[..., : experts.per_token], shares[..., experts.per_token :]


@dataclass(frozen=True)
class RouterBackward:
    """A router, and the gate of a shared expert, as whoever adds up pieces goes through them."""

    experts: Experts
    routes: Routes
    weights: Mapping[str, torch.Tensor]
    d_weights: torch.Tensor  # [T, K], float32
    d_gate: torch.Tensor  # [T, 1], or [T, 0] without one
    d_logits: torch.Tensor  # [T, experts]

    def run(
        self, normed_TD: torch.Tensor, d_normed_TD: torch.Tensor,
        gradients: Mapping[str, torch.Tensor], calls: Calls,
    ) -> None:  # fmt: skip
        """Add to the gradients of normed rows, and of the matrices where these have any."""
        calls.add(
            logit_gradients, normed_TD, self.weights["router"], self.experts, self.routes,
            self.d_weights, self.d_logits,
        )  # fmt: skip
        through = {"router": self.d_logits}
        through |= {"shared_gate": self.d_gate} if self.experts.shared_gate else {}
        for name, d_out in through.items():
            if name in gradients:
                calls.add(add_matmul, gradients[name], d_out.t(), normed_TD, "update")
            calls.add(torch.addmm, d_normed_TD, d_out, self.weights[name], out=d_normed_TD)
