"""Sums in rank order: the same bits on any transport, whichever rank adds up which elements.

Of each element, what the ranks have is added up in float32, the first two first, then the third,
and rounded once to the tensor's type. Pairwise, neighbours are added up two by two, and the sums of
these likewise, each rounded to the tensor's type: so one rank can add up what two have before, by
sums of two tensors. A shard of a reduce_scatter has the bits that it has in an all_reduce.
"""

from dataclasses import dataclass

import torch

from twinstream.schedule.errors import TwinstreamError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ALIGNMENT = 256


class ReductionError(TwinstreamError):
    """A tensor of a type that is not added up in float32."""


def summed_dtype(op_id: str, tensor: str, dtype: str) -> torch.dtype:
    """
    Raises:
        ReductionError: it is not one that is added up.
    """
    if dtype not in DTYPES:
        raise ReductionError(
            f"op '{op_id}' is to sum '{tensor}' of {dtype}; what can be summed is "
            f"{', '.join(DTYPES)}"
        )
    return DTYPES[dtype]


@dataclass(frozen=True)
class Sum:
    """Adds up what each of `num_ranks` has of `num_elements`, in scratch memory given once."""

    num_elements: int
    num_ranks: int
    dtype: torch.dtype
    pairwise: bool = False

    @property
    def scratch_bytes(self) -> int:
        return sum(_aligned(size) for size in self._sizes())

    @property
    def pieces_bytes(self) -> int:
        """Return the bytes of the pieces of all ranks together."""
        return self._sizes()[0]

    def _sizes(self) -> tuple[int, int, int]:
        """Of all pieces, the sum, and one piece in float32."""
        if self.pairwise:
            return self.num_ranks * self.num_elements * self.dtype.itemsize, 0, 0
        wide = 0 if self.dtype == torch.float32 else 4 * self.num_elements
        pieces = self.num_ranks * self.num_elements * self.dtype.itemsize
        return pieces, 4 * self.num_elements, wide

    def pieces(self, scratch: torch.Tensor) -> torch.Tensor:
        """Return the part of `scratch` for the pieces of all ranks, in rank order, 1-D uint8."""
        return scratch[: self.pieces_bytes]

    def add(self, scratch: torch.Tensor, result: torch.Tensor) -> None:
        """The sum of the pieces into `result`, 1-D of the tensor's type."""
        pieces = self.pieces(scratch).view(self.dtype).view(self.num_ranks, self.num_elements)
        if self.pairwise:
            _add_pairwise(pieces)
            result.copy_(pieces[0])
            return
        begin = _aligned(self._sizes()[0])
        size = 4 * self.num_elements
        total = scratch[begin : begin + size].view(torch.float32)
        total.copy_(pieces[0])
        if self.dtype == torch.float32:
            for piece in pieces[1:]:
                total.add_(piece)
        else:  # torch would allocate a float32 copy of each piece
            begin += _aligned(size)
            wide = scratch[begin : begin + size].view(torch.float32)
            for piece in pieces[1:]:
                total.add_(wide.copy_(piece))
        result.copy_(total)


def _add_pairwise(pieces: torch.Tensor) -> None:
    """The sum of all pieces into the first."""
    apart = 1
    while apart < len(pieces):
        for place in range(0, len(pieces) - apart, 2 * apart):
            pieces[place].add_(pieces[place + apart])
        apart *= 2


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
