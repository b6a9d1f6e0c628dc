"""The load-balancing loss: its value and gradients against transformers' own, in autograd."""

from dataclasses import replace

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.executor.kernels.driver import Step
from tests.executor.kernels.families import (
    EXPERTS,
    SEQ_LEN,
    LossAndGradients,
    hf_model,
    kernel_step,
    loss_scale,
    random_tokens,
    result_of,
    tiny_spec,
)
from tests.helpers.hf_weights import pack_hf_state
from twinstream.schedule.workload import PADDING_LABEL

COEFFICIENT = 0.3


def balanced(family: str):
    """Three layers, one of them dense where the family has such, and the loss of their routers."""
    spec = tiny_spec(family)
    assert spec.experts is not None
    experts = spec.experts.model_copy(update={"aux_loss": COEFFICIENT})
    return spec.model_copy(update={"experts": experts, "num_layers": 3})


def padded(tokens):
    """Without the ends of two sequences, and without the last one; the id of padding is in none."""
    ids, labels = tokens.clone().view(2, -1, SEQ_LEN)
    ids.masked_fill_(ids == 0, 1)
    for sequence, start in ((0, 15), (2, 1), (3, 0)):
        ids[sequence, start:], labels[sequence, start:] = 0, PADDING_LABEL
        labels[sequence, max(start - 1, 0)] = min(-100, labels[sequence, max(start - 1, 0)])
    return torch.stack((ids.flatten(), labels.flatten()))


def hf_step(spec, tokens):
    model, (ids, labels) = hf_model(spec), tokens.view(2, -1, SEQ_LEN)
    labels, mask = labels.clamp(min=-100), labels != PADDING_LABEL
    out = model(input_ids=ids, output_router_logits=True)
    losses = torch.nn.functional.cross_entropy(
        out.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    logits = tuple(each for each in out.router_logits if each is not None)
    balance = load_balancing_loss_func(
        logits, spec.experts.count, spec.experts.per_token, mask.long()
    )
    loss = losses * loss_scale(tokens) + COEFFICIENT * balance
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return LossAndGradients(loss.item(), gradients), float(balance.detach())


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("chunk_tokens", [2 * SEQ_LEN, SEQ_LEN // 3])
@pytest.mark.parametrize("fill", [lambda tokens: tokens, padded], ids=["full", "padded"])
def test_it_is_of_all_layers_and_chunks_of_a_round(family, chunk_tokens, fill):
    spec = balanced(family)
    tokens = fill(random_tokens(spec))
    reference, balance = hf_step(spec, tokens)
    assert balance > 1.0  # what even loads have, at least
    errors = result_of(kernel_step(spec, tokens, chunk_tokens)).errors(reference)
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-5, worst


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "qwen2_moe"])
def test_what_padding_holds_reaches_no_gradient(family):
    """Its embedding is exchanged for zeros, which a norm blows up, and for large numbers.

    Dense models keep every bit. An expert's gradient is a sum over its rows, which may be added in
    another order where rows of padding, which are zero there, go to another one.
    """
    spec = balanced(family) if family in EXPERTS else tiny_spec(family)
    step = kernel_step(spec, padded(random_tokens(spec)), 2 * SEQ_LEN)
    row = step.parameters["embedding"][: spec.d_model * 4].view(torch.float32)
    found = []
    for held in (0.0, 1e3, -7.0):
        row.copy_(held * torch.linspace(-1, 1, spec.d_model))
        found.append(result_of(step))
        assert not step.gradients["embedding"][: spec.d_model * 4].any()
    for now in found[1:]:
        assert max(now.errors(found[0]).values()) <= (2e-6 if family in EXPERTS else 0.0)


def test_a_round_of_nothing_but_padding_adds_nothing():
    spec = balanced("mixtral")
    tokens = torch.stack([torch.zeros(SEQ_LEN), torch.full((SEQ_LEN,), PADDING_LABEL)]).long()
    parameters = pack_hf_state(spec, hf_model(spec).state_dict())
    step = Step(spec, parameters, tokens, SEQ_LEN, SEQ_LEN, loss_scale=1.0)
    assert float(step.run()) == 0.0
    assert not any(g.view(torch.float32).any() for g in step.gradients.values())


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
