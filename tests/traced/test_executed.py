"""Traced modules by the executor: the bits of the module's own backward, under any cap."""

import pytest
import torch

from tests.traced.executed import (
    Step,
    differences,
    least_schedule,
    loss_and_gradients,
    planned,
    reference,
    traced,
)
from tests.traced.families import FAMILIES, NOT_TO_THE_BIT, REFUSED, tiny_config
from twinstream.executor.modules.calling import run_module
from twinstream.executor.modules.tracing import trace
from twinstream.models.lowering.lower import lower_again
from twinstream.models.traced import ModuleSource
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_a_family_has_the_bits_of_its_own_backward_in_a_quarter_of_its_state(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = traced(family)
    schedule, share = least_schedule(model)
    assert verify_rank(schedule) == [] == conforms(schedule, lower_again(schedule))
    step = Step.of(model)
    loss, gradients = loss_and_gradients(monkeypatch, model, schedule, step)
    expected_loss, expected = reference(model, step)
    if family not in NOT_TO_THE_BIT:
        assert loss == expected_loss and differences(gradients, expected) == []
    assert share == 0.25 or model.num_layers < 9


TEN = ("gemma3_text", "gemma4_text", "phi3", "gpt2", "gpt_oss", "qwen3_moe", "qwen3_5_moe_text",
       "deepseek_v3", "nemotron_h", "mamba2")  # fmt: skip


@pytest.mark.parametrize("family", TEN)
def test_every_policy_has_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = traced(family), []
    step = Step.of(model)
    for policy in ("resident", "streaming", "optimal"):
        schedule = planned(model, policy)
        found.append(loss_and_gradients(monkeypatch, model, schedule, step))
    losses, gradients = zip(*found, strict=True)
    assert len(set(losses)) == 1
    for name, gradient in gradients[0].items():
        assert all(torch.equal(gradient, other[name]) for other in gradients[1:])


def test_dropout_is_the_same_forward_and_backward_under_every_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config("gpt2") | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    model = trace(ModuleSource(config=config), dtype="float32", seq_len=32)
    assert model.has_randomness
    step = Step.of(model)
    expected_loss, expected = reference(model, step, seeded=True)
    for policy in ("resident", "streaming"):
        schedule = planned(model, policy)
        loss, gradients = loss_and_gradients(monkeypatch, model, schedule, step)
        assert loss == expected_loss and differences(gradients, expected) == []
    assert reference(model, step, seeded=False)[0] != expected_loss


def test_autocast_is_nothing_for_tensors_without_storage() -> None:
    """As transformers 4 turns it off for the device of what comes before the postlude."""

    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device_type=input_ids.device.type, enabled=False):
                return input_ids[..., None].float()

    ids = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError, match="scalarType"):
        Model()(input_ids=ids)
    assert run_module(Model(), {"input_ids": ids}).shape == (2, 3, 1)
