"""Elementwise work in float32, block of rows by block of rows.

A block has at most 2**19 elements (or one row), so a float32 temporary that no operand declares
is at most 2 MiB; no kernel has more than eight of them alive.
"""

from collections.abc import Iterator

import torch

from twinstream.models.kernel_costs.scratch_sizes import BLOCK_ELEMENTS


def row_blocks(num_rows: int, width: int) -> Iterator[slice]:
    """Slices that cover all rows in order."""
    step = max(1, BLOCK_ELEMENTS // width)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def float32_copy(x: torch.Tensor) -> torch.Tensor:
    """A float32 copy that may be changed in place, even if x is float32 already."""
    return x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
