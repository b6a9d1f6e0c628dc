"""The routed experts of a block: their forward, and what redoes of it what a plan did not keep.

Where ranks share experts, rows are sent to them and come back instead (`shared_experts`). Legend as
in `block_operands`.
"""

from dataclasses import dataclass

import torch

from twinstream.executor.kernels.block.block_operands import BlockOperands
from twinstream.executor.kernels.experts.permutation import (
    Permutation,
    gather_rows,
    write_counts,
    write_permutation,
)
from twinstream.executor.kernels.experts.routing import choose


@dataclass(frozen=True)
class RoutedRows:
    """Where the rows of a block's chunk go; temporaries."""

    to: Permutation
    shared: torch.Tensor | None  # float32: what the output of a gated shared expert counts

    @classmethod
    def take(cls, block: BlockOperands) -> "RoutedRows":
        experts = block.experts
        num_rows = block.call.num_tokens * experts.per_token
        to = Permutation.take(block.workspace, num_rows, experts.count)
        shared = None
        if experts.shared_gate:
            shared = block.workspace.take((block.call.num_tokens, 1), torch.float32)
        return cls(to, shared)


def take_rows(block: BlockOperands, width: int) -> torch.Tensor:
    """A [S, width] temporary."""
    num_rows = block.call.num_tokens * block.experts.per_token
    return block.workspace.take((num_rows, width), block.call.dtype)


def write_choice(block: BlockOperands, normed_TD: torch.Tensor) -> None:
    """Which experts each token goes to: of forward alone."""
    balance = block.balance
    if balance is not None and block.operands["balance"].mode == "write":
        block.calls.add(block.operands["balance"].bytes.zero_)
    router = block.weights["router"]
    block.calls.add(
        choose, normed_TD, router, block.router_bias, block.experts, block.routes, balance
    )


def write_rows(block: BlockOperands, rows: RoutedRows, normed_TD: torch.Tensor) -> None:
    """The order of rows, and what the sigmoid of a shared expert's gate is."""
    block.calls.add(write_permutation, block.routes.chosen, rows.to)
    if rows.shared is not None:
        gate = block.weights["shared_gate"]
        block.calls.add(_write_gate, normed_TD, gate, rows.shared)


def write_expert_gate_up(block: BlockOperands, rows: RoutedRows, normed_TD: torch.Tensor) -> None:
    """Gate and up projections of every row by its expert."""
    with block.workspace.frame():
        x_SD = take_rows(block, block.call.spec.d_model)
        block.calls.add(gather_rows, normed_TD, rows.to, x_SD)
        product(block, rows, "experts_gate_up", x_SD, block.expert_gate_up)


def send_rows(block: BlockOperands, rows: RoutedRows, normed_TD: torch.Tensor) -> None:
    """Rows in the order of experts, and how many each expert gets."""
    counts_E = block.operands["counts"].view(torch.int32, (block.experts.count,))
    block.calls.add(gather_rows, normed_TD, rows.to, block.sent_rows)
    block.calls.add(write_counts, rows.to, counts_E)


def write_experts_output(
    block: BlockOperands, rows: RoutedRows, residual_TD: torch.Tensor | None, out_TD: torch.Tensor
) -> None:
    """out = residual, where there is one, + what a token's experts make of it, weighted."""
    with block.workspace.frame():
        if block.call.ep > 1:
            y_SD = block.sent_rows
        else:
            product_SF = take_rows(block, block.experts.d_ff)
            block.calls.add(block.vector.write_swiglu, block.expert_gate_up, product_SF)
            y_SD = take_rows(block, block.call.spec.d_model)
            product(block, rows, "experts_down", product_SF, y_SD)
        weights = block.routes.weights
        block.calls.add(block.vector.add_rows, y_SD, weights, rows.to.places, residual_TD, out_TD)


def product(
    block: BlockOperands, rows: RoutedRows, name: str, x_SI: torch.Tensor, out_SO: torch.Tensor
) -> None:
    """out = x W^T by the matrix of each row's expert, and what adapters beside it make."""
    matmul, ends = block.vector.grouped_matmul, rows.to.ends
    matrices = block.matrix(name).transpose(1, 2)
    block.calls.add(matmul, x_SI, matrices, ends, out_SO)
    if name not in block.adapters.expert_sites:
        return
    with block.workspace.frame():
        low_SR = take_rows(block, block.adapters.rank)
        write_low(block, rows, name, x_SI, low_SR)
        b_ERO = block.adapters.weights[f"{name}_b"].transpose(1, 2)
        block.calls.add(matmul, low_SR, b_ERO, ends, out_SO, accumulate=True)


def write_low(
    block: BlockOperands, rows: RoutedRows, name: str, x_SI: torch.Tensor, low_SR: torch.Tensor
) -> None:
    """low = scale x A^T."""
    a_EIR = block.adapters.weights[f"{name}_a"].transpose(1, 2)
    block.calls.add(
        block.vector.grouped_matmul, x_SI, a_EIR, rows.to.ends, low_SR,
        scale=block.adapters.scale,
    )  # fmt: skip


def _write_gate(x_TD: torch.Tensor, gate_1D: torch.Tensor, out_T1: torch.Tensor) -> None:
    torch.sigmoid(torch.mm(x_TD, gate_1D.t()).float(), out=out_T1)
