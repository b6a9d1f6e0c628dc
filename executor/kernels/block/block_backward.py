"""Backward of one dense block, by hand.

`d_hidden` comes in as the gradient of the block's output and is carried down the residual
stream in place, until it is the gradient of the block's input. Legend: T tokens, C tokens seen,
D d_model, Q width of all query heads, K key heads, E head_dim, F FFN width, N = Q + 2 K E.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from twinstream.executor.kernels.attention.implementation import AttentionGradients
from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.executor.kernels.block.block_forward import project, write_rotated_q
from twinstream.executor.kernels.block.block_operands import BlockOperands
from twinstream.executor.kernels.operand import Operands
from twinstream.executor.kernels.vector.gradients import add_matmul, gradient_views
from twinstream.executor.kernels.vector.vector_ops import (
    HeadNormBackward,
    NormGradients,
    VectorGradient,
    VectorOps,
)
from twinstream.models.demand.workspace import Attributes
from twinstream.schedule.ops import Mode


@dataclass(frozen=True)
class _Gradients:
    """The gradients of the block's weights, and that of its output on the way to its input."""

    by_name: Mapping[str, torch.Tensor]
    mode: Mode
    d_hidden: torch.Tensor  # [T, D]

    def add_matmul(self, name: str, d_out: torch.Tensor, x: torch.Tensor) -> None:
        """Add d_out^T @ x to the gradient of a projection."""
        add_matmul(self.by_name[name], d_out.t(), x, self.mode)

    def vector(self, name: str) -> VectorGradient:
        return VectorGradient(self.by_name[name], self.mode)


def block_backward(operands: Operands, attributes: Attributes, vector: VectorOps) -> None:
    """Turn the gradient of the output into that of the input; add the gradients of the weights.

    A slice of a sequence also adds to the gradients of all K and V that it saw. Those of its own
    are then complete, because later slices ran before, and go on through the projections.
    """
    block = BlockOperands.of(operands, attributes, vector)
    flat = operands["gradients"]
    gradients = _Gradients(
        by_name=gradient_views(flat, block.call.layout, attributes),
        mode=flat.mode,
        d_hidden=block.tokens_by_width("d_hidden"),
    )
    with block.workspace.frame():
        _ffn_backward(block, gradients)
    spec = block.call.spec
    with block.workspace.frame():
        d_qkv_TN = block.take(spec.d_q + 2 * spec.d_kv)
        with block.workspace.frame():
            _attention_backward(block, gradients, d_qkv_TN)
        _qkv_backward(block, gradients, d_qkv_TN)


def _ffn_backward(block: BlockOperands, gradients: _Gradients) -> None:
    """From the output to x_o."""
    d_gate_up_T2F = block.take(2 * block.call.spec.d_ff)
    _swiglu_backward(block, gradients, d_gate_up_T2F)
    normed_TD = block.take(block.call.spec.d_model)
    block.vector.write_normed(block.norm("ffn_norm"), normed_TD)
    gradients.add_matmul("gate_up_proj", d_gate_up_T2F, normed_TD)
    d_normed_TD = torch.mm(d_gate_up_T2F, block.weights["gate_up_proj"], out=normed_TD)
    _norm_backward(block, gradients, "ffn_norm", d_normed_TD)


def _swiglu_backward(
    block: BlockOperands, gradients: _Gradients, d_gate_up_T2F: torch.Tensor
) -> None:
    """From the output to the gate and up projections.

    The product's gradient is the right half of theirs; the product is the left half, before that
    is overwritten, or has room of its own where it is made in the pass of the backward.
    """
    d_ff, vector, d_hidden = block.call.spec.d_ff, block.vector, gradients.d_hidden
    product_TF, d_product_TF = d_gate_up_T2F[:, :d_ff], d_gate_up_T2F[:, d_ff:]
    if vector.product_with_backward:
        torch.mm(d_hidden, block.weights["down_proj"], out=d_product_TF)
        with block.workspace.frame():
            product_TF = block.take(d_ff)
            vector.swiglu_backward(block.gate_up, d_gate_up_T2F, product_TF)
            gradients.add_matmul("down_proj", d_hidden, product_TF)
        return
    vector.write_swiglu(block.gate_up, product_TF)
    gradients.add_matmul("down_proj", d_hidden, product_TF)
    torch.mm(d_hidden, block.weights["down_proj"], out=d_product_TF)
    vector.swiglu_backward(block.gate_up, d_gate_up_T2F, None)


def _attention_backward(
    block: BlockOperands, gradients: _Gradients, d_qkv_TN: torch.Tensor
) -> None:
    """From x_o to the gradients of rotated Q, rotated K, and V, rounded to the block's dtype."""
    spec = block.call.spec
    d_out_TQ, rotated_TQ = block.take(spec.d_q), block.take(spec.d_q)
    gradients.add_matmul("o_proj", gradients.d_hidden, block.attention_out)
    torch.mm(gradients.d_hidden, block.weights["o_proj"], out=d_out_TQ)
    write_rotated_q(block, rotated_TQ)
    d_kv_T2KE = torch.unflatten(d_qkv_TN[:, spec.d_q :], 1, (2, spec.num_kv_heads, spec.head_dim))
    sums = _context_gradient(block) if block.call.sliced else d_kv_T2KE
    backward = attention_implementation(block.call.attention).backward
    backward(
        block.attention_inputs(rotated_TQ),
        block.attention_result,
        AttentionGradients(
            d_out=block.by_sequence(d_out_TQ),
            d_q=block.by_sequence(d_qkv_TN[:, : spec.d_q]),
            d_kv=torch.unflatten(sums, 0, (block.call.num_sequences, -1)),
            accumulate=block.call.sliced,
        ),
        block.workspace,
    )
    if block.call.sliced:
        d_kv_T2KE.copy_(sums[block.call.chunk_start :])


def _context_gradient(block: BlockOperands) -> torch.Tensor:
    """Float32 gradients of all K and V seen, which later slices have added to already."""
    spec, operand = block.call.spec, block.operands["d_context"]
    num_seen = block.call.chunk_start + block.call.num_tokens
    sums = operand.view(torch.float32, (num_seen, 2, spec.num_kv_heads, spec.head_dim))
    if operand.mode == "write":
        operand.bytes.zero_()
    return sums


def _qkv_backward(block: BlockOperands, gradients: _Gradients, d_qkv_TN: torch.Tensor) -> None:
    """From rotated Q and K, and V, to the block's input."""
    spec = block.call.spec
    normed_TD = block.take(spec.d_model)
    block.vector.write_normed(block.norm("attention_norm"), normed_TD)
    q_columns, k_columns = slice(0, spec.d_q), slice(spec.d_q, spec.d_q + spec.d_kv)
    k_TK = None
    if spec.qk_norm:
        k_TK = block.take(spec.d_kv)
        project(block, normed_TD, k_columns, k_TK)
    _head_backward(block, gradients, "q_norm", d_qkv_TN[:, q_columns], block.q)
    _head_backward(block, gradients, "k_norm", d_qkv_TN[:, k_columns], k_TK)
    if spec.qkv_bias:
        block.vector.add_column_sums(d_qkv_TN, gradients.vector("qkv_bias"), block.workspace)
    gradients.add_matmul("qkv_proj", d_qkv_TN, normed_TD)
    d_normed_TD = torch.mm(d_qkv_TN, block.weights["qkv_proj"], out=normed_TD)
    _norm_backward(block, gradients, "attention_norm", d_normed_TD)


def _head_backward(
    block: BlockOperands, gradients: _Gradients, name: str, d_heads: torch.Tensor,
    before_norm: torch.Tensor | None,
) -> None:  # fmt: skip
    """Back through RoPE and, if there is one, through the norm of each head, in place."""
    norm, backward = block.head_norm(name), None
    if norm is not None and before_norm is not None:
        backward = HeadNormBackward(norm, block.by_head(before_norm), gradients.vector(name))
    d_THE = block.by_head(d_heads)
    block.vector.rotated_backward(d_THE, block.rope, backward, block.workspace)


def _norm_backward(
    block: BlockOperands, gradients: _Gradients, name: str, d_normed_TD: torch.Tensor
) -> None:
    """Add the gradient of a norm's input to the residual stream's."""
    block.vector.rms_norm_backward(
        block.norm(name),
        NormGradients(d_normed_TD, gradients.d_hidden, gradients.vector(name), accumulate=True),
        block.workspace,
    )
