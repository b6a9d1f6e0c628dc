"""Sums in a fixed order: right, and the same bits by Triton's kernels as by torch ops."""

import math

import numpy as np
import pytest
import torch

from tests.executor.kernels.driver import run
from tests.executor.kernels.twins import DTYPES, assert_twins_agree, randn
from twinstream.models.kernel_costs.scratch_sizes import SUM_SHARE_ELEMENTS

COUNTS = (1, 3, 1024, 1025, 5000, SUM_SHARE_ELEMENTS + 7, 9 * SUM_SHARE_ELEMENTS + 1)


def squares_of(flat):
    out = torch.empty(1)
    attributes = {"dtype": str(flat.dtype).removeprefix("torch."), "num_elements": flat.numel()}
    operands = {
        "gradients": (flat.view(torch.uint8), "read"),
        "squares": (out.view(torch.uint8), "write"),
    }
    run("gradient_squares", attributes, operands)
    return out


def norm_of(squares):
    out = torch.empty(1)
    operands = {
        "squares": (squares.view(torch.uint8), "read"),
        "norm": (out.view(torch.uint8), "write"),
    }
    run("gradient_norm", {"num_groups": squares.numel()}, operands)
    return out.item()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_a_sum_of_squares_is_within_a_few_roundings(dtype, count):
    """64 rows, 10 halvings, as many rows and halvings of shares: errors mostly cancel."""
    flat = randn(count, dtype=dtype)
    exact = flat.double().square().sum().item()
    assert squares_of(flat).item() == pytest.approx(exact, rel=4 * 2**-24)


def test_the_order_is_the_one_that_is_told():
    """Against the same order in numpy, one float32 addition after the other."""
    flat = randn(3 * 1024 + 5)
    lanes = np.zeros(1024, dtype=np.float32)
    for start in range(0, flat.numel(), 1024):
        row = flat[start : start + 1024].numpy()
        lanes[: row.size] += row * row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    assert squares_of(flat).item() == lanes.item()


def test_the_norm_is_the_root_of_the_sum():
    assert norm_of(torch.tensor([9.0, 0.0, 16.0])) == 5.0
    assert norm_of(torch.tensor([2.0])) == np.sqrt(np.float32(2.0))
    assert norm_of(torch.full((35,), 2.0)) == np.sqrt(np.float32(70.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_the_norm(bad):
    flat = randn(3000)
    flat[2999] = -bad
    squares = torch.cat([squares_of(flat), torch.ones(2)])
    assert norm_of(squares) == pytest.approx(bad, nan_ok=True)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("count", [1, 1025, 3 * 1024, SUM_SHARE_ELEMENTS + 7])
def test_triton_has_the_same_bits(triton_device, dtype, count):
    operands = randn(count, dtype=dtype), torch.empty(1)

    def call(ops, workspace, x_N, out):
        ops.sum_squares(x_N, out, workspace)

    def results(x_N, out):
        return {"sum": out}

    assert_twins_agree(triton_device, call, *operands, results=results, exact=("sum",))


@pytest.mark.parametrize("count", [1, 35, 2000])
def test_tritons_root_has_the_same_bits(triton_device, count):
    operands = randn(count).abs(), torch.empty(1)

    def call(ops, workspace, x_N, out):
        ops.root_of_sum(x_N, out)

    def results(x_N, out):
        return {"root": out}

    assert_twins_agree(triton_device, call, *operands, results=results, exact=("root",))
