"""Packed sequences of unequal lengths: whole models, each sequence by itself in transformers."""

import pytest
import torch

from tests.executor.kernels.driver import Step
from tests.executor.kernels.families import (
    FAMILIES,
    LossAndGradients,
    hf_model,
    loss_scale,
    result_of,
    tiny_spec,
)
from tests.executor.kernels.test_same_bits import all_bits, assert_same_bits
from tests.helpers.hf_weights import pack_hf_state

LENGTHS = (7, 7, 1, 13)
FAMILY = pytest.mark.parametrize("family", FAMILIES)


def random_tokens(spec, num_chunks=2):
    """Ids, and as labels any other ids: also the last token of a sequence is to predict one."""
    generator = torch.Generator().manual_seed(3)
    shape = (2, num_chunks * sum(LENGTHS))
    return torch.randint(0, spec.vocab_size, shape, generator=generator)


def packed_step(spec, tokens, **options) -> Step:
    parameters = pack_hf_state(spec, hf_model(spec).state_dict())
    return Step(
        spec, parameters, tokens, sum(LENGTHS), max(LENGTHS), loss_scale(tokens), lengths=LENGTHS,
        **options,
    )  # fmt: skip


def hf_step(spec, tokens) -> LossAndGradients:
    """One forward for each sequence, the losses of all added up."""
    model = hf_model(spec)
    loss = torch.zeros(())
    for sequence in tokens.split(tokens.shape[1] // sum(LENGTHS) * LENGTHS, dim=1):
        logits = model(input_ids=sequence[:1]).logits[0]
        loss = loss + torch.nn.functional.cross_entropy(logits, sequence[1], reduction="sum")
    loss = loss * loss_scale(tokens)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return LossAndGradients(loss.item(), gradients)


@FAMILY
def test_loss_and_gradients_are_those_of_the_sequences_by_themselves(family):
    spec = tiny_spec(family)
    tokens = random_tokens(spec)
    errors = result_of(packed_step(spec, tokens)).errors(hf_step(spec, tokens))
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-5, worst


@FAMILY
def test_with_triton_too(family, triton_device):
    spec = tiny_spec(family).model_copy(update={"num_layers": 1})
    tokens = random_tokens(spec, num_chunks=1)
    step = packed_step(spec, tokens, vector="triton", device=triton_device)
    errors = result_of(step).errors(hf_step(spec, tokens))
    assert max(errors.values()) <= 1e-5


@FAMILY
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputes_and_dead_bytes_change_no_bit(family, dtype):
    spec = tiny_spec(family, dtype)
    tokens = random_tokens(spec)
    kept = all_bits(packed_step(spec, tokens))
    for options in ({"recompute": "INPUT"}, {"recompute": "ATTENTION", "fill": 0}):
        assert_same_bits(all_bits(packed_step(spec, tokens, **options)), kept)
