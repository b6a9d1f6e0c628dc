"""What a kernel is called with: bytes in an arena slot, and how it may use them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from twinstream.models.demand.attributes import Attributes
from twinstream.schedule.ops import Mode

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class KernelOperand:
    """The bytes of one operand, a 1-D uint8 view of a slot, and the mode of its use.

    `write`: the old content is garbage, possibly NaN, and every byte of the operand is
    overwritten. `update`: read, then overwritten.
    """

    bytes: torch.Tensor
    mode: Mode

    def view(
        self, dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int = 0
    ) -> torch.Tensor:
        """The dense row-major tensor that lies `offset_bytes` into the operand."""
        end_bytes = offset_bytes + prod(shape) * dtype.itemsize
        return self.bytes[offset_bytes:end_bytes].view(dtype).view(shape)


Operands = Mapping[str, KernelOperand]
Kernel = Callable[[Operands, Attributes], None]
