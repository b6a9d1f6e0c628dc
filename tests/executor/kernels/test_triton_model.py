"""Whole models with Triton's kernels: against transformers, and the bits of recomputes.

In the interpreter a token costs some 10 ms, so there are few of them here.
"""

import pytest
import torch

from tests.executor.kernels.families import (
    FAMILIES,
    SEQ_LEN,
    hf_model,
    hf_step,
    kernel_step,
    random_tokens,
    result_of,
    tiny_spec,
)
from tests.executor.kernels.test_same_bits import all_bits, assert_same_bits

FAMILY = pytest.mark.parametrize("family", FAMILIES)


def one_layer(family: str, dtype: str):
    return tiny_spec(family, dtype).model_copy(update={"num_layers": 1})


def triton_step(spec, tokens, chunk_tokens, device, **options):
    return kernel_step(spec, tokens, chunk_tokens, vector="triton", device=device, **options)


@FAMILY
def test_float32_agrees_with_transformers(family, triton_device):
    """Two packed sequences, with the tolerance of the eager kernels."""
    spec = one_layer(family, "float32")
    tokens = random_tokens(spec, num_sequences=2)
    found = result_of(triton_step(spec, tokens, 2 * SEQ_LEN, triton_device))
    errors = found.errors(hf_step(hf_model(spec), tokens))
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-5, worst


@FAMILY
def test_bfloat16_is_as_close_to_float32_as_transformers_in_bfloat16(family, triton_device):
    """A sequence in slices, both against float32, with the tolerance of the eager kernels."""
    spec = one_layer(family, "bfloat16")
    tokens = random_tokens(spec, num_sequences=2)[:, :SEQ_LEN]
    reference = hf_step(hf_model(spec), tokens)
    theirs = hf_step(hf_model(spec).bfloat16(), tokens).errors(reference)
    ours = result_of(triton_step(spec, tokens, SEQ_LEN // 2, triton_device)).errors(reference)
    assert ours["loss"] <= 1e-3
    assert max(ours.values()) <= 1.25 * max(theirs.values())


def test_recomputes_and_content_that_is_overwritten_change_no_bit(triton_device):
    """Kept; and from level INPUT, with zeros instead of NaN in what is overwritten."""
    spec = one_layer("qwen3", "bfloat16")
    tokens = random_tokens(spec, num_sequences=2)[:, :SEQ_LEN]
    kept, again = (
        all_bits(triton_step(spec, tokens, SEQ_LEN // 2, triton_device, **options))
        for options in ({}, {"recompute": "INPUT", "fill": 0})
    )
    assert_same_bits(again, kept)


@pytest.mark.gpu
@FAMILY
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_layers_and_tokens_on_a_gpu(family, dtype):
    """Twice the layers, four sequences, recomputed; two runs have the same bits."""
    spec = tiny_spec(family, dtype)
    tokens = random_tokens(spec)
    steps = [
        triton_step(spec, tokens, SEQ_LEN // 3, "cuda", recompute=level)
        for level in ("FULL", "FULL", "INPUT")
    ]
    first, *others = [all_bits(step) for step in steps]
    for other in others:
        assert_same_bits(other, first)
    errors = result_of(steps[0]).errors(hf_step(hf_model(spec), tokens))
    assert max(errors.values()) <= (1e-5 if dtype == "float32" else 0.03)
    assert torch.isfinite(steps[0].loss.view(torch.float32)).all()
