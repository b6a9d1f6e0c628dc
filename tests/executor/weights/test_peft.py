"""Adapters to PEFT folders and back, merged into their base, and given out by `export`."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.executor.weights.small_models import logits, random_model, save
from tests.front_door.command_line import call, error_of
from tests.helpers.adapters import adapter_views, add_adapters, loss_here, state_of
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.merging import export_adapter
from twinstream.executor.weights.peft.peft_folder import PeftFolder
from twinstream.executor.weights.peft.peft_writer import write_peft_folder
from twinstream.models.recipes.adapter_layout import adapter_layout
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.recipe import Recipe

NAMES = pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_tied"])
LORA = lora_of("r=4,alpha=10,targets=q,v,o,gate,down")
STABLE = lora_of("r=4,alpha=10,rslora,targets=q,v,o,gate,down")


def written(tmp_path, name="llama", lora=LORA, dtype=torch.float32):
    """A base, its spec, a state with adapters, and the folders of both."""
    model = random_model(name, dtype)
    spec = save(model, tmp_path / "base")
    state = state_of(spec, model, Recipe(lora=lora))
    folder = tmp_path / "adapter"
    base = str(tmp_path / "base")
    write_peft_folder(folder, spec, lora, lambda group: state[f"param.{group}"], base)
    return model, spec, state, folder


def test_names_shapes_and_config_are_those_of_peft(tmp_path):
    _, spec, state, folder = written(tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors")
    modules = {
        "self_attn.q_proj": (48, 48), "self_attn.v_proj": (48, 24), "self_attn.o_proj": (48, 48),
        "mlp.gate_proj": (48, 80), "mlp.down_proj": (80, 48),
    }  # fmt: skip
    expected = {
        f"base_model.model.model.layers.{layer}.{module}.lora_{which}.weight": shape
        for layer in range(2)
        for module, (width_in, width_out) in modules.items()
        for which, shape in (("A", (4, width_in)), ("B", (width_out, 4)))
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    views = adapter_views(spec, LORA, state)
    assert all(torch.equal(tensors[name], views[name]) for name in expected)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 10)
    assert config["target_modules"] == ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def test_what_was_written_is_read_as_it_was(tmp_path):
    _, spec, state, folder = written(tmp_path, "qwen3", dtype=torch.bfloat16)
    opened = PeftFolder.open(folder, spec)
    assert opened.lora == LORA
    for layer in range(2):
        flat = torch.full_like(state[f"param.lora.{layer}"], 0xFF)
        opened.read_group(f"lora.{layer}", flat)
        assert torch.equal(flat, state[f"param.lora.{layer}"])
    with pytest.raises(WeightsError, match="has an adapter already"):
        write_peft_folder(folder, spec, LORA, lambda group: state[f"param.{group}"])


@pytest.mark.parametrize(
    ("name", "lora"), [("llama", LORA), ("qwen2", LORA), ("qwen3_tied", LORA), ("llama", STABLE)]
)
def test_peft_loads_it_and_computes_the_same(name, lora, tmp_path):
    peft = pytest.importorskip("peft")
    model, spec, state, folder = written(tmp_path, name, lora)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    ids = torch.randint(0, spec.vocab_size, (2, 11), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    with torch.no_grad():
        their_logits = theirs(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), labels.flatten())
    assert loss_here(spec, lora, state, ids, labels) == pytest.approx(loss.item(), rel=1e-5)
    add_adapters(model, spec, lora, state)
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, their_logits, atol=1e-5)
    assert PeftFolder.open(folder, spec).lora == lora
    export_adapter(folder, tmp_path / "merged", None, merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, their_logits, atol=1e-4)


def test_what_peft_writes_is_read(tmp_path):
    peft = pytest.importorskip("peft")
    model = random_model("llama")
    spec = save(model, tmp_path / "base")
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM",
        init_lora_weights=False,
    )  # fmt: skip
    theirs = peft.get_peft_model(model, config)
    theirs.save_pretrained(tmp_path / "adapter")
    opened = PeftFolder.open(tmp_path / "adapter", spec)
    assert opened.lora == lora_of("r=3,alpha=6,targets=q,up")
    size_bytes = adapter_layout(spec, opened.lora).size_bytes
    state = {f"param.lora.{i}": torch.empty(size_bytes, dtype=torch.uint8) for i in range(2)}
    for name, flat in state.items():
        opened.read_group(name.removeprefix("param."), flat)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    views = adapter_views(spec, opened.lora, state)
    assert views.keys() == tensors.keys()
    assert all(torch.equal(views[name], tensor) for name, tensor in tensors.items())


@NAMES
def test_merged_is_the_base_with_the_adapter(name, tmp_path):
    model, spec, state, folder = written(tmp_path, name)
    export_adapter(folder, tmp_path / "merged", None, merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    before = logits(model)
    add_adapters(model, spec, LORA, state)
    assert not torch.allclose(logits(model), before, atol=1e-2)
    assert torch.allclose(logits(merged), logits(model), atol=1e-4)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "merged"}


def test_merging_rounds_once(tmp_path):
    model, spec, state, folder = written(tmp_path, dtype=torch.bfloat16)
    export_adapter(folder, tmp_path / "merged", None, merge=True)
    name = "model.layers.1.mlp.gate_proj"
    views = adapter_views(spec, LORA, state)
    a, b = (views[f"base_model.model.{name}.lora_{which}.weight"].double() for which in "AB")
    exact = model.get_submodule(name).weight.double() + 2.5 * b @ a
    found = load_file(tmp_path / "merged" / "model.safetensors")[f"{name}.weight"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.float().bfloat16())


def test_export_gives_out_the_folder_or_the_merged_model(tmp_path):
    _, _, _, folder = written(tmp_path)
    assert call("export", folder, "-o", tmp_path / "copy").code == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "copy" / name).read_bytes() == (folder / name).read_bytes()
    assert "is there already" in error_of("export", folder, "-o", tmp_path / "copy")
    (tmp_path / ".other.incomplete").mkdir()
    (tmp_path / ".other.incomplete" / "mine.txt").touch()
    assert call("export", folder, "-o", tmp_path / "other").code == 0
    assert (tmp_path / ".other.incomplete" / "mine.txt").exists()
    shutil.move(tmp_path / "base", tmp_path / "moved")
    asked = ("export", folder, "-o", tmp_path / "merged", "--merge")
    assert "--base FOLDER" in error_of(*asked)
    assert not (tmp_path / "merged").exists()
    assert call(*asked, "--base", tmp_path / "moved").code == 0
    assert (tmp_path / "merged" / "config.json").exists()


def test_a_base_in_float16_is_merged_in_a_dtype_that_is_asked_for(tmp_path):
    _, spec, state, folder = written(tmp_path)
    random_model("llama").half().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    config = tmp_path / "base" / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())  # a byte order mark
    asked = ("export", folder, "-o", tmp_path / "merged", "--merge")
    assert "float16" in error_of(*asked)
    assert "known: bfloat16, float32" in error_of(*asked, "--dtype", "float16")
    assert call(*asked, "--dtype", "float32").code == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.dtype == torch.float32
    add_adapters(model, spec, LORA, state)
    assert torch.allclose(logits(merged), logits(model), atol=1e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_dora", True), ("use_rslora", "x"), ("bias", "all"), ("rank_pattern", {"q_proj": 2}),
     ("peft_type", "IA3"), ("peft_type", None), ("r", 5), ("r", None), ("r", 0), ("r", -3),
     ("r", 10**12), ("lora_alpha", "x"), ("lora_alpha", float("nan")), ("lora_alpha", 0),
     ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_4"),
     ("init_lora_weights", "olora"), ("init_lora_weights", "corda"), ("init_lora_weights", "loftq"),
     ("init_lora_weights", "lora_ga"), ("modules_to_save", ["norm"]), ("lora_bias", True),
     ("use_bdlora", {"nblocks": 2}), ("alora_invocation_tokens", [1]), ("a_new_variant", True),
     ("target_modules", ["zzz"]), ("target_modules", r".*layers\.0\..*"), ("target_modules", "("),
     ("exclude_modules", ["mlp.gate_proj"]), ("target_modules", 3)],
)  # fmt: skip
def test_what_is_not_plain_lora_is_refused(key, value, tmp_path):
    """Whether it is read, merged or only given out."""
    _, spec, _, folder = written(tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(WeightsError, match=r"adapter_config|lora_[AB]"):
        PeftFolder.open(folder, spec)
    with pytest.raises(WeightsError, match=f"{key} = |target_modules|says r = 5"):
        export_adapter(folder, tmp_path / "out", None, merge=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [{"init_lora_weights": "gaussian"}, {"a_new_variant": None}, {"lora_dropout": 0.1},
     {"target_modules": "all-linear"}, {"target_modules": r".*\.(self_attn|mlp)\.\w+_proj"},
     {"target_modules": None}, {"exclude_modules": ["lm_head"]}],
)  # fmt: skip
def test_what_changes_nothing_is_read(change, tmp_path):
    _, spec, _, folder = written(tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert PeftFolder.open(folder, spec).lora == LORA


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal", "olora", "pissa"])
def test_an_adapter_is_read_if_peft_leaves_its_base_as_it_is(init, tmp_path):
    peft = pytest.importorskip("peft")
    model = random_model("llama")
    spec = save(model, tmp_path / "base")
    name = "model.layers.0.self_attn.q_proj"
    before = model.get_submodule(name).weight.detach().clone()
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)
    theirs = peft.get_peft_model(model, config)
    theirs.save_pretrained(tmp_path / "adapter")
    base = theirs.base_model.model.get_submodule(name).base_layer.weight
    if torch.equal(base, before):
        assert PeftFolder.open(tmp_path / "adapter", spec).lora.targets == ("q",)
    else:
        with pytest.raises(WeightsError, match="path_initial_model_for_weight_conversion"):
            PeftFolder.open(tmp_path / "adapter", spec)


def test_tensors_beside_those_of_lora_are_named(tmp_path):
    _, _, _, folder = written(tmp_path)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    first = next(iter(tensors))
    for change, told in (
        ({"base_model.model.lm_head.weight": torch.zeros(2, 2)}, "lm_head.weight is none of"),
        ({first: None}, f"{first} is missing"),
        ({first: torch.zeros(4)}, rf"{first} is \[4\]"),
        ({first: tensors[first].to(torch.int8)}, f"{first} is I8"),
    ):
        changed = tensors | change
        save_file({name: t for name, t in changed.items() if t is not None}, weights)
        with pytest.raises(WeightsError, match=told):
            export_adapter(folder, tmp_path / "out", None, merge=False)


def test_missing_layers_and_files_are_named(tmp_path):
    _, spec, _, folder = written(tmp_path)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({name: t for name, t in tensors.items() if "layers.1.mlp" not in name}, weights)
    with pytest.raises(WeightsError, match=r"missing: base_model\.model\.model\.layers\.1\.mlp"):
        PeftFolder.open(folder, spec)
    weights.unlink()
    with pytest.raises(WeightsError, match=r"adapter_model\.safetensors"):
        PeftFolder.open(folder, spec)
    with pytest.raises(WeightsError, match="give a PEFT folder"):
        PeftFolder.open(tmp_path / "base", spec)
