"""Refusing, by name and in one message, what a config.json asks for and is not supported."""

import json
from pathlib import Path

import pytest

from tests.models.published_configs import (
    CONFIGS,
    META_LLAMA_3_1_8B,
    META_LLAMA_3_8B,
    MISTRAL_7B_V0_3,
    read_config,
)
from twinstream.models.decoders.config import HfConfigError, UnsupportedConfigError
from twinstream.models.decoders.quantization import QuantizedConfigError
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.presets import model_notes
from twinstream.tracing import find_model, path_notes

LLAMA_3_1 = META_LLAMA_3_1_8B["rope_scaling"]
YARN = {"rope_type": "yarn", "factor": 8.0}


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("llama", "rope_scaling", YARN),
        ("llama", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("qwen3", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}),
        ("llama", "sliding_window", 4096),
        ("mistral", "sliding_window", 4096),
        ("qwen2", "use_sliding_window", True),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention"]),
        ("llama", "mlp_bias", True),
        ("llama", "attention_bias", True),
        ("qwen3", "attention_bias", True),
        ("llama", "attention_dropout", 0.1),
        ("llama", "hidden_act", "gelu"),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "dtype", "float8_e4m3fn"),
        ("llama", "is_encoder_decoder", True),
        ("llama", "architectures", ["LlamaForSequenceClassification"]),
        ("llama", "num_local_experts", 8),
        ("llama", "auto_map", {"AutoModelForCausalLM": "modeling_mine.Mine"}),
        ("qwen2", "per_layer_config", {"0": {"num_attention_heads": 2}}),
    ],
)
def test_what_would_change_the_computation_is_refused_by_name_with_its_value(
    model_type: str, key: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedConfigError) as caught:
        read_config(tmp_path, CONFIGS[model_type] | {key: value})
    assert [(refusal.key, refusal.value) for refusal in caught.value.refusals] == [(key, value)]
    assert f"{key} = {value!r} (" in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("rope", "key", "value"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", 0.5),
        ({"factor": 2.0}, "factor", 2.0),
        (LLAMA_3_1 | {"beta_fast": 32.0}, "beta_fast", 32.0),
        (LLAMA_3_1 | {"type": "default"}, "type", "default"),
        ({"type": "llama3", "rope_type": "default"}, "type", "llama3"),
        ({"rope_theta": 1e6}, "rope_theta", 1e6),
        ({"full_attention": {"rope_theta": 1e4}}, "full_attention", {"rope_theta": 1e4}),
    ],
)
def test_an_entry_of_the_rope_dict_is_refused_by_its_own_name(
    rope: dict[str, object], key: str, value: object, tmp_path: Path
) -> None:
    config = META_LLAMA_3_8B | {"rope_parameters": rope}
    with pytest.raises(UnsupportedConfigError, match="rope_") as caught:
        read_config(tmp_path, config)
    if key == "rope_theta":  # contradicts the 500,000 at the top level
        assert "rope_theta = 500000.0 (rope_parameters.rope_theta says 1000000.0)" in str(
            caught.value
        )
    else:
        assert f"rope_parameters.{key} = {value!r} (" in str(caught.value)


@pytest.mark.parametrize("other", [LLAMA_3_1 | {"factor": 32.0}, {"rope_type": "default"}])
def test_two_rope_dicts_that_contradict_each_other_are_refused(
    other: dict[str, object], tmp_path: Path
) -> None:
    config = META_LLAMA_3_8B | {"rope_parameters": LLAMA_3_1, "rope_scaling": other}
    with pytest.raises(UnsupportedConfigError, match="rope_parameters says otherwise"):
        read_config(tmp_path, config)
    same = config | {"rope_scaling": LLAMA_3_1}
    assert read_config(tmp_path, same).rope_scaling is not None


def test_all_refusals_are_told_in_one_message(tmp_path: Path) -> None:
    config = META_LLAMA_3_8B | {"mlp_bias": True, "logit_scale": 2.0, "rope_scaling": YARN}
    with pytest.raises(UnsupportedConfigError) as caught:
        read_config(tmp_path, config)
    assert {refusal.key for refusal in caught.value.refusals} == {
        "mlp_bias", "logit_scale", "rope_scaling"
    }  # fmt: skip
    assert "\n" not in str(caught.value)


def test_a_long_value_is_cut_in_the_message_and_whole_on_the_error(tmp_path: Path) -> None:
    value = {"modules": ["layer"] * 1000}
    with pytest.raises(UnsupportedConfigError) as caught:
        read_config(tmp_path, META_LLAMA_3_8B | {"adapter_of_mine": value})
    assert len(str(caught.value)) < 600
    assert caught.value.refusals[0].value == value


@pytest.mark.parametrize("model_type", ["phi3", "gpt2", None, ["llama"]])
def test_an_unknown_model_type_is_refused_with_the_known_ones(
    model_type: object, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedConfigError, match="llama, mistral, qwen2, qwen3") as caught:
        read_config(tmp_path, META_LLAMA_3_8B | {"model_type": model_type})
    assert f"model_type = {model_type!r}" in str(caught.value)


def test_mistral_without_a_sliding_window_key_has_one_of_4096(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfigError, match=r"sliding_window = 4096 .*null"):
        read_config(tmp_path, MISTRAL_7B_V0_3, without=("sliding_window",))


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("llama", "model_type"),
        ("llama", "hidden_size"),
        ("llama", "intermediate_size"),
        ("llama", "num_hidden_layers"),
        ("llama", "num_attention_heads"),
        ("llama", "vocab_size"),
        ("mistral", "num_key_value_heads"),
        ("qwen3", "num_key_value_heads"),
    ],
)
def test_a_missing_key_is_named(model_type: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(HfConfigError, match=f"key '{key}' is missing"):
        read_config(tmp_path, CONFIGS[model_type], without=(key,))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", "4096", "hidden_size = '4096': Input should be a valid integer"),
        ("hidden_size", 4096.0, "hidden_size = 4096.0: Input should be a valid integer"),
        ("vocab_size", True, "vocab_size = True: Input should be a valid integer"),
        ("num_hidden_layers", 0, "num_hidden_layers = 0: Input should be greater than 0"),
        ("num_hidden_layers", 10**6, "num_hidden_layers = 1000000: Input should be less than or"),
        ("rms_norm_eps", "1e-5", "rms_norm_eps = '1e-5': Input should be a valid number"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps = nan: Input should be a finite number"),
        ("tie_word_embeddings", "no", "tie_word_embeddings = 'no': Input should be a valid bool"),
        ("rope_scaling", "none", "rope_scaling = 'none': Input should be"),
        ("rope_scaling", {"type": "llama3"}, "rope_scaling: key 'factor' is missing"),
        ("rope_parameters", LLAMA_3_1 | {"factor": None}, "rope_parameters: factor = None: Input"),
        (
            "rope_scaling",
            LLAMA_3_1 | {"original_max_position_embeddings": 10**400},
            "original_max_position_embeddings = ",
        ),
        ("rope_scaling", LLAMA_3_1 | {"factor": 0.5}, "rope_scaling: factor = 0.5: Input"),
        ("rope_scaling", LLAMA_3_1 | {"low_freq_factor": 4.0}, "low_freq_factor 4.0 is not below"),
        ("rope_parameters", {"rope_theta": "1"}, "rope_parameters.rope_theta = '1': Input"),
        ("layer_types", [1], "layer_types.0 = 1: Input should be a valid string"),
        ("num_key_value_heads", 5, "num_heads 32 is not a multiple of num_kv_heads 5"),
        ("num_attention_heads", 33, "hidden_size 4096 is not a multiple of num_attention_heads"),
        ("head_dim", 127, "head_dim 127 is odd"),
    ],
)
def test_a_wrong_value_is_one_message_that_names_it(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(HfConfigError) as caught:
        read_config(tmp_path, META_LLAMA_3_8B | {key: value})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"hidden_size": 4096,', "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"hidden_size": 1' + b"0" * 5000 + b"}", "is not valid JSON"),
        (b"[1, 2]", "is not a JSON object"),
    ],
    ids=["empty", "cut", "binary", "deep", "huge", "list"],
)
def test_a_broken_file_is_one_message_without_a_chained_traceback(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(HfConfigError, match=message) as caught:
        ModelSpec.from_hf_config(tmp_path)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert caught.value.path == tmp_path / "config.json"


def test_a_missing_file_and_a_folder_without_one_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(HfConfigError, match="there is no such file") as caught:
            ModelSpec.from_hf_config(path)
        assert str(tmp_path / "config.json") in str(caught.value)


FP8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
IN_4_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
READ: list[dict[str, object]] = [
    {"quant_method": "bitsandbytes", **IN_4_BITS}, IN_4_BITS, {"load_in_8bit": True}, {},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    {"quant_method": "fp8", "weight_block_size": [128, 128]}, {"quant_method": "fp8"},
    {"quant_method": "mxfp8"}, {"quant_method": "fbgemm_fp8"}, {"quant_method": "mxfp4"},
    {"quant_method": "modelopt", "quant_algo": "FP8"},
    {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": FP8}}},
    {"quant_method": "compressed-tensors",
     "config_groups": {"group_0": {"weights": FP8 | {"type": "int"}}}},
]  # fmt: skip
NOT_READ: list[tuple[object, str]] = [
    ({"quant_method": "gptq", "bits": 4}, "by gptq in 4 bits"), ({"quant_method": "awq"}, "by awq"),
    *(({"quant_method": one}, f"by {one} ") for one in ("hqq", "aqlm", "torchao", "quanto")),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "x"}, "'x'"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized",
      "config_groups": {"group_0": {"weights": FP8 | {"num_bits": 4, "type": "int"}}}},
     "int of 4 bits (pack-quantized)"),
    ({"quant_method": "compressed-tensors",
      "config_groups": {"a": {"weights": FP8 | {"type": "int", "symmetric": False}}}}, "int of 8"),
    ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "bitmask"}}, "bitmask"),
    (5, "quantization_config is 5"), ({"bits": 4}, "names no quant_method"), ("fp8", "'fp8'"),
]  # fmt: skip


@pytest.mark.parametrize("told", READ)
def test_codes_that_are_read_leave_a_model_as_it_is(
    told: dict[str, object], tmp_path: Path
) -> None:
    plain = read_config(tmp_path, META_LLAMA_3_8B)
    assert read_config(tmp_path, META_LLAMA_3_8B | {"quantization_config": told}) == plain
    assert bool(model_notes(tmp_path, None)) == bool(told)


@pytest.mark.parametrize(("told", "says"), NOT_READ)
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_codes_that_are_not_read_are_named_before_anything_is_planned(
    model_type: str, told: object, says: str, tmp_path: Path
) -> None:
    """Whether the family has kernels of ours or would be traced."""
    config = META_LLAMA_3_8B | {"model_type": model_type, "quantization_config": told}
    with pytest.raises(QuantizedConfigError, match=r"quantised .* Give the unquantised fol") as at:
        read_config(tmp_path, config)
    assert says in str(at.value)
    with pytest.raises(QuantizedConfigError):
        find_model(tmp_path)


def test_codes_that_only_a_file_beside_the_config_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    with pytest.raises(QuantizedConfigError, match=r"quantize_config\.json: .* by gptq in 4 bits"):
        read_config(tmp_path, META_LLAMA_3_8B)


def test_a_config_that_is_traced_says_why(tmp_path: Path) -> None:
    read_config(tmp_path, META_LLAMA_3_8B)
    assert path_notes(tmp_path, None, 128) == [] == path_notes("8b", None, 128)
    for changed, why in (({"mlp_bias": True}, "mlp_bias = True"),
                         ({"model_type": "gemma2"}, "there are none of gemma2")):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(META_LLAMA_3_8B | changed))
        [note] = path_notes(tmp_path, None, 128)
        assert "runs by transformers' own module" in note and why in note
