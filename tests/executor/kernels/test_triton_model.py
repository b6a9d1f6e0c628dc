"""Whole models with Triton's kernels: against transformers, and the bits of recomputes.

In the interpreter a token costs some 10 ms, so there are few of them here.
"""

import pytest
import torch

from tests.executor.kernels.families import (
    EXPERT_FAMILIES,
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
from twinstream.models.recipes.adapter_layout import adapter_layout
from twinstream.models.recipes.lora import lora_of

FAMILY = pytest.mark.parametrize("family", [*FAMILIES, *EXPERT_FAMILIES])


def one_layer(family: str, dtype: str):
    """With experts, if the family has some."""
    spec = tiny_spec(family, dtype).model_copy(update={"num_layers": 1})
    if spec.experts is None:
        return spec
    experts = spec.experts.model_copy(update={"dense_layers": ()})
    return spec.model_copy(update={"experts": experts})


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


# Of olmoe and dots1, which bfloat16 lets choose other experts, transformers is as far off.
@pytest.mark.parametrize("family", [*FAMILIES, "mixtral", "qwen2_moe", "qwen3_moe"])
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


@pytest.mark.parametrize(
    "options", [{"lora": lora_of("r=3,targets=q,o,up,down")}, {"frozen": ("0", "head")}]
)
def test_frozen_weights_agree_with_the_eager_kernels(options, triton_device):
    """Gradients of adapters and of what is left to train, with qk_norm and tied embeddings."""
    spec = one_layer("qwen3", "float32")
    tokens = random_tokens(spec, num_sequences=2)[:, :SEQ_LEN]
    parameters = adapters_of(spec, options.get("lora"))
    found = []
    for vector, device in (("triton", triton_device), ("eager", "cpu")):
        step = kernel_step(spec, tokens, SEQ_LEN, vector=vector, device=device, **options)
        step.parameters |= parameters
        step.run()
        buffers = step.buffers.items()
        found.append({name: flat.cpu() for name, flat in buffers if name.startswith("grad.")})
    assert found[0].keys() == found[1].keys()
    assert found[0].keys() == ({"grad.lora.0"} if parameters else {"grad.embedding"})
    for name, flat in found[1].items():
        expected = flat.view(torch.float32)
        error = (found[0][name].view(torch.float32) - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max(), name


def adapters_of(spec, lora):
    """Random A and B of the only layer."""
    if lora is None:
        return {}
    generator = torch.Generator().manual_seed(2)
    num_elements = adapter_layout(spec, lora).size_bytes // 4
    return {"lora.0": (0.1 * torch.randn(num_elements, generator=generator)).view(torch.uint8)}


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
