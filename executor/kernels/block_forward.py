"""Forward of one dense block, in steps that the recompute kernels share.

Recomputed bytes equal the forward's because they come from the same calls on the same shapes.
"""

import torch

from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.executor.kernels.block_operands import BlockOperands
from twinstream.executor.kernels.operand import Operands
from twinstream.executor.kernels.query_key import write_rotated
from twinstream.executor.kernels.rms_norm import write_normed, write_rstd
from twinstream.executor.kernels.swiglu import write_swiglu
from twinstream.models.workspace import Attributes


def block_forward(operands: Operands, attributes: Attributes) -> None:
    """Write the block's output and all that a backward of any level needs."""
    block = BlockOperands.of(operands, attributes)
    spec = block.call.spec
    write_rstd(block.tokens_by_width("hidden"), spec.norm_eps, block.norms[0])
    with block.workspace.frame():
        normed = block.take(spec.d_model)
        write_normed(block.norm("attention_norm"), normed)
        write_q(block, normed)
        _write_kv(block, normed)
    write_attention(block)
    write_x_o(block)
    write_rstd(block.x_o, spec.norm_eps, block.norms[1])
    write_gate_up(block)
    with block.workspace.frame():
        product = block.take(spec.d_ff)
        write_swiglu(block.gate_up, product)
        output = block.tokens_by_width("output")
        torch.addmm(block.x_o, product, block.weights["down_proj"].t(), out=output)


def write_q(block: BlockOperands, normed_TD: torch.Tensor) -> None:
    """Q as projected, with its bias, before q_norm and RoPE."""
    project(block, normed_TD, slice(0, block.call.spec.d_q), block.q)


def write_attention(block: BlockOperands) -> None:
    """Attention's output and log-sum-exp, from Q and from the saved K and V."""
    with block.workspace.frame():
        rotated = block.take(block.call.spec.d_q)
        write_rotated_q(block, rotated)
        forward = attention_implementation(block.call.attention).forward
        forward(block.attention_inputs(rotated), block.attention_result, block.workspace)


def write_rotated_q(block: BlockOperands, out_TQ: torch.Tensor) -> None:
    """Q as attention takes it."""
    norm, rope = block.head_norm("q_norm"), block.call.rope
    write_rotated(block.by_head(block.q), norm, rope, block.by_head(out_TQ))


def write_x_o(block: BlockOperands) -> None:
    """The residual stream after attention."""
    hidden, o_proj = block.tokens_by_width("hidden"), block.weights["o_proj"]
    torch.addmm(hidden, block.attention_out, o_proj.t(), out=block.x_o)


def write_gate_up(block: BlockOperands) -> None:
    """Gate and up projections of the normed x_o; its rstd is there already."""
    with block.workspace.frame():
        normed = block.take(block.call.spec.d_model)
        write_normed(block.norm("ffn_norm"), normed)
        torch.mm(normed, block.weights["gate_up_proj"].t(), out=block.gate_up)


def project(block: BlockOperands, normed_TD: torch.Tensor, rows: slice, out: torch.Tensor) -> None:
    """Apply some rows of qkv_proj and of its bias."""
    weight = block.weights["qkv_proj"][rows].t()
    if block.call.spec.qkv_bias:
        torch.addmm(block.weights["qkv_bias"][rows], normed_TD, weight, out=out)
    else:
        torch.mm(normed_TD, weight, out=out)


def _write_kv(block: BlockOperands, normed_TD: torch.Tensor) -> None:
    kv = block.kv
    project(block, normed_TD, slice(block.call.spec.d_q, None), kv.flatten(1))
    keys = kv[:, 0]
    write_rotated(keys, block.head_norm("k_norm"), block.call.rope, keys)
