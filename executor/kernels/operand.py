"""The operands of a kernel: bytes in an arena slot, and how the kernel may use them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.models.kernel_costs.attributes import Attributes, typed_attribute
from twinstream.schedule.ops import Mode

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Pack:
    """Packed sequences of any lengths: tokens of the longest, and how many."""

    longest: int
    count: int


@dataclass(frozen=True)
class KernelOperand:
    """The bytes of one operand, a 1-D uint8 view of a slot, and the mode of its use.

    `write`: the old content is garbage, possibly NaN, and every byte of the operand is
    overwritten. `update`: read, then overwritten. `packs` has what the host knows, when a call is
    enqueued, of the packed sequences at an address. `version` counts the contents of the tensor in
    a step, from 1.
    """

    bytes: torch.Tensor
    mode: Mode
    packs: Mapping[int, "Pack"] = field(default_factory=dict)
    version: int = 1

    def pack(self) -> "Pack | None":
        """Of the sequences whose starts the operand is, once they have been fed."""
        return self.packs.get(self.bytes.data_ptr())

    def view(
        self, dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int = 0
    ) -> torch.Tensor:
        """The dense row-major tensor that lies `offset_bytes` into the operand."""
        end_bytes = offset_bytes + prod(shape) * dtype.itemsize
        return self.bytes[offset_bytes:end_bytes].view(dtype).view(shape)


Operands = Mapping[str, KernelOperand]
Kernel = Callable[[Operands, Attributes], Calls]
"""It touches no operand yet: its calls do, as often as they are carried out."""


def shard_of(
    name: str, operands: Operands, attributes: Attributes, dtype: torch.dtype
) -> torch.Tensor:
    """An operand's elements that a call is about: all, or a shard of a whole group."""
    num_elements = typed_attribute(attributes, "num_elements", int)
    offset = 0
    if name in str(attributes.get("whole_operands", "")).split():
        offset = typed_attribute(attributes, "element_offset", int)
    return operands[name].view(dtype, (num_elements,), offset * dtype.itemsize)
