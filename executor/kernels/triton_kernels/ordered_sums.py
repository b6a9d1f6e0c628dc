"""Sums in the order of the eager ones (`vector.ordered_sums`), bit by bit; no atomics.

The halves of the lanes are added as pairs, one pair at a time, so that the order is not left to the
compiler, nor to the number of warps.
"""

import torch
import triton
import triton.language as tl

from twinstream.executor.kernels.triton_kernels.launch import device_function, launch
from twinstream.executor.kernels.vector.ordered_sums import LANES
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.scratch_sizes import SUM_SHARE_ELEMENTS, sum_shares

_WARPS = 4  # 8 elements a thread: one load of 16 bytes of a bf16 row
_LEVELS = LANES.bit_length() - 1


def sum_squares(x_N: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> None:
    num_elements = x_N.numel()
    with workspace.frame():
        shares = workspace.take((sum_shares(num_elements),), torch.float32)
        square_shares(x_N, shares)
        sum_values(shares, out)


def square_shares(x_N: torch.Tensor, shares: torch.Tensor) -> None:
    _launch(x_N, shares, SUM_SHARE_ELEMENTS, square=True)


def sum_values(x_N: torch.Tensor, out: torch.Tensor) -> None:
    _launch(x_N, out, x_N.numel())


def root_of_sum(x_N: torch.Tensor, out: torch.Tensor) -> None:
    _launch(x_N, out, x_N.numel(), root=True)


def _launch(
    x_N: torch.Tensor, out: torch.Tensor, each: int, *, square: bool = False, root: bool = False
) -> None:
    """A program for every `each` values."""
    launch(
        _sums_kernel, (out.numel(),), x_N, out, x_N.numel(), each, SQUARE=square, ROOT=root,
        WIDTH=LANES, LEVELS=_LEVELS, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@device_function
def _sum_of_lanes(sums, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """[1]"""
    for level in tl.static_range(LEVELS):
        sums = tl.sum(tl.reshape(sums, [2, WIDTH >> (level + 1)]), axis=0)
    return sums


@triton.jit
def _sums_kernel(
    x_ptr, out_ptr, num_elements, each, SQUARE: tl.constexpr, ROOT: tl.constexpr,
    WIDTH: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    first = program * each
    end = tl.minimum(first + each, num_elements)
    sums = tl.zeros([WIDTH], dtype=tl.float32)
    for row in range(0, tl.cdiv(each, WIDTH)):
        index = first + row * WIDTH + tl.arange(0, WIDTH)
        values = tl.load(x_ptr + index, mask=index < end, other=0.0).to(tl.float32)
        if SQUARE:
            values = values * values
        sums += values
    total = _sum_of_lanes(sums, WIDTH, LEVELS)
    if ROOT:
        total = tl.sqrt_rn(total)
    tl.store(out_ptr + program + tl.arange(0, 1), total)
