"""Reading Hugging Face's config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.published_configs import (
    CONFIGS,
    META_LLAMA_3_1_8B,
    META_LLAMA_3_8B,
    QWEN2_5_0_5B,
    QWEN3_0_6B,
    read_config,
)
from twinstream.models.decoders.config import UnsupportedConfigError
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.options import RopeScaling
from twinstream.models.presets import load_model, model_notes

SMALL_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("model_type", "num_parameters"),
    [
        ("llama", 8_030_261_248),
        ("mistral", 7_248_023_552),
        ("qwen2", 494_032_768),
        ("qwen3", 596_049_920),
    ],
)
def test_published_configs_give_the_published_number_of_parameters(
    model_type: str, num_parameters: int, tmp_path: Path
) -> None:
    assert read_config(tmp_path, CONFIGS[model_type]).num_parameters == num_parameters


def test_every_field_of_a_published_config_arrives(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    assert read_config(folder, QWEN3_0_6B) == ModelSpec(
        name="Qwen3-0.6B",
        num_layers=28,
        d_model=1024,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        d_ff=3072,
        vocab_size=151936,
        norm_eps=1e-6,
        rope_theta=1e6,
        qk_norm=True,
        qkv_bias=False,
        tied_embeddings=True,
        dtype="bfloat16",
    )


def test_only_qwen2_has_qkv_bias_and_only_qwen3_has_qk_norm(tmp_path: Path) -> None:
    options = {name: read_config(tmp_path, config) for name, config in CONFIGS.items()}
    assert [name for name, spec in options.items() if spec.qkv_bias] == ["qwen2"]
    assert [name for name, spec in options.items() if spec.qk_norm] == ["qwen3"]


def test_qwen2_has_its_bias_whatever_attention_bias_says(tmp_path: Path) -> None:
    for told in (True, False):
        assert read_config(tmp_path, QWEN2_5_0_5B | {"attention_bias": told}).qkv_bias


@pytest.mark.parametrize("model_type", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_transformers_saves_is_read_and_counts_the_same_parameters(
    model_type: str, tied: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    options = {"tie_word_embeddings": tied, "sliding_window": None, "rms_norm_eps": 3e-6}
    if model_type == "Llama":
        del options["sliding_window"]
    if model_type != "Qwen2":
        options["head_dim"] = 24
    config = getattr(transformers, f"{model_type}Config")(**SMALL_SIZES, **options)
    config.save_pretrained(tmp_path)
    spec = ModelSpec.from_hf_config(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, f"{model_type}ForCausalLM")(config)
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())
    assert (spec.tied_embeddings, spec.norm_eps, spec.dtype) == (tied, 3e-6, "float32")
    assert spec.head_dim == (16 if model_type == "Qwen2" else 24)


def test_the_dtype_and_rope_theta_that_transformers_saves_are_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": 123_456.0}
    config = transformers.LlamaConfig(**SMALL_SIZES, dtype="bfloat16", rope_parameters=rope)
    config.save_pretrained(tmp_path)
    spec = ModelSpec.from_hf_config(tmp_path)
    assert (spec.dtype, spec.rope_theta) == ("bfloat16", 123_456.0)


def test_llama_3_1_is_read_with_its_rope_scaling(tmp_path: Path) -> None:
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    spec = read_config(tmp_path, META_LLAMA_3_1_8B)
    assert spec.rope_scaling == scaling
    assert spec.model_copy(update={"rope_scaling": None}) == read_config(tmp_path, META_LLAMA_3_8B)
    transformers = pytest.importorskip("transformers")
    rope = {"rope_theta": 5e5, **META_LLAMA_3_1_8B["rope_scaling"]}
    transformers.LlamaConfig(**SMALL_SIZES, rope_parameters=rope).save_pretrained(tmp_path)
    saved = ModelSpec.from_hf_config(tmp_path)
    assert (saved.rope_scaling, saved.rope_theta) == (scaling, 5e5)


@pytest.mark.parametrize(
    ("changes", "rope_theta"),
    [
        ({"rope_theta": 7e5}, 7e5),
        ({"rope_theta": None}, 1e4),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 8e5}}, 8e5),
        ({"rope_theta": 8e5, "rope_parameters": {"rope_theta": 8e5, "rope_type": "default"}}, 8e5),
        ({"rope_theta": 6e5, "rope_scaling": {"type": "default"}}, 6e5),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 9, "type": "default"}}, 9.0),
        ({"rope_parameters": {"partial_rotary_factor": 1.0}}, 5e5),
        ({"partial_rotary_factor": 1.0}, 5e5),
    ],
)
def test_rope_theta_is_read_in_its_old_and_new_form(
    changes: dict[str, Any], rope_theta: float, tmp_path: Path
) -> None:
    assert read_config(tmp_path, META_LLAMA_3_8B | changes).rope_theta == rope_theta


def test_absent_keys_mean_what_they_mean_to_transformers(tmp_path: Path) -> None:
    optional = (
        "attention_bias", "hidden_act", "num_key_value_heads", "rms_norm_eps", "rope_scaling",
        "rope_theta", "tie_word_embeddings", "torch_dtype",
    )  # fmt: skip
    spec = read_config(tmp_path, META_LLAMA_3_8B, without=optional)
    assert (spec.num_kv_heads, spec.head_dim) == (32, 128)
    assert (spec.norm_eps, spec.rope_theta) == (1e-6, 1e4)
    assert (spec.tied_embeddings, spec.dtype) == (False, "float32")
    assert read_config(tmp_path, QWEN3_0_6B, without=("head_dim",)).head_dim == 128


def test_dtype_wins_over_torch_dtype(tmp_path: Path) -> None:
    changes = {"dtype": "float32", "torch_dtype": "bfloat16"}
    assert read_config(tmp_path, META_LLAMA_3_8B | changes).dtype == "float32"


def test_a_file_of_another_name_names_the_model(tmp_path: Path) -> None:
    file = tmp_path / "my-llama.json"
    file.write_text(json.dumps(META_LLAMA_3_8B))
    assert ModelSpec.from_hf_config(file).name == "my-llama"


def test_keys_of_smollm2_that_say_nothing_new_are_read_and_others_refused(tmp_path: Path) -> None:
    config = META_LLAMA_3_8B | {"is_llama_config": True, "rope_interleaved": False}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert ModelSpec.from_hf_config(path).num_layers == 32
    path.write_text(json.dumps(config | {"rope_interleaved": True}))
    with pytest.raises(UnsupportedConfigError, match="rope_interleaved = True"):
        ModelSpec.from_hf_config(path)


def test_a_dtype_that_was_given_is_taken_whatever_the_file_says(tmp_path: Path) -> None:
    for told in ("float16", "float8_e4m3fn", None):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(META_LLAMA_3_8B | {"torch_dtype": told}))
        assert load_model(path, dtype="bfloat16").dtype == "bfloat16"
    path.write_text(json.dumps(META_LLAMA_3_8B | {"torch_dtype": "float16"}))
    assert load_model(path).dtype == "bfloat16" and load_model(path, dtype="float32")
    [note] = model_notes(path, None)
    assert "is in float16" in note and "rounded to bfloat16. --dtype float32 keeps" in note
    assert model_notes(path, "float32") == []
    path.write_text(json.dumps(META_LLAMA_3_8B | {"torch_dtype": "float64"}))
    [note] = model_notes(path, None)
    assert "states float64, in which nothing is trained here: float32 is taken." in note
    assert load_model("8b", dtype="float32").dtype == "float32"


WINDOWS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "of mistral": ("mistral", {"sliding_window": 4096}, 4096),
    "of mistral, by leaving it out": ("mistral", {"sliding_window": ...}, 4096),
    "of mistral, none": ("mistral", {"sliding_window": None}, None),
    "of qwen2, not in use": ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, None),
    "of qwen2": ("qwen2", {"sliding_window": 16, "use_sliding_window": True}, 16),
    "of qwen3, none": ("qwen3", {"sliding_window": None, "use_sliding_window": True}, None),
    "of qwen3, by leaving it out": (
        "qwen3", {"sliding_window": ..., "use_sliding_window": True}, 4096,
    ),
    "of some layers": (
        "qwen3",
        {"sliding_window": 64, "use_sliding_window": True,
         "layer_types": ["full_attention", "sliding_attention"]},
        64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_that_no_sequence_exceeds_is_full_attention(name: str, tmp_path: Path) -> None:
    model_type, changes, window = WINDOWS[name]
    config = {k: v for k, v in (CONFIGS[model_type] | changes).items() if v is not ...}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    if window is None:
        assert load_model(path) == load_model(path, longest=10**6)
        return
    assert load_model(path, longest=window) == load_model(path, longest=1)
    for longest in (None, window + 1):
        with pytest.raises(UnsupportedConfigError, match=f"--seq-len up to {window}"):
            load_model(path, longest=longest)


def test_transformers_computes_the_same_up_to_the_window_and_otherwise_beyond() -> None:
    """The window of W tokens has the token itself among them."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    ids = torch.arange(9).view(1, 9) * 7 % 96
    found = {}
    for window in (8, None):
        torch.manual_seed(0)
        config = transformers.MistralConfig(**SMALL_SIZES, sliding_window=window)
        model = transformers.MistralForCausalLM(config).eval()
        with torch.no_grad():
            found[window] = model(ids).logits
    assert torch.equal(found[8][:, :8], found[None][:, :8])
    assert not torch.allclose(found[8][:, 8], found[None][:, 8], atol=1e-5)


def test_keys_that_say_nothing_are_passed_over_and_told_in_a_line(tmp_path: Path) -> None:
    known = {
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "unk_token_id": 0,
        "max_sequence_length": 2048, "_model_name_or_path": "x",
    }  # fmt: skip
    unknown = {
        "auto_map": {}, "_of_some_trainer": {"a": 1}, "tokenizer_padding_side": "right",
        "base_model_name_or_path": "y", "image_token_id": 7, "some_version": "1", "expert": None,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(META_LLAMA_3_8B | known))
    plain = load_model(path)
    assert model_notes(path, None) == []
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(META_LLAMA_3_8B | known | unknown).encode())
    assert load_model(path) == plain
    [note] = model_notes(path, None)
    assert note.endswith(f"not read, since nothing follows from it: {', '.join(unknown)}.")
    for key, value in (("use_rope", False), ("logit_scale", 2.0), ("head_scale", [1.0])):
        path.write_text(json.dumps(META_LLAMA_3_8B | {key: value}))
        with pytest.raises(UnsupportedConfigError, match=key):
            load_model(path)
