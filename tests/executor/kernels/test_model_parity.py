"""Loss and every gradient of whole models, against Hugging Face transformers."""

import pytest

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

# Two packed sequences, one whole sequence, slices of a sequence.
CHUNKS = pytest.mark.parametrize("chunk_tokens", [2 * SEQ_LEN, SEQ_LEN, SEQ_LEN // 3])
FAMILY = pytest.mark.parametrize("family", FAMILIES)


@FAMILY
@CHUNKS
def test_float32_agrees_with_transformers(family, chunk_tokens):
    spec = tiny_spec(family)
    tokens = random_tokens(spec)
    errors = result_of(kernel_step(spec, tokens, chunk_tokens)).errors(
        hf_step(hf_model(spec), tokens)
    )
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-5, worst


@FAMILY
@CHUNKS
def test_bfloat16_is_as_close_to_float32_as_transformers_in_bfloat16(family, chunk_tokens):
    """Both against float32 with the same weights.

    bf16 rounds to 2**-9 relative; a gradient passes some tens of roundings in two layers, which
    is about 2% of its largest element, for transformers too.
    """
    spec = tiny_spec(family, "bfloat16")
    tokens = random_tokens(spec)
    reference = hf_step(hf_model(spec), tokens)
    theirs = hf_step(hf_model(spec).bfloat16(), tokens).errors(reference)
    ours = result_of(kernel_step(spec, tokens, chunk_tokens)).errors(reference)
    assert ours["loss"] <= 1e-3
    assert max(ours.values()) <= 1.25 * max(theirs.values())
    assert max(ours.values()) <= 0.03
