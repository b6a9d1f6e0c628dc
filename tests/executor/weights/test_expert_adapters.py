"""Adapters of experts, against PEFT itself: loaded, computed with, trained and merged."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.executor.kernels.driver import Step
from tests.executor.kernels.families import SEQ_LEN, hf_model, loss_scale, random_tokens, tiny_spec
from tests.executor.weights.small_models import logits, random_model, save
from tests.helpers.adapters import loss_here, state_of
from tests.helpers.hf_weights import pack_hf_state
from twinstream.executor.kernels.operand import DTYPES
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.merging import export_adapter
from twinstream.executor.weights.peft.peft_folder import PeftFolder
from twinstream.executor.weights.peft.peft_writer import write_peft_folder
from twinstream.executor.weights.weight_file import as_stored
from twinstream.models.recipes.adapter_layout import adapter_layout
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.peft_weights import peft_weights
from twinstream.models.recipes.recipe import Recipe

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


def of_each_expert(tmp_path, name, projections, module, **config):
    """A base and an adapter as PEFT wrote it before transformers had experts in one tensor."""
    model = random_model(name, torch.float32)
    spec, made = save(model, tmp_path / "base"), torch.Generator().manual_seed(5)
    assert spec.experts is not None
    options = {"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6, **config}
    plain = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, **options)
    peft.get_peft_model(model, plain).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors, (d, f) = load_file(path), (spec.d_model, spec.experts.d_ff)
    for layer in range(2):
        for expert in range(spec.experts.count):
            for projection in projections:
                inside, outside = (f, d) if projection in ("w2", "down_proj") else (d, f)
                key = f"base_model.model.model.layers.{layer}.{module}.{expert}.{projection}"
                for which, shape in (("A", (3, inside)), ("B", (outside, 3))):
                    value = 0.1 * torch.randn(shape, generator=made)
                    tensors[f"{key}.lora_{which}.weight"] = value
    save_file(tensors, path, metadata={"format": "pt"})
    said = tmp_path / "adapter" / "adapter_config.json"
    more = {"target_modules": ["q_proj", *projections], "peft_version": "0.17.1"}
    said.write_text(json.dumps(json.loads(said.read_text()) | more))
    return spec, tmp_path / "adapter"


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # PEFT's
@pytest.mark.parametrize(
    ("name", "projections", "module"),
    [
        ("mixtral", ("w1", "w2", "w3"), "block_sparse_moe.experts"),
        ("qwen3_moe", ("gate_proj", "up_proj", "down_proj"), "mlp.experts"),
        ("olmoe", ("down_proj",), "mlp.experts"),
    ],
)
def test_adapters_of_each_expert_are_read_as_peft_reads_them(name, projections, module, tmp_path):
    spec, folder = of_each_expert(tmp_path, name, projections, module)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    before = logits(random_model(name, torch.float32))
    expected = logits(theirs)
    assert not torch.allclose(expected, before, atol=1e-2)
    export_adapter(folder, tmp_path / "merged", tmp_path / "base", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits(merged.eval()), expected, atol=1e-4)
    opened = PeftFolder.open(folder, spec)  # what is trained on is what PEFT has then
    flats = {}
    for layer in range(2):
        flats[f"lora.{layer}"] = torch.zeros(
            adapter_layout(spec, opened.lora).size_bytes, dtype=torch.uint8
        )
        opened.read_group(f"lora.{layer}", flats[f"lora.{layer}"])
    write_peft_folder(tmp_path / "ours", spec, opened.lora, flats.__getitem__)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    assert torch.allclose(logits(again), expected, atol=1e-4)


def test_adapters_of_each_expert_keep_their_scale(tmp_path):
    """Rank-stabilised, and of gate and up alone, which PEFT 0.21 reads as others: by arithmetic."""
    names = ("gate_proj", "up_proj")
    _, folder = of_each_expert(tmp_path, "olmoe", names, "mlp.experts", use_rslora=True)
    export_adapter(folder, tmp_path / "merged", tmp_path / "base", merge=True)
    tensors = load_file(folder / "adapter_model.safetensors")
    was, now = (
        AutoModelForCausalLM.from_pretrained(tmp_path / each, dtype=torch.float32).model.layers[1]
        for each in ("base", "merged")
    )
    added = now.mlp.experts.gate_up_proj - was.mlp.experts.gate_up_proj
    for expert, found in enumerate(added):
        key = f"base_model.model.model.layers.1.mlp.experts.{expert}"
        a_and_b = [[tensors[f"{key}.{n}.lora_{m}.weight"] for m in "AB"] for n in names]
        expected = torch.cat([6 / 3**0.5 * b @ a for a, b in a_and_b])
        assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(now.mlp.experts.down_proj, was.mlp.experts.down_proj)


def test_an_expert_that_lacks_a_matrix_is_named(tmp_path):
    spec, folder = of_each_expert(tmp_path, "mixtral", ("w1", "w2"), "block_sparse_moe.experts")
    with pytest.raises(WeightsError, match="only one of gate and up"):
        PeftFolder.open(folder, spec)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    key = "base_model.model.model.layers.1.block_sparse_moe.experts.2.w2.lora_B.weight"
    save_file({n: t for n, t in tensors.items() if n != key and ".w1." not in n}, path)
    with pytest.raises(WeightsError, match=r"layers\.1 .* B of down of expert 2"):
        PeftFolder.open(folder, spec)


def test_parameters_are_known_by_the_ends_of_their_names(tmp_path):
    spec, _, folder = written(tmp_path, "mixtral")
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace("mlp.experts.", "experts."))
    assert PeftFolder.open(folder, spec).lora.targets == ("q", "v", "experts")


def test_adapters_of_a_router_are_named(tmp_path):
    model = random_model("mixtral", torch.float32)
    spec = save(model, tmp_path / "base")
    options = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["gate.weight"])
    peft.get_peft_model(model, options).save_pretrained(tmp_path / "a")
    with pytest.raises(WeightsError, match=r"has adapters of .*layers\.0\.mlp\.gate"):
        PeftFolder.open(tmp_path / "a", spec)


def test_parameters_that_are_not_experts_are_refused(tmp_path):
    spec, _, folder = written(tmp_path, "mixtral")
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace("mlp.experts.down_proj", "mlp.gate.weight"))
    with pytest.raises(WeightsError, match="target_parameters"):
        PeftFolder.open(folder, spec)
