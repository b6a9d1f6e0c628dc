"""The parts of a block: attention of some heads, some columns of the feed-forward network.

Each norms its input anew, and writes its piece of a sum over all parts: of the output, or of the
gradient of the normed input. Behind the latter are the part's gradients of the norms that all heads
of Q and of K share, unless there is an operand to add these to. Legend as in `block_operands`; P
elements of a piece.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from twinstream.executor.kernels.attention.implementation import AttentionResult
from twinstream.executor.kernels.attention.returning import merge
from twinstream.executor.kernels.block.adapters import AdapterGradients
from twinstream.executor.kernels.block.block_backward import (
    BlockGradients,
    attention_backward,
    context_gradient,
    gate_up_backward,
    keys_backward,
    output_backward,
    qkv_gradients,
    swiglu_backward,
    write_input_gradient,
)
from twinstream.executor.kernels.block.block_forward import (
    add_product,
    rewrite_q,
    rows_again,
    write_attention,
    write_kv,
    write_output,
    write_projections,
    write_q,
)
from twinstream.executor.kernels.block.block_operands import BlockOperands
from twinstream.executor.kernels.block.experts_backward import ExpertGradients
from twinstream.executor.kernels.block.experts_forward import (
    RoutedRows,
    write_expert_gate_up,
    write_rows,
)
from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.operand import KernelOperand, Operands
from twinstream.executor.kernels.parts.expert_parts import experts_part_backward
from twinstream.executor.kernels.vector.gradients import gradient_views
from twinstream.executor.kernels.vector.vector_ops import VectorGradient, VectorOps
from twinstream.models.kernel_costs.attributes import Attributes, typed_attribute
from twinstream.models.layout import qk_norm_widths, shared_layout

_ATTENTION = frozenset({"qkv_proj", "qkv_bias", "o_proj"})
_MLP = frozenset({"gate_up_proj", "down_proj"})


def attention_part_forward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write K and V, attention and Q of some heads, and their piece of the output projection.

    Without `kv` those of all heads' context are there already, the chunk's own among them.
    """
    block = BlockOperands.of(operands, attributes, vector, calls)
    with block.workspace.frame():
        normed = _normed(block, "attention_norm")
        block.adapters.write_low("qkv", normed)
        write_q(block, normed)
        if "kv" in operands:
            write_kv(block, normed)
    write_attention(block)
    _write_piece(block, "o", block.attention_out)


def kv_part_forward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write K and V of some heads alone."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    with block.workspace.frame():
        normed = _normed(block, "attention_norm")
        block.adapters.write_low("qkv", normed)
        write_kv(block, normed)


def attention_part_recompute(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write attention and Q again, from the saved K and V."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    rewrite_q(block)
    write_attention(block)


def mlp_part_forward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write some columns of gate and up, of every expert, too; and what they add to the output.

    With experts the first part of a rank chooses where rows go.
    """
    block = BlockOperands.of(operands, attributes, vector, calls)
    rows = _write_gate_up(block)
    write_output(block, rows, None, _piece(block))


def mlp_part_dispatch_forward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write rows for experts that ranks share, and some columns of gate and up of all tokens."""
    _write_gate_up(BlockOperands.of(operands, attributes, vector, calls))


def mlp_part_combine_forward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the piece of what columns of experts on other ranks have made of the rows."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    write_output(block, rows_again(block), None, _piece(block))


def experts_part_recompute(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write gate and up of experts again."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    rows, normed = RoutedRows.take(block), _normed(block, "ffn_norm")
    write_rows(block, rows, normed)
    write_expert_gate_up(block, rows, normed)


def mlp_part_recompute(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write gate and up again."""
    _write_gate_up(BlockOperands.of(operands, attributes, vector, calls))


def attention_part_backward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Add the gradients of the part's weights; write its piece of the normed input's gradient."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    spec = block.call.spec
    piece, heads = _piece(block), _head_norms(block, attributes)
    gradients = _PartGradients.of_part(block, attributes, _ATTENTION, heads)
    gradients.adapters.begin(frozenset({"qkv", "o"}))
    d_qkv_TN = block.take(spec.d_q + 2 * spec.d_kv)
    with block.workspace.frame():
        attention_backward(block, gradients, *block.q_and_kv(d_qkv_TN))
    with block.workspace.frame():
        _qkv_backward(block, gradients, d_qkv_TN, piece)


def context_part_backward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the gradient of rotated Q; add those of all K and V seen, and of the output's weight.

    What other ranks add to the gradients of the chunk's own K and V is added up before
    `qkv_part_backward`.
    """
    block = BlockOperands.of(operands, attributes, vector, calls)
    gradients = _PartGradients.of_part(block, attributes, frozenset({"o_proj"}), {})
    gradients.adapters.begin(frozenset({"o"}))
    attention_backward(block, gradients, _by_heads(block, "d_q"), None)


def q_part_recompute(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write Q again."""
    rewrite_q(BlockOperands.of(operands, attributes, vector, calls))


def ring_part_forward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Attend to a block of keys that has come, and merge that with attention so far.

    Ranks whose chunk comes before all keys of the block have nothing to do.
    """
    block = BlockOperands.of(operands, attributes, vector, calls)
    if not block.call.num_seen:
        return
    with block.workspace.frame():
        so_far = block.attention_result
        out_TQ = block.take(block.call.spec.d_q)
        lse = block.workspace.take(tuple(so_far.lse.shape), torch.float32)
        found = AttentionResult(block.by_sequence(out_TQ), lse)
        write_attention(block, found)
        calls.add(merge, so_far, found, so_far, block.workspace.remaining())


def output_part_forward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the heads' piece of the output projection."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    _write_piece(block, "o", block.attention_out)


def output_part_backward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the gradient of attention's output; add that of the output's weight."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    gradients = _PartGradients.of_part(block, attributes, frozenset({"o_proj"}), {})
    gradients.adapters.begin(frozenset({"o"}))
    output_backward(block, gradients, _by_heads(block, "d_attention"))


def ring_part_backward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Add the gradients of rotated Q, and of a block's K and V, that follow from that block."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    sums = context_gradient(block)
    if not block.call.num_seen:
        return
    d_q_TQ, width = _by_heads(block, "d_q"), block.call.spec.d_q
    rotated_TQ, own_TQ = block.take(width), d_q_TQ
    if not block.call.causal:
        own_TQ = block.take(width)
    keys_backward(block, _by_heads(block, "d_attention"), rotated_TQ, own_TQ, sums)
    if own_TQ is not d_q_TQ:
        calls.add(d_q_TQ.add_, own_TQ)


def qkv_part_backward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """From the gradients of rotated Q, K and V to those of their weights, and to the piece."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    spec = block.call.spec
    piece, heads = _piece(block), _head_norms(block, attributes)
    gradients = _PartGradients.of_part(block, attributes, _ATTENTION, heads, piece)
    gradients.adapters.begin(frozenset({"qkv"}))
    d_qkv_TN = block.take(spec.d_q + 2 * spec.d_kv)
    d_q_TQ, d_kv_T2KE = block.q_and_kv(d_qkv_TN)
    row = 2 * spec.d_kv * torch.float32.itemsize
    start_bytes = typed_attribute(attributes, "kv_start", int) * row
    sums = operands["d_kv"].view(torch.float32, tuple(d_kv_T2KE.shape), start_bytes)
    calls.add(d_q_TQ.copy_, _by_heads(block, "d_q"))
    calls.add(d_kv_T2KE.copy_, sums)
    with block.workspace.frame():
        _qkv_backward(block, gradients, d_qkv_TN, piece)


def _qkv_backward(
    block: BlockOperands, gradients: BlockGradients, d_qkv_TN: torch.Tensor, piece: torch.Tensor
) -> None:
    normed = qkv_gradients(block, gradients, d_qkv_TN)
    d_outputs = {name: d_qkv_TN[:, columns] for name, columns in block.qkv_columns.items()}
    write_input_gradient(block, gradients, "qkv", d_outputs, d_qkv_TN, normed, piece)


def mlp_part_backward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """The same of the feed-forward network."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    piece, gradients = _piece(block), _PartGradients.of_part(block, attributes, _MLP, {})
    gradients.adapters.begin(frozenset({"gate_up", "down", *block.adapters.expert_sites}))
    if block.call.spec.experts is not None:
        of_experts = ExpertGradients.of(block, attributes)
        experts_part_backward(block, gradients, of_experts, piece, _behind_heads(block))
        return
    d_gate_up_T2F = block.take(2 * block.call.spec.d_ff)
    swiglu_backward(block, gradients, d_gate_up_T2F, None)
    with block.workspace.frame():
        normed = block.take(block.call.spec.d_model)
        if gradients.needs("gate_up_proj", "gate_up"):
            norm, eps = block.norm("ffn_norm"), block.call.eps_again
            calls.add(vector.write_normed, norm, normed, eps=eps)
            block.adapters.write_low_again("gate_up", normed)
        gate_up_backward(block, gradients, d_gate_up_T2F, normed, piece)


@dataclass(frozen=True)
class _PartGradients(BlockGradients):
    """Those of a part's weights; of norms that heads share each part writes its own by itself."""

    heads: Mapping[str, VectorGradient] = field(default_factory=dict)

    @classmethod
    def of_part(
        cls, block: BlockOperands, attributes: Attributes, made: frozenset[str],
        heads: Mapping[str, VectorGradient], d_hidden: torch.Tensor | None = None,
    ) -> "_PartGradients":  # fmt: skip
        """Of the weights whose gradients are `made` here; those of others begin at zero."""
        adapters = AdapterGradients.of(block.adapters, block.operands, block.call, attributes)
        if d_hidden is None:
            d_hidden = block.tokens_by_width("d_hidden")
        if block.call.frozen or "gradients" not in block.operands:
            return cls({}, "update", adapters, d_hidden)
        flat = block.operands["gradients"]
        by_name = gradient_views(flat, block.call.layout, attributes, block.calls)
        if flat.mode == "write":  # another kernel adds its own
            for name in sorted(by_name.keys() - made):
                block.calls.add(by_name[name].zero_)
        return cls(by_name, flat.mode, adapters, d_hidden, heads)

    def vector(self, name: str) -> VectorGradient | None:
        if name in self.heads:
            return self.heads[name]
        return super().vector(name)


def _write_gate_up(block: BlockOperands) -> RoutedRows | None:
    """Return where rows go, of a part that has experts or sends rows to them."""
    sends_or_has = "rows" in block.operands or block.call.ep == 1
    rows = RoutedRows.take(block) if block.call.spec.experts and sends_or_has else None
    with block.workspace.frame():
        write_projections(block, rows, _normed(block, "ffn_norm"), is_forward=True)
    return rows


def _write_piece(block: BlockOperands, site: str, x_TI: torch.Tensor) -> None:
    """A part's share of the output of a projection whose input is in parts."""
    piece = _piece(block)
    block.adapters.write_low(site, x_TI)
    has_share = block.adapters.write_shares(site, [(site, piece)])
    add_product(block, x_TI, f"{site}_proj", piece, has_share=has_share)


def _normed(block: BlockOperands, name: str) -> torch.Tensor:
    normed = block.take(block.call.spec.d_model)
    block.calls.add(block.vector.write_normed, block.norm(name), normed, eps=block.call.eps_again)
    return normed


def _by_heads(block: BlockOperands, operand: str) -> torch.Tensor:
    """A [T, Q] operand."""
    shape = (block.call.num_tokens, block.call.spec.d_q)
    return block.operands[operand].view(block.call.dtype, shape)


def _piece(block: BlockOperands) -> torch.Tensor:
    """[T, D]; what is behind it is zero until somebody writes it."""
    operand = block.operands["output"]
    piece = block.tokens_by_width("output")
    if (behind := _behind(operand, piece)).numel():
        block.calls.add(behind.zero_)
    return piece


def _head_norms(block: BlockOperands, attributes: Attributes) -> dict[str, VectorGradient]:
    """Where the gradients of q_norm and of k_norm go: behind a piece, or added to the part's."""
    spec, widths = block.call.spec, qk_norm_widths(block.call.spec)
    if not widths or block.call.frozen:
        return {}
    if (shared := block.operands.get("shared_gradients")) is not None:
        assert shared.mode == "update", "the norm before the feed-forward network began it"
        layout = shared_layout(spec)
        by_name = gradient_views(shared, layout, attributes, block.calls)
        return {name: VectorGradient(by_name[name], "update") for name in widths}
    both = torch.split(_behind_piece(block)[: sum(widths.values())], list(widths.values()))
    return {name: VectorGradient(one, "write") for name, one in zip(widths, both, strict=True)}


def _behind_piece(block: BlockOperands) -> torch.Tensor:
    behind = _behind(block.operands["output"], block.tokens_by_width("output"))
    return behind.view(block.call.dtype)


def _behind_heads(block: BlockOperands) -> torch.Tensor:
    """Room for a part's shares of routes' gradients."""
    return _behind_piece(block)[sum(qk_norm_widths(block.call.spec).values()) :]


def _behind(operand: KernelOperand, piece: torch.Tensor) -> torch.Tensor:
    return operand.bytes[piece.numel() * piece.dtype.itemsize :]
