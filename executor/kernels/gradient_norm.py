"""Sums over whole gradients: of one and another, or of pieces; and the norm of all, by which they
are clipped.

The norm is of squares by group, then the root.
"""

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.operand import DTYPES, Operands, shard_of
from twinstream.executor.kernels.parts.sums import write_sum
from twinstream.executor.kernels.vector.row_blocks import row_blocks
from twinstream.executor.kernels.vector.vector_ops import VectorOps
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attributes import Attributes, typed_attribute
from twinstream.models.kernel_costs.scratch_sizes import sum_shares


def gradient_squares(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the sum of squares of a flat gradient, whose padding is zero."""
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    num_elements = typed_attribute(attributes, "num_elements", int)
    calls.add(
        vector.sum_squares,
        operands["gradients"].view(dtype, (num_elements,)),
        operands["squares"].view(torch.float32, (1,)),
        Workspace(operands["scratch"].bytes),
    )


def shard_squares(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the sums of squares of the stretches of a shard of a gradient, which are whole ones."""
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    num_elements = typed_attribute(attributes, "num_elements", int)
    calls.add(
        vector.square_shares,
        shard_of("gradients", operands, attributes, dtype),
        operands["squares"].view(torch.float32, (sum_shares(num_elements),)),
    )


def sum_squares(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the sum of what `shard_squares` made of all shards, as `gradient_squares` has it."""
    num_values = typed_attribute(attributes, "num_values", int)
    calls.add(
        vector.sum_values,
        operands["values"].view(torch.float32, (num_values,)),
        operands["squares"].view(torch.float32, (1,)),
    )


def add_gradients(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Add one flat gradient to another, each sum rounded once."""
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    shape = (typed_attribute(attributes, "num_elements", int),)
    sums = operands["sum"].view(dtype, shape)
    calls.add(sums.add_, operands["gradients"].view(dtype, shape))


def sum_pieces(operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls) -> None:
    """Write the sum of pieces of a gradient, in their order and in float32, rounded once; or
    `pairwise`, neighbours first, each sum rounded."""
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    num_elements, num_pieces = (
        typed_attribute(attributes, name, int) for name in ("num_elements", "num_pieces")
    )
    pieces_PN = operands["pieces"].view(dtype, (num_pieces, num_elements))
    sum_N = operands["gradients"].view(dtype, (num_elements,))
    calls.add(operands["gradients"].bytes[sum_N.nbytes :].zero_)  # padding of shards
    if "pairwise" in attributes:
        calls.add(_write_pairwise, pieces_PN, sum_N)
    else:
        calls.add(write_sum, pieces_PN.unsqueeze(2), None, sum_N.unsqueeze(1))


def _write_pairwise(pieces_PN: torch.Tensor, out_N: torch.Tensor) -> None:
    for rows in row_blocks(len(out_N), len(pieces_PN)):
        sums = list(pieces_PN[:, rows])
        while len(sums) > 1:
            sums = [torch.add(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
        out_N[rows].copy_(sums[0])


def no_squares(operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls) -> None:
    """Write zeros: the groups are those of others."""
    calls.add(operands["squares"].bytes.zero_)


def gradient_norm(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write the square root of the sum over all groups."""
    num_groups = typed_attribute(attributes, "num_groups", int)
    calls.add(
        vector.root_of_sum,
        operands["squares"].view(torch.float32, (num_groups,)),
        operands["norm"].view(torch.float32, (1,)),
    )
