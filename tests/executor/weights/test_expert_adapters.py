"""Adapters of experts, against PEFT itself: loaded, computed with, trained and merged."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.executor.kernels.driver import Step
from tests.executor.kernels.families import SEQ_LEN, hf_model, loss_scale, random_tokens, tiny_spec
from tests.executor.weights.small_models import logits, random_model, save
from tests.helpers.adapters import loss_here, state_of
from tests.helpers.hf_weights import pack_hf_state
from twinstream.executor.kernels.operand import DTYPES
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.merging import export_adapter
from twinstream.executor.weights.peft_folder import PeftFolder
from twinstream.executor.weights.peft_writer import write_peft_folder
from twinstream.executor.weights.weight_file import as_stored
from twinstream.models.adapters.lora import lora_of
from twinstream.models.adapters.peft_weights import peft_weights
from twinstream.models.recipe import Recipe

peft = pytest.importorskip("peft")
EVERY = lora_of("r=3,alpha=9,targets=q,v,gate,up,down,experts")
LORA = {  # PEFT 0.21 takes names of dots1's shared expert for those of its routed ones
    "mixtral": EVERY, "qwen2_moe": EVERY, "qwen3_moe": EVERY,
    "dots1": lora_of("r=3,alpha=9,targets=q,v,experts"),
}  # fmt: skip
ALONE = lora_of("r=2,alpha=4,targets=experts")
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "dots1")


def written(tmp_path, name, lora=None):
    """A base, its spec, a state with adapters whose B is not zero, and the adapters' folder."""
    lora, model = lora or LORA[name], random_model(name, torch.float32)
    spec = save(model, tmp_path / "base")
    state = state_of(spec, model, Recipe(lora=lora))
    folder = tmp_path / "adapter"
    base = str(tmp_path / "base")
    write_peft_folder(folder, spec, lora, lambda group: state[f"param.{group}"], base)
    return spec, state, folder


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_peft_loads_and_merges_it_and_computes_the_same(name, alone, tmp_path):
    lora = ALONE if alone else LORA[name]
    spec, state, folder = written(tmp_path, name, lora)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    before = logits(base.eval())
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    ids = torch.randint(0, spec.vocab_size, (2, 11), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    with torch.no_grad():
        their_logits = theirs(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), labels.flatten())
    assert loss_here(spec, lora, state, ids, labels) == pytest.approx(loss.item(), rel=1e-5)
    export_adapter(folder, tmp_path / "merged", None, merge=True)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    merged = logits(theirs.merge_and_unload().eval())
    assert not torch.allclose(merged, before, atol=1e-2)
    assert torch.allclose(logits(ours), merged, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_written_is_read_as_it_was_and_so_is_what_peft_writes(name, tmp_path):
    spec, state, folder = written(tmp_path, name)
    opened = PeftFolder.open(folder, spec)
    # others have no network that all tokens go through
    assert opened.lora == (EVERY if name == "qwen2_moe" else LORA["dots1"])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    peft.PeftModel.from_pretrained(base, folder).save_pretrained(tmp_path / "theirs")
    for each in (opened, PeftFolder.open(tmp_path / "theirs", spec)):
        for layer in range(2):
            flat = torch.full_like(state[f"param.lora.{layer}"], 0xFF)
            each.read_group(f"lora.{layer}", flat)
            assert torch.equal(flat, state[f"param.lora.{layer}"])
    ours, theirs = (
        load_file(f / "adapter_model.safetensors") for f in (folder, tmp_path / "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("recompute", ["FULL", "EXPERTS", "INPUT"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_peft_in_autograd(family, recompute, tmp_path):
    spec, lora = tiny_spec(family), LORA[family]
    tokens, model = random_tokens(spec), hf_model(spec)
    state = state_of(spec, model, Recipe(lora=lora))
    write_peft_folder(tmp_path / "a", spec, lora, lambda group: state[f"param.{group}"])
    parameters = pack_hf_state(spec, model.state_dict())
    parameters |= {f"lora.{i}": state[f"param.lora.{i}"] for i in range(spec.num_layers)}
    step = Step(spec, parameters, tokens, SEQ_LEN, SEQ_LEN, loss_scale(tokens), lora=lora,
                recompute=recompute)  # fmt: skip
    step.run()
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "a", is_trainable=True)
    ids, labels = tokens.view(2, -1, SEQ_LEN)
    losses = torch.nn.functional.cross_entropy(
        theirs(input_ids=ids).logits.flatten(0, 1), labels.flatten(), ignore_index=-100,
        reduction="sum",
    )  # fmt: skip
    (losses * loss_scale(tokens)).backward()
    expected = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters()
                if "lora_" in n}  # fmt: skip
    found = peft_gradients(spec, lora, step)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def peft_gradients(spec, lora, step):
    """Under PEFT's names, in its order of axes."""
    found = {}
    for weight in peft_weights(spec, lora):
        flat = step.buffers[f"grad.{weight.group}"]
        plain = flat[weight.offset_bytes : weight.end_bytes]
        values = as_stored(weight, flat) if weight.axes else plain
        found[weight.name] = values.view(DTYPES[spec.dtype]).view(weight.shape)
    return found


def test_parameters_that_are_not_experts_are_refused(tmp_path):
    spec, _, folder = written(tmp_path, "mixtral")
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace("mlp.experts.down_proj", "mlp.gate.weight"))
    with pytest.raises(WeightsError, match="target_parameters"):
        PeftFolder.open(folder, spec)
