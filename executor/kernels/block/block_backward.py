"""Backward of one block, by hand.

`d_hidden` comes in as the gradient of the block's output and is carried down the residual
stream in place, until it is the gradient of the block's input. Legend: T tokens, C tokens seen,
D d_model, Q width of all query heads, K key heads, E head_dim, F FFN width, N = Q + 2 K E.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from twinstream.executor.kernels.attention.implementation import AttentionGradients
from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.executor.kernels.block.adapters import AdapterGradients
from twinstream.executor.kernels.block.block_forward import project, write_rotated_q
from twinstream.executor.kernels.block.block_operands import BlockOperands
from twinstream.executor.kernels.block.experts_backward import ExpertGradients, ExpertsBackward
from twinstream.executor.kernels.block.experts_forward import RoutedRows, write_rows
from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.experts.permutation import weigh_by_gate
from twinstream.executor.kernels.operand import Operands
from twinstream.executor.kernels.vector.gradients import add_matmul, gradient_views
from twinstream.executor.kernels.vector.vector_ops import (
    HeadNormBackward,
    NormGradients,
    VectorGradient,
    VectorOps,
)
from twinstream.models.kernel_costs.attributes import Attributes
from twinstream.schedule.ops import Mode


@dataclass(frozen=True)
class BlockGradients:
    """The gradients of the block's weights, and that of its output on the way to its input.

    Frozen weights have none: `by_name` is empty. Those of adapters are beside them.
    """

    by_name: Mapping[str, torch.Tensor]
    mode: Mode
    adapters: AdapterGradients
    d_hidden: torch.Tensor  # [T, D]

    @classmethod
    def of(cls, block: BlockOperands, attributes: Attributes) -> "BlockGradients":
        call, operands = block.call, block.operands
        adapters = AdapterGradients.of(block.adapters, operands, call, attributes)
        d_hidden = block.tokens_by_width("d_hidden")
        if call.frozen:
            return cls({}, "update", adapters, d_hidden)
        flat = operands["gradients"]
        by_name = gradient_views(flat, call.layout, attributes, block.calls)
        return cls(by_name, flat.mode, adapters, d_hidden)

    def needs(self, weight: str, site: str) -> bool:
        """Whether a gradient takes the input of a projection."""
        return weight in self.by_name or site in self.adapters.adapters.sites

    def add_matmul(self, name: str, d_out: torch.Tensor, x: torch.Tensor) -> None:
        """Add d_out^T @ x to the gradient of a projection."""
        if name in self.by_name:
            calls = self.adapters.adapters.calls
            calls.add(add_matmul, self.by_name[name], d_out.t(), x, self.mode)

    def vector(self, name: str) -> VectorGradient | None:
        """Where the gradient of a norm or a bias goes; None where that is frozen."""
        return VectorGradient(self.by_name[name], self.mode) if name in self.by_name else None


def block_backward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Turn the gradient of the output into that of the input; add the gradients of the weights.

    Frozen weights have no gradients; those of adapters are added likewise.

    A slice of a sequence also adds to the gradients of all K and V that it saw. Those of its own
    are then complete, because later slices ran before, and go on through the projections.
    """
    block = BlockOperands.of(operands, attributes, vector, calls)
    gradients = BlockGradients.of(block, attributes)
    with block.workspace.frame():
        if block.call.spec.experts is None:
            _ffn_backward(block, gradients)
        else:
            _experts_backward(block, gradients, ExpertGradients.of(block, attributes))
    spec = block.call.spec
    with block.workspace.frame():
        d_qkv_TN = block.take(spec.d_q + 2 * spec.d_kv)
        with block.workspace.frame():
            attention_backward(block, gradients, *block.q_and_kv(d_qkv_TN))
        _qkv_backward(block, gradients, d_qkv_TN)


def _ffn_backward(block: BlockOperands, gradients: BlockGradients) -> None:
    """From the output to x_o."""
    d_gate_up_T2F = block.take(2 * block.call.spec.d_ff)
    swiglu_backward(block, gradients, d_gate_up_T2F, None)
    normed_TD = block.take(block.call.spec.d_model)
    if gradients.needs("gate_up_proj", "gate_up"):
        block.calls.add(block.vector.write_normed, block.norm("ffn_norm"), normed_TD)
    gate_up_backward(block, gradients, d_gate_up_T2F, normed_TD, normed_TD)
    _norm_backward(block, gradients, "ffn_norm", normed_TD)


def gate_up_backward(
    block: BlockOperands, gradients: BlockGradients, d_gate_up_T2F: torch.Tensor,
    x_TD: torch.Tensor, out_TD: torch.Tensor,
) -> None:  # fmt: skip
    """Write the gradient of the input of gate and up, which may be where that is."""
    gradients.add_matmul("gate_up_proj", d_gate_up_T2F, x_TD)
    outputs = block.gate_and_up(d_gate_up_T2F)
    write_input_gradient(block, gradients, "gate_up", outputs, d_gate_up_T2F, x_TD, out_TD)


def _experts_backward(
    block: BlockOperands, gradients: BlockGradients, of_experts: ExpertGradients
) -> None:
    """From the output to x_o, through routed experts and the network that all tokens go through."""
    rows, width = RoutedRows.take(block), block.call.spec.d_model
    d_normed_TD, normed_TD = block.take(width), block.take(width)
    block.calls.add(block.vector.write_normed, block.norm("ffn_norm"), normed_TD)
    write_rows(block, rows, normed_TD)
    with block.workspace.frame():
        backward = ExpertsBackward(block, rows, of_experts, gradients.adapters)
        d_logits_TE = backward.run(gradients.d_hidden, normed_TD, d_normed_TD)
        _through_router(block, gradients, "router", d_logits_TE, normed_TD, d_normed_TD)
    if block.call.dense_width:
        d_gate_T1 = block.take(1)
        d_gate_up_T2F = block.take(2 * block.call.dense_width)
        gate = None if rows.shared is None else (rows.shared, d_gate_T1)
        swiglu_backward(block, gradients, d_gate_up_T2F, gate)
        if gate is not None:
            _through_router(block, gradients, "shared_gate", d_gate_T1, normed_TD, d_normed_TD)
        gate_up_backward(block, gradients, d_gate_up_T2F, normed_TD, normed_TD)
        block.calls.add(d_normed_TD.add_, normed_TD)
    _norm_backward(block, gradients, "ffn_norm", d_normed_TD)


def _through_router(
    block: BlockOperands, gradients: BlockGradients, name: str, d_out: torch.Tensor,
    normed_TD: torch.Tensor, d_normed_TD: torch.Tensor,
) -> None:  # fmt: skip
    """Add the gradients of a small matrix, and of the normed rows that it is multiplied with."""
    gradients.add_matmul(name, d_out, normed_TD)
    block.calls.add(torch.addmm, d_normed_TD, d_out, block.weights[name], out=d_normed_TD)


def _input_gradient(
    block: BlockOperands, gradients: BlockGradients, site: str,
    d_outputs: Mapping[str, torch.Tensor], d_out: torch.Tensor, x_TI: torch.Tensor,
) -> None:  # fmt: skip
    """Turn the input of a site into its gradient; add those of the site's adapters before."""
    write_input_gradient(block, gradients, site, d_outputs, d_out, x_TI, x_TI)


def write_input_gradient(  # noqa: PLR0913 - what a site has, and where its input's gradient goes
    block: BlockOperands, gradients: BlockGradients, site: str,
    d_outputs: Mapping[str, torch.Tensor], d_out: torch.Tensor, x_TI: torch.Tensor,
    out_TI: torch.Tensor,
) -> None:  # fmt: skip
    """The gradient of a site's input, which may be where that is; its adapters' are added first."""
    weight = block.matrix(f"{site}_proj")
    with block.workspace.frame():
        d_low = block.adapters.write_low_gradient(site, d_outputs, block.workspace)
        gradients.adapters.add(site, d_outputs, x_TI, d_low)
        block.adapters.input_gradient(site, d_low, d_out, weight, out_TI)


def swiglu_backward(
    block: BlockOperands, gradients: BlockGradients, d_gate_up_T2F: torch.Tensor,
    gate: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:  # fmt: skip
    """From the output to the gate and up projections.

    The product's gradient is the right half of theirs; the product is the left half, before that
    is overwritten, or has room of its own where it is made in the pass of the backward. With a
    `gate`, that each token's output is multiplied with, the gradient of its logit is written to the
    second of the two, and what is multiplied with it is weighed.
    """
    d_ff, vector, d_hidden = block.call.dense_width, block.vector, gradients.d_hidden
    product_TF, d_product_TF = d_gate_up_T2F[:, :d_ff], d_gate_up_T2F[:, d_ff:]
    weight, d_outputs = block.matrix("down_proj"), {"down": d_hidden}
    needs_product = gradients.needs("down_proj", "down")
    with block.workspace.frame():
        d_low = block.adapters.write_low_gradient("down", d_outputs, block.workspace)
        block.adapters.input_gradient("down", d_low, d_hidden, weight, d_product_TF)
        room_TF = None
        if gate is not None:
            block.calls.add(vector.write_swiglu, block.gate_up, product_TF)
            block.calls.add(weigh_by_gate, d_product_TF, product_TF, *gate)
        elif needs_product and vector.product_with_backward:
            product_TF = room_TF = block.take(d_ff)
            block.calls.add(vector.swiglu_backward, block.gate_up, d_gate_up_T2F, room_TF)
        elif needs_product:
            block.calls.add(vector.write_swiglu, block.gate_up, product_TF)
        if needs_product:
            gradients.add_matmul("down_proj", d_hidden, product_TF)
            block.adapters.write_low_again("down", product_TF)
            gradients.adapters.add("down", d_outputs, product_TF, d_low)
        if room_TF is None:
            block.calls.add(vector.swiglu_backward, block.gate_up, d_gate_up_T2F, None)


def attention_backward(
    block: BlockOperands, gradients: BlockGradients, d_q_TQ: torch.Tensor,
    d_kv_T2KE: torch.Tensor | None,
) -> None:  # fmt: skip
    """From x_o to the gradients of rotated Q, rotated K, and V, rounded to the block's dtype.

    Without `d_kv_T2KE` those of K and V are only added to the ones of all that was seen.
    """
    spec = block.call.spec
    d_out_TQ, rotated_TQ = block.take(spec.d_q), block.take(spec.d_q)
    output_backward(block, gradients, d_out_TQ)
    sums = context_gradient(block) if block.call.sliced else d_kv_T2KE
    assert sums is not None, "whole sequences have theirs at once"
    keys_backward(block, d_out_TQ, rotated_TQ, d_q_TQ, sums)
    if block.call.sliced and d_kv_T2KE is not None:
        block.calls.add(d_kv_T2KE.copy_, sums[block.call.chunk_start :])


def output_backward(
    block: BlockOperands, gradients: BlockGradients, d_out_TQ: torch.Tensor
) -> None:
    """From x_o to attention's output."""
    gradients.add_matmul("o_proj", gradients.d_hidden, block.attention_out)
    with block.workspace.frame():
        d_outputs, weight = {"o": gradients.d_hidden}, block.matrix("o_proj")
        d_low = block.adapters.write_low_gradient("o", d_outputs, block.workspace)
        block.adapters.write_low_again("o", block.attention_out)
        gradients.adapters.add("o", d_outputs, block.attention_out, d_low)
        block.adapters.input_gradient("o", d_low, gradients.d_hidden, weight, d_out_TQ)


def keys_backward(
    block: BlockOperands, d_out_TQ: torch.Tensor, rotated_TQ: torch.Tensor, d_q_TQ: torch.Tensor,
    sums: torch.Tensor,
) -> None:  # fmt: skip
    """From attention's output to rotated Q; the gradients of K and V are written, or added."""
    write_rotated_q(block, rotated_TQ)
    block.calls.add(
        attention_implementation(block.call.attention).backward,
        block.attention_inputs(rotated_TQ),
        block.attention_result,
        AttentionGradients(
            d_out=block.by_sequence(d_out_TQ),
            d_q=block.by_sequence(d_q_TQ),
            d_kv=torch.unflatten(sums, 0, (block.call.num_sequences, -1)),
            accumulate=block.call.sliced,
        ),
        block.workspace.remaining(),
    )


def context_gradient(block: BlockOperands) -> torch.Tensor:
    """Float32 gradients of all K and V seen, which later slices have added to already."""
    spec, operand = block.call.spec, block.operands["d_context"]
    sums = operand.view(torch.float32, (block.call.num_seen, 2, spec.num_kv_heads, spec.head_dim))
    if operand.mode == "write":
        block.calls.add(operand.bytes.zero_)
    return sums


def _qkv_backward(block: BlockOperands, gradients: BlockGradients, d_qkv_TN: torch.Tensor) -> None:
    """From rotated Q and K, and V, to the block's input."""
    normed_TD = qkv_gradients(block, gradients, d_qkv_TN)
    d_outputs = {name: d_qkv_TN[:, columns] for name, columns in block.qkv_columns.items()}
    _input_gradient(block, gradients, "qkv", d_outputs, d_qkv_TN, normed_TD)
    _norm_backward(block, gradients, "attention_norm", normed_TD)


def qkv_gradients(
    block: BlockOperands, gradients: BlockGradients, d_qkv_TN: torch.Tensor
) -> torch.Tensor:
    """Take the gradients of rotated Q and K back before RoPE, and add those of the weights.

    Returns:
        The normed input, [T, D], a temporary.
    """
    spec = block.call.spec
    normed_TD = block.take(spec.d_model)
    if spec.qk_norm or gradients.needs("qkv_proj", "qkv"):
        norm, eps = block.norm("attention_norm"), block.call.eps_again
        block.calls.add(block.vector.write_normed, norm, normed_TD, eps=eps)
        block.adapters.write_low_again("qkv", normed_TD)
    d_outputs = {name: d_qkv_TN[:, columns] for name, columns in block.qkv_columns.items()}
    k_TK = None
    if spec.qk_norm:
        k_TK = block.take(spec.d_kv)
        project(block, normed_TD, "k", k_TK)
    _head_backward(block, gradients, "q_norm", d_outputs["q"], block.q)
    _head_backward(block, gradients, "k_norm", d_outputs["k"], k_TK)
    if (bias := gradients.vector("qkv_bias")) is not None:
        block.calls.add(block.vector.add_column_sums, d_qkv_TN, bias, block.workspace.remaining())
    gradients.add_matmul("qkv_proj", d_qkv_TN, normed_TD)
    return normed_TD


def _head_backward(
    block: BlockOperands, gradients: BlockGradients, name: str, d_heads: torch.Tensor,
    before_norm: torch.Tensor | None,
) -> None:  # fmt: skip
    """Back through RoPE and, if there is one, through the norm of each head, in place."""
    norm, backward = block.head_norm(name), None
    if norm is not None and before_norm is not None:
        backward = HeadNormBackward(norm, block.by_head(before_norm), gradients.vector(name))
    d_THE, workspace = block.by_head(d_heads), block.workspace.remaining()
    block.calls.add(block.vector.rotated_backward, d_THE, block.rope, backward, workspace)


def _norm_backward(
    block: BlockOperands, gradients: BlockGradients, name: str, d_normed_TD: torch.Tensor
) -> None:
    """Add the gradient of a norm's input to the residual stream's."""
    block.calls.add(
        block.vector.rms_norm_backward,
        block.norm(name),
        NormGradients(d_normed_TD, gradients.d_hidden, gradients.vector(name), accumulate=True),
        block.workspace.remaining(),
    )
