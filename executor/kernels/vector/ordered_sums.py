"""Sums of many float32 values in an order that follows from their number alone.

Values lie in rows of 1,024 lanes. Rows are added one after the other, lane by lane; then the second
half of the lanes is added to the first, until one is left. Squares of a long tensor are summed up
so in shares of 64 rows, and then the shares.
"""

import torch

from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.scratch_sizes import SUM_SHARE_ELEMENTS, sum_shares

LANES = 1024
_SHARES_AT_ONCE = 8  # 2 MiB in float32


def sum_squares(x_N: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> None:
    num_elements = x_N.numel()
    with workspace.frame():
        shares = workspace.take((sum_shares(num_elements),), torch.float32)
        square_shares(x_N, shares)
        sum_values(shares, out)


def square_shares(x_N: torch.Tensor, shares: torch.Tensor) -> None:
    for first in range(0, shares.numel(), _SHARES_AT_ONCE):
        start = first * SUM_SHARE_ELEMENTS
        values = x_N[start : start + _SHARES_AT_ONCE * SUM_SHARE_ELEMENTS].float()
        count = min(_SHARES_AT_ONCE, shares.numel() - first)
        each = values.numel() if count == 1 else SUM_SHARE_ELEMENTS
        shares[first : first + count] = _sums(values * values, count, each)


def sum_values(x_N: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_sums(x_N, 1, x_N.numel()))


def root_of_sum(x_N: torch.Tensor, out: torch.Tensor) -> None:
    """torch's float32 root is not correctly rounded on every CPU; float64's, rounded, is."""
    out.copy_(_sums(x_N, 1, x_N.numel()).double().sqrt())


def _sums(values: torch.Tensor, count: int, each: int) -> torch.Tensor:
    """[count] sums of `each` consecutive values; what lacks at the end counts as zero."""
    rows = -(-each // LANES)
    padded = values.new_zeros(count * rows * LANES)
    padded[: values.numel()] = values
    sums = values.new_zeros(count, LANES)
    for row in padded.view(count, rows, LANES).unbind(1):
        sums += row
    while (half := sums.shape[1] // 2) > 0:
        sums = sums[:, :half] + sums[:, half:]
    return sums.view(count)
