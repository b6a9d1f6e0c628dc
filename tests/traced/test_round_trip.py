"""What a folder stores comes back: every tensor with its values, in a class of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.traced.families import FAMILIES, REFUSED, tiny_config
from twinstream.executor.modules.tracing import trace
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.traced.module_folder import (
    ModuleOutline,
    read_module_buffers,
    read_module_parameters,
    write_module_folder,
)
from twinstream.models.traced import ModuleSource, TracedModel

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
    write_module_folder(destination, ModuleOutline.of(model, folder), groups.__getitem__)


def assert_same_folder(folder: Path, written: Path, module: Any) -> None:
    """Every tensor of the files, and the module that its own class makes of them."""
    before, after = (load_file(f / "model.safetensors") for f in (folder, written))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    kind: Any = type(module)
    loaded, about = kind.from_pretrained(written, dtype=torch.float32, output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"]
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected, found = (one.eval()(input_ids=ids, use_cache=False).logits for one in (module, loaded))
    assert torch.equal(expected, found)


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
