"""Weight gradients in float32 while everything else is bf16."""

import pytest
import torch

from tests.executor.kernels.families import SEQ_LEN, kernel_step, random_tokens, tiny_spec
from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.operand import KernelOperand
from twinstream.executor.kernels.vector.gradients import gradient_views


def gradients_of(step) -> dict[str, torch.Tensor]:
    """After running it: every inner tensor, by flat tensor and name."""
    step.run()
    gradients_in = "float32" if step.gradients_in == "float32" else step.spec.dtype
    attributes = {"dtype": step.spec.dtype, "gradient_dtype": gradients_in}
    return {
        f"{flat}.{name}": view
        for flat, layout in step.layouts.items()
        for name, view in gradient_views(
            KernelOperand(step.gradients[flat], "read"), layout, attributes, Calls()
        ).items()
    }


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_contributions_of_chunks_are_added_without_rounding(family):
    """Two sequences in one step, and each in a step of its own, added up afterwards."""
    spec = tiny_spec(family, "bfloat16")
    tokens = random_tokens(spec, num_sequences=2)
    options = {"gradients_in": "float32"}
    together = gradients_of(kernel_step(spec, tokens, SEQ_LEN, **options))
    alone = []
    for part in (tokens[:, :SEQ_LEN], tokens[:, SEQ_LEN:]):
        step = kernel_step(spec, part, SEQ_LEN, **options)
        step.loss_scale = 1.0 / int((tokens[1] >= 0).sum())
        alone.append(gradients_of(step))
    rounded = gradients_of(kernel_step(spec, tokens, SEQ_LEN))
    for name, found in together.items():
        expected = alone[0][name] + alone[1][name]
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max(), name
        # and a bf16 gradient is off by its roundings, which are more than that
        error = (rounded[name].float() - expected).abs().max() / expected.abs().max()
        assert 1e-6 < error <= 2.0**-7, name


def test_padding_of_wider_gradients_is_zeroed():
    spec = tiny_spec("qwen2", "bfloat16")
    step = kernel_step(spec, random_tokens(spec), SEQ_LEN, gradients_in="float32")
    step.run()
    for name, layout in step.layouts.items():
        inner = torch.zeros(2 * layout.size_bytes, dtype=torch.bool)
        for tensor in layout.tensors:
            start = 2 * tensor.offset_bytes
            inner[start : start + 2 * tensor.size_bytes] = True
        assert not step.gradients[name][~inner].any()
