"""Forward of one block, and what redoes of it what a plan did not keep, bit for bit.

Recomputed bytes equal the forward's because they come from the same calls on the same shapes.
"""

import torch

from twinstream.executor.kernels.attention.implementation import AttentionResult
from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.executor.kernels.block.block_operands import BlockOperands
from twinstream.executor.kernels.block.experts_forward import (
    RoutedRows,
    send_rows,
    write_choice,
    write_expert_gate_up,
    write_experts_output,
    write_rows,
)
from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.operand import Operands
from twinstream.executor.kernels.vector.vector_ops import VectorOps
from twinstream.models.kernel_costs.attributes import Attributes


def block_forward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the block's output and all that a backward of any level needs.

    Where ranks share experts, it is rows for them that are written, and the output later
    (`block_combine_forward`).
    """
    block = BlockOperands.of(operands, attributes, vector, calls)
    spec, adapters = block.call.spec, block.adapters
    with block.workspace.frame():
        normed = block.take(spec.d_model)
        calls.add(vector.write_normed, block.norm("attention_norm"), normed, eps=spec.norm_eps)
        adapters.write_low("qkv", normed)
        write_q(block, normed)
        write_kv(block, normed)
    write_attention(block)
    with block.workspace.frame():
        rows = RoutedRows.take(block) if spec.experts else None
        _write_x_o_and_projections(block, rows, eps=spec.norm_eps)
        if block.call.ep == 1:
            write_output(block, rows, block.x_o, block.tokens_by_width("output"))


def block_combine_forward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the block's output from what experts on other ranks have made of its rows."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    with block.workspace.frame():
        rows = rows_again(block)
        write_output(block, rows, block.x_o, block.tokens_by_width("output"))


def rows_again(block: BlockOperands) -> RoutedRows:
    """Where rows go, and what a gate lets through, by a choice that was made."""
    rows = RoutedRows.take(block)
    with block.workspace.frame():
        normed, eps = block.take(block.call.spec.d_model), block.call.eps_again
        if rows.shared is not None:
            block.calls.add(block.vector.write_normed, block.norm("ffn_norm"), normed, eps=eps)
        write_rows(block, rows, normed)
    return rows


def write_output(
    block: BlockOperands, rows: RoutedRows | None, residual: torch.Tensor | None,
    output: torch.Tensor,
) -> None:  # fmt: skip
    """What experts, and then the network of all tokens, add to the residual stream; without that
    what they make alone."""
    adapters, calls = block.adapters, block.calls
    if rows is not None:
        write_experts_output(block, rows, residual, output)
        residual = output
    if not block.call.dense_width:
        return
    with block.workspace.frame():
        product = block.take(block.call.dense_width)
        calls.add(block.vector.write_swiglu, block.gate_up, product)
        if rows is not None and rows.shared is not None:
            calls.add(product.mul_, rows.shared)
        adapters.write_low("down", product)
        if residual is None:
            has_share = adapters.write_shares("down", [("down", output)])
            add_product(block, product, "down_proj", output, has_share=has_share)
            return
        if "down" in adapters.sites:
            adapters.add_share("down", "down", residual, output)
            residual = output
        calls.add(torch.addmm, residual, product, block.matrix("down_proj").t(), out=output)


def block_recompute_experts(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Recompute from level EXPERTS: write the experts' projections."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    with block.workspace.frame():
        rows = RoutedRows.take(block)
        normed = block.take(block.call.spec.d_model)
        calls.add(vector.write_normed, block.norm("ffn_norm"), normed)
        write_rows(block, rows, normed)
        write_expert_gate_up(block, rows, normed)


def block_recompute_attention(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Recompute from level ATTENTION: write the projections."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    rewrite_q(block)
    _rewrite_projections(block)


def block_recompute_input(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Recompute from level INPUT: write attention and the projections."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    rewrite_q(block)
    write_attention(block)
    _rewrite_projections(block)


def _rewrite_projections(block: BlockOperands) -> None:
    with block.workspace.frame():
        has_experts = block.call.spec.experts is not None and block.call.ep == 1
        rows = RoutedRows.take(block) if has_experts else None
        _write_x_o_and_projections(block, rows, eps=None)


def write_q(block: BlockOperands, normed_TD: torch.Tensor) -> None:
    """Q as projected, with its bias, before q_norm and RoPE."""
    project(block, normed_TD, "q", block.q)


def write_attention(block: BlockOperands, into: AttentionResult | None = None) -> None:
    """Attention's output and log-sum-exp, from Q and from the saved K and V."""
    with block.workspace.frame():
        rotated = block.take(block.call.spec.d_q)
        write_rotated_q(block, rotated)
        forward = attention_implementation(block.call.attention).forward
        inputs, workspace = block.attention_inputs(rotated), block.workspace.remaining()
        block.calls.add(forward, inputs, into or block.attention_result, workspace)


def write_rotated_q(block: BlockOperands, out_TQ: torch.Tensor) -> None:
    """Q as attention takes it."""
    norm, rope = block.head_norm("q_norm"), block.rope
    q, out = block.by_head(block.q), block.by_head(out_TQ)
    block.calls.add(block.vector.write_rotated, q, norm, rope, out)


def _write_x_o_and_projections(
    block: BlockOperands, rows: RoutedRows | None, eps: float | None
) -> None:
    """The residual stream after attention, and the gate and up projections of its norm.

    Without `eps` the norm's rstd is there already, and so is the choice of experts. The output of
    attention is rounded before it is added, as a module's output would be, so that its addition is
    part of the norm's pass.
    """
    adapters, is_forward = block.adapters, eps is not None
    with block.workspace.frame():
        normed = block.take(block.call.spec.d_model)
        if is_forward:
            adapters.write_low("o", block.attention_out)
        has_share = adapters.write_shares("o", [("o", block.x_o)])
        add_product(block, block.attention_out, "o_proj", block.x_o, has_share=has_share)
        hidden = block.tokens_by_width("hidden")
        norm, write_normed = block.norm("ffn_norm"), block.vector.write_normed
        block.calls.add(write_normed, norm, normed, eps=eps, residual_TD=hidden)
        write_projections(block, rows, normed, is_forward=is_forward)


def write_projections(
    block: BlockOperands, rows: RoutedRows | None, normed_TD: torch.Tensor, *, is_forward: bool
) -> None:
    """Gate and up of normed rows: of routed experts, which a forward may choose first, and of the
    network of all tokens."""
    adapters = block.adapters
    if rows is not None:
        if block.operands["routes"].mode == "write":
            write_choice(block, normed_TD)
        write_rows(block, rows, normed_TD)
        use_rows = write_expert_gate_up if block.call.ep == 1 else send_rows
        use_rows(block, rows, normed_TD)
    if not block.call.dense_width:
        return
    if is_forward or adapters.is_again:
        adapters.write_low("gate_up", normed_TD)
    outputs = list(block.gate_and_up(block.gate_up).items())
    has_share = adapters.write_shares("gate_up", outputs)
    add_product(block, normed_TD, "gate_up_proj", block.gate_up, has_share=has_share)


def add_product(
    block: BlockOperands, x: torch.Tensor, name: str, out: torch.Tensor, *, has_share: bool
) -> None:
    """out (+)= x W^T: added to what adapters have written there, if they have."""
    weight = block.matrix(name).t()
    if has_share:
        block.calls.add(torch.addmm, out, x, weight, out=out)
    else:
        block.calls.add(torch.mm, x, weight, out=out)


def project(block: BlockOperands, normed_TD: torch.Tensor, names: str, out: torch.Tensor) -> None:
    """Apply the rows of qkv_proj and of its bias that make Q, K or V, or some of them."""
    columns = [block.qkv_columns[name] for name in names]
    rows = slice(columns[0].start, columns[-1].stop)
    weight = block.matrix("qkv_proj", rows)
    bias = block.weights["qkv_bias"][rows] if block.call.spec.qkv_bias else None
    widths = [each.stop - each.start for each in columns]
    outputs = list(zip(names, torch.split(out, widths, dim=1), strict=True))
    if block.adapters.write_shares("qkv", outputs, bias):
        block.calls.add(torch.addmm, out, normed_TD, weight.t(), out=out)
    elif bias is not None:
        block.calls.add(torch.addmm, bias, normed_TD, weight.t(), out=out)
    else:
        block.calls.add(torch.mm, normed_TD, weight.t(), out=out)


def write_kv(block: BlockOperands, normed_TD: torch.Tensor) -> None:
    kv = block.kv
    project(block, normed_TD, "kv", kv.flatten(1))
    keys = kv[:, 0]
    norm, write_rotated = block.head_norm("k_norm"), block.vector.write_rotated
    block.calls.add(write_rotated, keys, norm, block.rope, keys)


def rewrite_q(block: BlockOperands) -> None:
    with block.workspace.frame():
        normed = block.take(block.call.spec.d_model)
        norm, eps = block.norm("attention_norm"), block.call.eps_again
        block.calls.add(block.vector.write_normed, norm, normed, eps=eps)
        block.adapters.write_low_again("qkv", normed)
        write_q(block, normed)
