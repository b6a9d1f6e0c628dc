"""The norm of all gradients, by which they are clipped: squares by group, then the root."""

import torch

from twinstream.executor.kernels.operand import DTYPES, Operands
from twinstream.executor.kernels.vector.vector_ops import VectorOps
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.demand.attributes import Attributes, typed_attribute


def gradient_squares(operands: Operands, attributes: Attributes, vector: VectorOps) -> None:
    """Write the sum of squares of a flat gradient, whose padding is zero."""
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    num_elements = typed_attribute(attributes, "num_elements", int)
    vector.sum_squares(
        operands["gradients"].view(dtype, (num_elements,)),
        operands["squares"].view(torch.float32, (1,)),
        Workspace(operands["scratch"].bytes),
    )


def gradient_norm(operands: Operands, attributes: Attributes, vector: VectorOps) -> None:
    """Write the square root of the sum over all groups."""
    num_groups = typed_attribute(attributes, "num_groups", int)
    vector.root_of_sum(
        operands["squares"].view(torch.float32, (num_groups,)),
        operands["norm"].view(torch.float32, (1,)),
    )
