"""What a folder stores comes back: every tensor with its values, in a class of its own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.executor.weights.coded_folders import encode
from tests.front_door.command_line import call
from tests.traced.families import FAMILIES, REFUSED, tiny_config
from twinstream.executor.modules.building import (
    build_module,
    parameter_slots,
    placed,
    python_source,
)
from twinstream.executor.modules.calling import run_module
from twinstream.executor.modules.module_program import ModuleProgram
from twinstream.executor.modules.tracing import trace
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.hf_folder import stored_tensors
from twinstream.executor.weights.traced.module_folder import (
    ModuleOutline,
    read_module_buffers,
    read_module_parameters,
)
from twinstream.executor.weights.traced.module_weights import flat_groups
from twinstream.log.metrics import StepMetrics, events_of_kind, read_metrics
from twinstream.log.run_files import RunFiles
from twinstream.models.providers.traced import ModuleSource, TracedModel
from twinstream.schedule.python_file import object_of_file

SEQ_LEN = 32
TEXT: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260},
    **{"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256},
}
TOWER: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "patch_size": 14},
    **{"num_attention_heads": 2, "image_size": 28, "depth": 1, "num_heads": 2},
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"shared_expert_intermediate_size": 32}
QWEN = {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
CLIP = {"model_type": "clip_vision_model", "projection_dim": 32}
HALF = MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
LLAMA4 = {
    **{"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
    "pixel_shuffle_ratio": 0.5,
}
# Of a whole model: its text part, its tower, and what else its config says.
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({}, {"model_type": "siglip_vision_model", "vision_use_head": False}, {}),
    "qwen3_5": (LINEAR | {"rope_parameters": HALF}, QWEN, {}),
    "qwen3_5_moe": (LINEAR | EXPERTS | SHARED | {"rope_parameters": HALF}, QWEN, {}),
    "qwen2_5_vl": ({"rope_parameters": MROPE}, QWEN, {}),
    "qwen2_vl": ({"rope_parameters": MROPE}, {"embed_dim": 32, "hidden_size": 64}, {}),
    "qwen3_vl": ({"rope_parameters": MROPE}, QWEN, {}),
    "qwen3_vl_moe": (EXPERTS | {"rope_parameters": MROPE}, QWEN, {}),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral", "head_dim": 16}, {}),
    "llama4": ({"num_local_experts": 2, "intermediate_size_mlp": 96}, LLAMA4, {}),
    "llava": ({"model_type": "llama"}, CLIP, {"tie_word_embeddings": True}),
    "gemma4": (
        {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 260, "pad_token_id": 0},
        {"global_head_dim": 16, "head_dim": 16, "num_key_value_heads": 2},
        {"audio_config": None},
    ),
    "internvl": ({"model_type": "qwen2"}, {"image_size": [28, 28], "patch_size": [14, 14]}, {}),
}


def whole_folder(folder: Path, family: str) -> Any:
    """A folder of a whole model as its own class saves it."""
    text, tower, more = WHOLE[family]
    given = {"text_config": TEXT | text, "vision_config": TOWER | tower, **more}
    config = CONFIG_MAPPING[family].from_dict({"model_type": family, **given})
    torch.manual_seed(1)
    kind = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    whole = kind._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(0.0, 0.05)
    whole.save_pretrained(folder)
    return whole


def text_folder(folder: Path, family: str) -> Any:
    """A folder of a decoder, with other values in its buffers than its class gives them."""
    config = AutoConfig.for_model(**tiny_config(family, vocab_size=260))
    torch.manual_seed(1)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if name not in parameters and tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor))
    module.save_pretrained(folder)
    return module


def traced_of(folder: Path) -> TracedModel:
    config = json.loads((folder / "config.json").read_text())
    return trace(ModuleSource(config=config), dtype="float32", seq_len=SEQ_LEN)


def written_again(folder: Path, model: TracedModel, destination: Path) -> None:
    groups = dict(read_module_parameters(folder, model))
    destination.mkdir()
    ModuleOutline.of(model, folder).write(destination, groups.__getitem__)


def assert_same_tensors(folder: Path, written: Path) -> None:
    before, after = (load_file(f / "model.safetensors") for f in (folder, written))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def logits_of(module: Any) -> torch.Tensor:
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        found: torch.Tensor = module.eval()(input_ids=ids, use_cache=False).logits
    return found


def assert_same_folder(folder: Path, written: Path, module: Any) -> None:
    """Every tensor of the files, and the module that its own class makes of them."""
    assert_same_tensors(folder, written)
    kind: Any = type(module)
    loaded, about = kind.from_pretrained(written, dtype=torch.float32, output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"]
    assert torch.equal(logits_of(module), logits_of(loaded))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_a_folder_of_a_family_comes_back(tmp_path: Path, family: str) -> None:
    module = text_folder(tmp_path / "model", family)
    model = traced_of(tmp_path / "model")
    written_again(tmp_path / "model", model, tmp_path / "written")
    assert_same_folder(tmp_path / "model", tmp_path / "written", module)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", WHOLE)
def test_a_whole_model_comes_back_of_which_the_text_part_is_trained(
    tmp_path: Path, family: str
) -> None:
    whole = whole_folder(tmp_path / "model", family)
    model = traced_of(tmp_path / "model")
    sizes = {name: x.numel() for name, x in whole.named_parameters()}
    text = {name for name in sizes if "language_model" in name or name == "lm_head.weight"}
    assert model.num_parameters == sum(sizes[name] for name in text) < sum(sizes.values())
    written_again(tmp_path / "model", model, tmp_path / "written")
    assert_same_folder(tmp_path / "model", tmp_path / "written", whole)
    module = build_module(model.source, torch.float32, model.attention).eval()
    slots = parameter_slots(module)
    with placed(slots, parameters_of(tmp_path / "model", model)), torch.no_grad():
        found = run_module(module, {"input_ids": torch.arange(3, 20)[None]})
    torch.testing.assert_close(found, logits_of(whole), rtol=1e-5, atol=1e-5)


def parameters_of(folder: Path, model: TracedModel) -> dict[str, torch.Tensor]:
    found = dict[str, torch.Tensor]()
    for group, flat in read_module_parameters(folder, model):
        for inner in model.group_layout(group).tensors:
            part = flat[inner.offset_bytes : inner.offset_bytes + inner.size_bytes]
            found[inner.name] = part.view(torch.float32).view(inner.shape)
    return found


def more_tensors(folder: Path, more: dict[str, torch.Tensor], **config: object) -> None:
    """Put tensors beside those of a folder, and keys into its config.json."""
    file, told = folder / "model.safetensors", folder / "config.json"
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    told.write_text(json.dumps(json.loads(told.read_text()) | config))


CARRIED: list[tuple[str, str, dict[str, object]]] = [
    ("qwen3", "model.layers.0.self_attn.rotary_emb.inv_freq", {}),
    ("gpt2", "transformer.h.0.attn.bias", {}),
    ("minimax_m2", "model.layers.3.eh_proj.weight", {"num_nextn_predict_layers": 1}),
]


@pytest.mark.parametrize(("family", "name", "config"), CARRIED)
def test_what_transformers_leaves_out_without_a_word_is_carried(
    tmp_path: Path, family: str, name: str, config: dict[str, object]
) -> None:
    text_folder(tmp_path / "model", family)
    layers = tiny_config(family).get("num_hidden_layers", 0)
    name = name.replace("layers.3", f"layers.{layers}")
    more_tensors(tmp_path / "model", {name: torch.rand(3, 5, dtype=torch.float16)}, **config)
    model = traced_of(tmp_path / "model")
    written_again(tmp_path / "model", model, tmp_path / "written")
    assert_same_tensors(tmp_path / "model", tmp_path / "written")
    outline = ModuleOutline.of(model, tmp_path / "model")
    assert outline.carried.size_bytes >= 30
    more_tensors(tmp_path / "model", {"model.norm.weight": torch.ones(64)})
    with pytest.raises(WeightsError, match=r"has changed since the run began.*put the file back"):
        outline.carried.read(name)


@pytest.mark.parametrize("kind", ["fp8", "int8", "nf4"])
def test_codes_of_a_tower_are_written_as_the_values_that_they_stand_for(
    tmp_path: Path, kind: str
) -> None:
    """The config.json that is written says of no codes."""
    whole = whole_folder(tmp_path / "model", "gemma3")
    encode(tmp_path / "model", tmp_path / "values", kind, lambda name: "mlp.fc" in name)
    model = traced_of(tmp_path / "model")
    written_again(tmp_path / "model", model, tmp_path / "written")
    found, values = (load_file(tmp_path / f / "model.safetensors") for f in ("written", "values"))
    assert found.keys() == values.keys()
    for name, tensor in values.items():  # int8's is divided by 127 in float64, and rounded
        torch.testing.assert_close(found[name], tensor, rtol=1.2e-7, atol=0)
    assert "quantization_config" not in (tmp_path / "written" / "config.json").read_text()
    _, about = type(whole).from_pretrained(tmp_path / "written", output_loading_info=True)
    assert not about["missing_keys"]
    outline = ModuleOutline.of(model, tmp_path / "model")
    outline.carried.require_same(stored_tensors(tmp_path / "written"))
    name = next(one for one in outline.carried.stored if one.endswith("mlp.fc1.weight"))
    more_tensors(tmp_path / "written", {name: found[name] + 1e-3})
    with pytest.raises(WeightsError, match=rf"has {re.escape(name)} with other values"):
        outline.carried.require_same(stored_tensors(tmp_path / "written"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.layers.0.mlp.gate_proj.scale", r"does not have: model.layers.0.mlp.gate_proj"),
        ("model.layers.9.mlp.gate_proj.weight", "do config.json and the weights belong together"),
        ("lm_head.weight", r"other values than model.embed_tokens.weight.*tie_word_embeddings"),
    ],
)
def test_what_nothing_reads_is_refused_by_name(tmp_path: Path, name: str, says: str) -> None:
    text_folder(tmp_path / "model", "gemma2")
    more_tensors(tmp_path / "model", {name: torch.ones(260, 64)})
    model = traced_of(tmp_path / "model")
    with pytest.raises(WeightsError, match=says):
        ModuleOutline.of(model, tmp_path / "model")
    with pytest.raises(WeightsError, match=says):
        next(read_module_parameters(tmp_path / "model", model))


def test_a_tied_head_that_is_equal_is_left_out(tmp_path: Path) -> None:
    module = text_folder(tmp_path / "model", "gemma2")
    more_tensors(tmp_path / "model", {"lm_head.weight": module.lm_head.weight.detach().clone()})
    written_again(tmp_path / "model", traced_of(tmp_path / "model"), tmp_path / "written")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype=torch.float32)
    assert torch.equal(logits_of(module), logits_of(loaded))


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2"])
def test_buffers_are_read_in_the_dtype_in_which_transformers_keeps_them(
    tmp_path: Path, family: str
) -> None:
    text_folder(tmp_path / "model", family)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    model = trace(ModuleSource(config=config), dtype="bfloat16", seq_len=SEQ_LEN)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    found, buffers = read_module_buffers(tmp_path / "model", model), dict(theirs.named_buffers())
    assert found and all(name.endswith("e_score_correction_bias") for name in found)
    for name, tensor in found.items():
        assert tensor.dtype == buffers[name].dtype
        assert torch.equal(tensor, buffers[name])


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2"])
def test_a_loss_is_that_of_the_stored_buffers_and_they_survive_a_stop(
    tmp_path: Path, family: str
) -> None:
    module = text_folder(tmp_path / "model", family)
    text = "It says what the other one has said, and no more than that."
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": text}) + "\n")
    run = tmp_path / "run"
    asked = (
        *("train", tmp_path / "model", tmp_path / "x.jsonl", "-o", run, "--tokenizer", "bytes"),
        *("--seq-len", 64, "--tokens-per-step", 64, "--learning-rate", "1e-12", "--machine", "cpu"),
        *("--steps", 2, "--save-every", 1, "--data-workers", 0, "--keep", 2),
    )
    assert call(*asked).code == 0
    ids = torch.tensor([list(text.encode())])
    with torch.no_grad():
        logits = module.eval()(input_ids=ids, use_cache=False).logits[0, :-1]
    expected = float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
    steps = events_of_kind(read_metrics(RunFiles(run).metrics), StepMetrics)
    assert steps[0].loss == pytest.approx(expected, abs=1e-5)
    kept = load_file(run / "model" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        if name.endswith("correction_bias"):
            assert torch.equal(kept[name], tensor)
    (run / "checkpoint-2" / "COMPLETE").unlink()
    assert call("train", "-o", run, "--resume").code == 0
    again = events_of_kind(read_metrics(RunFiles(run).metrics), StepMetrics)
    assert again[-1].loss == steps[-1].loss


def test_a_run_on_a_whole_model_goes_on_and_keeps_its_tower(tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    whole = whole_folder(model, "gemma3")
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "What it says, and no more."}) + "\n")
    asked = (
        *("train", model, tmp_path / "x.jsonl", "-o", run, "--tokenizer", "bytes", "--steps", 2),
        *("--seq-len", 32, "--tokens-per-step", 32, "--save-every", 1, "--machine", "cpu"),
        *("--data-workers", 0, "--keep", 2),
    )
    assert call(*asked).code == 0
    trained, before = (load_file(f / "model.safetensors") for f in (run / "model", model))
    (run / "checkpoint-2" / "COMPLETE").unlink()
    tower = next(name for name in before if name.startswith("vision_tower"))
    more_tensors(model, {tower: before[tower] + 1})
    told = call("train", "-o", run, "--resume")
    assert told.code == 2 and f"has {tower} with other values" in " ".join(told.err.split())
    more_tensors(model, {tower: before[tower]})
    assert call("train", "-o", run, "--resume").code == 0
    assert_same_tensors(run / "checkpoint-2", run / "model")
    again = load_file(run / "model" / "model.safetensors")
    changed = {name for name in again if not torch.equal(again[name], before[name])}
    assert changed == {name for name in before if "language_model" in name}
    assert all(torch.equal(again[name], trained[name]) for name in trained)
    _, about = type(whole).from_pretrained(run / "model", output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"]


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_a_config_alone_becomes_a_folder_of_the_text_part(tmp_path: Path, family: str) -> None:
    whole_folder(tmp_path / "model", family)
    (tmp_path / "model" / "model.safetensors").unlink()
    config = tmp_path / "model" / "config.json"
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "What it says, and no more."}) + "\n")
    step = ("--seq-len", 32, "--tokens-per-step", 64, "--machine", "cpu")
    assert call("plan", "--model", config, *step).code == 0
    told = call(
        *("train", config, tmp_path / "x.jsonl", "-o", tmp_path / "run", *step, "--steps", 1),
        *("--tokenizer", "bytes", "--data-workers", 0),
    )
    if family == "qwen2_5_vl":
        assert told.code == 2 and "give a folder with weights" in " ".join(told.err.split())
        return
    kind: Any = transformers.Gemma3ForCausalLM
    _, about = kind.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"]


OWN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("features", torch.randn(32))
        self.register_buffer("passing", torch.ones(32), persistent=False)
    def forward(self, x):
        return x + torch.relu(self.linear(x * self.features)) * self.passing

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(260, 32), nn.Linear(32, 260)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""


def test_buffers_of_an_own_module_are_written_as_they_were_computed_with(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    model = trace(python_source(own, "Model"), dtype="float32", seq_len=SEQ_LEN)
    torch.manual_seed(5)
    module = object_of_file(own, "Model")()
    groups = dict(flat_groups(model, dict(module.named_parameters())))
    torch.manual_seed(7)  # another process
    computed = dict(ModuleProgram(model).module.named_buffers())
    (tmp_path / "written").mkdir()
    ModuleOutline.of(model).write(tmp_path / "written", groups.__getitem__)
    written = load_file(tmp_path / "written" / "model.safetensors")
    module.load_state_dict(written, strict=True)
    assert all(torch.equal(x, computed[name]) for name, x in module.named_buffers())
    again = dict(read_module_parameters(tmp_path / "written", model))
    assert all(torch.equal(again[group], groups[group]) for group in groups)
