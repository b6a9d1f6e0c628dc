"""Config.json of DeepSeek-V3, Kimi K2 and gpt-oss: read to be priced, and refused by what runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.active_parameters import active_parameters
from twinstream.models.decoders.config import HfConfigError, is_own_config
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.presets import config_of, load_model, load_preset
from twinstream.models.providers.flops import model_flops_per_sequence
from twinstream.models.providers.model import NotExecutableError, require_executable

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0,
    "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "factor": 40, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


def read(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder)


def sizes(spec: ModelSpec) -> dict[str, Any]:
    values_only = {"name", "norm_eps", "rope_theta"}
    return {name: value for name, value in spec if name not in values_only}


def test_deepseek_v3_has_671_billion_parameters_and_37_active(tmp_path) -> None:
    spec = read(tmp_path, DEEPSEEK_V3)
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    layer = attention + 1536 + 512 + 2 * 7168
    expert, dense = 3 * 7168 * 2048, 3 * 7168 * 18432
    ends = 2 * 129280 * 7168 + 7168
    by_hand = 61 * layer + 3 * dense + 58 * (257 * expert + 256 * 7168) + ends
    # deepseek-ai/DeepSeek-V3, README: 671B, 37B activated; its index has 58 x 256 biases more
    assert spec.num_parameters == by_hand == 671_026_404_352
    assert active_parameters(spec) == by_hand - 58 * 248 * expert == 37_552_282_624
    assert sizes(spec) == sizes(load_preset("deepseek-v3"))


def test_flops_of_latent_attention_are_those_that_megatron_bridge_prints() -> None:
    """25.11, "w/o MTP": 1,003 TFLOP/s at 4,018 tokens/s, 1,088 at 4,357; Kimi K2 1,099 at 5,372."""
    for name, printed in (
        ("deepseek-v3", 249.67e9),
        ("kimi-k2", 204.58e9),
        ("gpt-oss-120b", 32.58e9),
    ):
        each = model_flops_per_sequence(load_model(name), 4096) / 4096
        assert each == pytest.approx(printed, rel=0.005)


def test_kimi_k2_has_a_trillion_parameters_and_32_billion_active(tmp_path) -> None:
    changed = {
        "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
        "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.827, "vocab_size": 163840, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    spec = read(tmp_path, DEEPSEEK_V3 | changed)
    assert sizes(spec) == sizes(load_preset("kimi-k2"))
    # moonshotai/Kimi-K2-Base, README: 1T, 32B activated
    assert (spec.num_parameters, active_parameters(spec)) == (1_026_408_209_408, 32_861_477_888)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("gpt-oss-20b", 20_914_757_184, 3.61e9), ("gpt-oss-120b", 116_829_156_672, 5.13e9)],
)
def test_gpt_oss_has_the_parameters_of_its_model_card(name, total, active) -> None:
    """arXiv:2508.10925, table 1: active parameters without the embedding."""
    spec = load_model(name)
    assert spec.num_parameters == total
    embedding = spec.vocab_size * spec.d_model
    assert active_parameters(spec) - embedding == pytest.approx(active, rel=0.002)
    assert spec.window is not None and len(spec.window.full_layers) == spec.num_layers // 2


def test_they_are_refused_by_what_runs_and_other_code_computes_a_folder(tmp_path) -> None:
    spec = read(tmp_path, DEEPSEEK_V3)
    with pytest.raises(NotExecutableError, match=r"clusters only.*latent attention has no kernels"):
        require_executable(spec)
    assert not is_own_config(tmp_path)  # so `find_model` traces it


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kv_lora_rank": None}, "key 'kv_lora_rank' is missing"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank = '512'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 (only 1 is priced)"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"index_topk": 2048}, "index_topk = 2048 (unknown key)"),
        ({"first_k_dense_replace": 99}, "layer 98 is to be dense, of 61 layers"),
        ({"num_key_value_heads": 8}, "as many heads of keys as of queries"),
    ],
)
def test_what_is_not_priced_is_refused_by_name(tmp_path, change, told) -> None:
    with pytest.raises(HfConfigError) as caught:
        read(tmp_path, DEEPSEEK_V3 | change)
    assert told in str(caught.value)


def test_windows_of_layers_are_read(tmp_path) -> None:
    config = json.loads(Path(config_of("gpt-oss-20b")).read_text())
    types = ["sliding_attention"] * 23 + ["full_attention"]
    spec = read(tmp_path, config | {"layer_types": types})
    assert spec.window is not None and spec.window.full_layers == (23,)
    assert [spec.layer(layer).window is None for layer in (0, 22, 23)] == [False, False, True]
    assert read(tmp_path, config | {"sliding_window": None}).window is None
