"""AdamW as a kernel of a task."""

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.operand import DTYPES, Operands
from twinstream.executor.kernels.vector.updates import AdamwConstants, flat_update
from twinstream.executor.kernels.vector.vector_ops import VectorOps
from twinstream.models.kernel_costs.attributes import (
    Attributes,
    optimizer_state,
    typed_attribute,
)
from twinstream.models.kernel_costs.scratch_sizes import code_blocks


def adamw_step(operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls) -> None:
    """Update parameters, m and v as torch.optim.AdamW does, in float32 math.

    Learning rate, decay, bias corrections, step and seed come from `step_state`, on the device.
    With a float32 master, m and v are float32 too. An 8-bit state is the codes of m, those of v,
    and their scales.
    """
    count, state = typed_attribute(attributes, "num_elements", int), operands["state"]
    match optimizer_state(attributes):
        case "model":
            dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
            m, v = state.view(dtype, (2, count))
            flat = flat_update(operands, attributes, (m, v))
        case "float32_master":
            m, v, master = state.view(torch.float32, (3, count))
            flat = flat_update(operands, attributes, (m, v), master)
        case "8bit":
            m, v = state.view(torch.uint8, (2, count))
            scales = state.view(torch.float32, (2, code_blocks(count)), 2 * count)
            flat = flat_update(operands, attributes, (m, v), scales=tuple(scales))
    calls.add(vector.adamw, flat, adamw_constants(attributes))


def adamw_constants(attributes: Attributes) -> AdamwConstants:
    """Return the constants that a call states."""
    return AdamwConstants(
        *(typed_attribute(attributes, n, float) for n in ("beta1", "beta2", "eps"))
    )
