"""Backward of the routed experts of a block, by hand. Legend as in `block_operands`.

What experts make of their rows is linear in SwiGLU's product, so that a weight's gradient, the
output times its gradient, is that product times the product's own: no output is needed again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from twinstream.executor.kernels.block.adapters import AdapterGradients
from twinstream.executor.kernels.block.block_operands import BlockOperands
from twinstream.executor.kernels.block.experts_forward import RoutedRows, take_rows, write_low
from twinstream.executor.kernels.experts.permutation import gather_rows, take_row_weights
from twinstream.executor.kernels.experts.routing import logit_gradients
from twinstream.executor.kernels.vector.gradients import gradient_views
from twinstream.models.kernel_costs.attributes import Attributes
from twinstream.schedule.ops import Mode


@dataclass(frozen=True)
class ExpertGradients:
    """Where the gradients of a block's routed experts go; empty where they are frozen."""

    by_name: Mapping[str, torch.Tensor]
    mode: Mode

    @classmethod
    def of(cls, block: BlockOperands, attributes: Attributes) -> "ExpertGradients":
        layout = block.call.experts_layout
        if layout is None or block.call.frozen_experts:
            return cls({}, "update")
        flat = block.operands["expert_gradients"]
        return cls(gradient_views(flat, layout, attributes, block.calls), flat.mode)


@dataclass(frozen=True)
class ExpertsBackward:
    """One backward of the experts of a block."""

    block: BlockOperands
    rows: RoutedRows
    gradients: ExpertGradients
    adapters: AdapterGradients

    def run(
        self, d_hidden_TD: torch.Tensor, normed_TD: torch.Tensor, d_normed_TD: torch.Tensor
    ) -> torch.Tensor:
        """Write the gradient of the normed rows as far as experts make it; return the logits'.

        Returns:
            [T, experts], in the model's dtype; lies in the workspace.
        """
        block, calls = self.block, self.block.calls
        experts, routes = block.experts, block.routes
        d_logits_TE = block.take(experts.count)
        d_weights_TK = block.workspace.take(routes.weights.shape, torch.float32)
        self.through_experts(d_hidden_TD, normed_TD, d_normed_TD, d_weights_TK)
        calls.add(
            logit_gradients, normed_TD, block.weights["router"], experts, routes, d_weights_TK,
            d_logits_TE, block.balance,
        )  # fmt: skip
        return d_logits_TE

    def through_experts(
        self, d_hidden_TD: torch.Tensor, normed_TD: torch.Tensor, d_normed_TD: torch.Tensor,
        d_weights_TK: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write the gradients of normed rows and of weights, as experts or parts make them.

        Where ranks share experts, these have made them of rows that came back.
        """
        block, calls, width = self.block, self.block.calls, self.block.call.spec.d_model
        experts, routes, to = block.experts, block.routes, self.rows.to
        if block.call.ep > 1:
            calls.add(take_row_weights, block.sent_weights, to, d_weights_TK)
            calls.add(block.vector.add_rows, block.sent_rows, None, to.places, None, d_normed_TD)
            return
        with block.workspace.frame():
            d_gate_up_S2F = take_rows(block, 2 * experts.d_ff)
            x_SD = take_rows(block, width)
            d_product_SF = d_gate_up_S2F[:, experts.d_ff :]
            with block.workspace.frame():
                product_SF = take_rows(block, experts.d_ff)
                calls.add(gather_rows, d_hidden_TD, to, x_SD)
                self._input_gradient("experts_down", x_SD, d_product_SF)
                calls.add(block.vector.write_swiglu, block.expert_gate_up, product_SF)
                calls.add(
                    block.vector.weigh_rows, d_product_SF, product_SF, routes.weights, to.places,
                    d_weights_TK,
                )  # fmt: skip
                self._add("experts_down", x_SD, product_SF)
            calls.add(block.vector.swiglu_backward, block.expert_gate_up, d_gate_up_S2F, None)
            if self._needs_input("experts_gate_up"):
                calls.add(gather_rows, normed_TD, to, x_SD)
            self._add("experts_gate_up", d_gate_up_S2F, x_SD)
            self._input_gradient("experts_gate_up", d_gate_up_S2F, x_SD)
            calls.add(block.vector.add_rows, x_SD, None, to.places, None, d_normed_TD)

    def _needs_input(self, name: str) -> bool:
        return name in self.gradients.by_name or name in self.block.adapters.expert_sites

    def _add(self, name: str, d_SO: torch.Tensor, x_SI: torch.Tensor) -> None:
        """Add to the gradients of every expert's matrix, and of the adapters beside it."""
        block, ends, add = self.block, self.rows.to.ends, self.block.vector.add_grouped_gradient
        if name in self.gradients.by_name:
            gradient, mode = self.gradients.by_name[name], self.gradients.mode
            block.calls.add(add, gradient, d_SO, x_SI, ends, mode)
        if name not in block.adapters.expert_sites:
            return
        by_name, mode = self.adapters.by_name, self.adapters.mode
        with block.workspace.frame():
            low_SR = take_rows(block, block.adapters.rank)
            write_low(block, self.rows, name, x_SI, low_SR)
            block.calls.add(add, by_name[f"{name}_b"], d_SO, low_SR, ends, mode)
            self._write_low_gradient(name, d_SO, low_SR)
            block.calls.add(add, by_name[f"{name}_a"], low_SR, x_SI, ends, mode)

    def _input_gradient(self, name: str, d_SO: torch.Tensor, out_SI: torch.Tensor) -> None:
        """out = d W, and what adapters add."""
        block, ends = self.block, self.rows.to.ends
        matmul = block.vector.grouped_matmul
        block.calls.add(matmul, d_SO, block.matrix(name), ends, out_SI)
        if name not in block.adapters.expert_sites:
            return
        with block.workspace.frame():
            low_SR = take_rows(block, block.adapters.rank)
            self._write_low_gradient(name, d_SO, low_SR)
            a_ERI = block.adapters.weights[f"{name}_a"]
            block.calls.add(matmul, low_SR, a_ERI, ends, out_SI, accumulate=True)

    def _write_low_gradient(self, name: str, d_SO: torch.Tensor, low_SR: torch.Tensor) -> None:
        block = self.block
        b_EOR = block.adapters.weights[f"{name}_b"]
        block.calls.add(
            block.vector.grouped_matmul, d_SO, b_EOR, self.rows.to.ends, low_SR,
            scale=block.adapters.scale,
        )  # fmt: skip
