"""Redo what a forward wrote and a plan did not keep, bit for bit."""

from twinstream.executor.kernels.block.block_forward import (
    write_attention,
    write_q,
    write_x_o_and_gate_up,
)
from twinstream.executor.kernels.block.block_operands import BlockOperands
from twinstream.executor.kernels.operand import Operands
from twinstream.executor.kernels.vector.vector_ops import VectorOps
from twinstream.models.demand.workspace import Attributes


def block_recompute_attention(
    operands: Operands, attributes: Attributes, vector: VectorOps
) -> None:
    """From level ATTENTION: write the projections."""
    block = BlockOperands.of(operands, attributes, vector, rotates=False)
    _rewrite_q(block)
    write_x_o_and_gate_up(block, eps=None)


def block_recompute_input(operands: Operands, attributes: Attributes, vector: VectorOps) -> None:
    """From level INPUT: write attention and the projections."""
    block = BlockOperands.of(operands, attributes, vector)
    _rewrite_q(block)
    write_attention(block)
    write_x_o_and_gate_up(block, eps=None)


def _rewrite_q(block: BlockOperands) -> None:
    with block.workspace.frame():
        normed = block.take(block.call.spec.d_model)
        block.vector.write_normed(block.norm("attention_norm"), normed)
        write_q(block, normed)
