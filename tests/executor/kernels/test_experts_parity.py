"""Loss and every gradient of models with experts, against Hugging Face transformers."""

import pytest

from tests.executor.kernels.families import (
    EXPERT_FAMILIES,
    SEQ_LEN,
    hf_model,
    hf_step,
    kernel_step,
    random_tokens,
    result_of,
    tiny_spec,
)

FAMILY = pytest.mark.parametrize("family", EXPERT_FAMILIES)


@FAMILY
@pytest.mark.parametrize("chunk_tokens", [2 * SEQ_LEN, SEQ_LEN // 3])
@pytest.mark.parametrize("recompute", ["FULL", "EXPERTS", "ATTENTION", "INPUT"])
def test_float32_agrees_with_transformers(family, chunk_tokens, recompute):
    spec = tiny_spec(family)
    tokens = random_tokens(spec)
    found = result_of(kernel_step(spec, tokens, chunk_tokens, recompute=recompute))
    errors = found.errors(hf_step(hf_model(spec), tokens))
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-5, worst
