"""Matmuls that only CUDA has: float32 gradients of bf16 factors, added in place."""

import pytest
import torch

from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.runs import assert_same_bits, run
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.kernels.vector.gradients import add_matmul
from twinstream.executor.run.execute import RunOptions
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.document import Caps

pytestmark = pytest.mark.gpu


def randn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().cuda()


@pytest.mark.parametrize("mode", ["write", "update"])
@pytest.mark.parametrize("sizes", [(16, 8, 24), (513, 72, 1000)], ids=str)
def test_a_float32_product_of_bf16_factors(mode, sizes):
    """As a projection's gradient is made: d_out transposed, columns of a wider tensor.

    Sums in float32, in the order of the library: 1e-5 of the largest is some tens of roundings.
    """
    tokens, out, width = sizes
    d_out, x = randn(tokens, 2 * out, seed=0)[:, out:], randn(tokens, width, seed=1)
    before = torch.full((out, width), 0.125, device="cuda")
    gradient = before.clone() if mode == "update" else torch.full_like(before, float("nan"))
    address = gradient.data_ptr()
    add_matmul(gradient, d_out.t(), x, mode)
    expected = d_out.double().t() @ x.double() + (0.125 if mode == "update" else 0.0)
    assert gradient.data_ptr() == address
    assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_step_with_float32_gradients_and_master_has_the_same_bits_from_every_plan():
    recipe = Recipe(
        gradients="float32",
        optimizer_state="float32_master",
        kernels=KernelChoice(vector="triton"),
    )
    chain = tiny_chain("sliced", "tiny-qwen3", recipe, dtype="bfloat16")
    caps = Caps(device_bytes=enough_device_bytes(chain, "streaming"))
    found, expected = (
        run(planned(chain, MACHINE, of, policy), RunOptions(backend="cuda", num_passes=3))[1]
        for of, policy in ((caps, "streaming"), (Caps(), "resident"))
    )
    assert_same_bits(found, expected)
