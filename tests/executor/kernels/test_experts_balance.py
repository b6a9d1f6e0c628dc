"""The load-balancing loss: its value and gradients against transformers' own, in autograd."""

from dataclasses import replace

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.executor.kernels.families import (
    SEQ_LEN,
    LossAndGradients,
    hf_model,
    kernel_step,
    loss_scale,
    random_tokens,
    result_of,
    tiny_spec,
)

COEFFICIENT = 0.3


def balanced(family: str):
    """Three layers, one of them dense where the family has such, and the loss of their routers."""
    spec = tiny_spec(family)
    assert spec.experts is not None
    experts = spec.experts.model_copy(update={"aux_loss": COEFFICIENT})
    return spec.model_copy(update={"experts": experts, "num_layers": 3})


def hf_step(spec, tokens):
    model, (ids, labels) = hf_model(spec), tokens.view(2, -1, SEQ_LEN)
    out = model(input_ids=ids, output_router_logits=True)
    losses = torch.nn.functional.cross_entropy(
        out.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    logits = tuple(each for each in out.router_logits if each is not None)
    balance = load_balancing_loss_func(logits, spec.experts.count, spec.experts.per_token)
    loss = losses * loss_scale(tokens) + COEFFICIENT * balance
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return LossAndGradients(loss.item(), gradients), float(balance.detach())


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("chunk_tokens", [2 * SEQ_LEN, SEQ_LEN // 3])
def test_it_is_of_all_layers_and_chunks_of_a_round(family, chunk_tokens):
    spec = balanced(family)
    tokens = random_tokens(spec)
    reference, balance = hf_step(spec, tokens)
    assert balance > 1.0  # what even loads have, at least
    errors = result_of(kernel_step(spec, tokens, chunk_tokens)).errors(reference)
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-5, worst


def test_without_it_nothing_is_summed():
    spec = tiny_spec("mixtral")
    step = kernel_step(spec, random_tokens(spec), SEQ_LEN)
    assert "balance" not in step.tensors
    assert "balance" in kernel_step(balanced("mixtral"), random_tokens(spec), SEQ_LEN).tensors


def test_recompute_leaves_its_sums_alone():
    spec = balanced("qwen3_moe")
    tokens = random_tokens(spec)
    kept = result_of(kernel_step(spec, tokens, SEQ_LEN))
    again = result_of(replace(kernel_step(spec, tokens, SEQ_LEN), recompute="INPUT"))
    assert kept.loss == again.loss
    assert all(torch.equal(kept.gradients[n], again.gradients[n]) for n in kept.gradients)
