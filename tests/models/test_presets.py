"""Shapes by name: their published numbers of parameters, and config.json files."""

import csv
import json
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

import twinstream.models.presets
from tests.models.active_parameters import active_parameters
from tests.models.published_configs import META_LLAMA_3_8B
from twinstream.models.decoders.config import HfConfigError, UnsupportedConfigError
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.decoders.to_hf_config import to_hf_config
from twinstream.models.presets import (
    UnknownModelError,
    config_of,
    load_model,
    load_preset,
    preset_names,
    preset_source,
    require_weights,
)

# In billions, as printed: model cards, arXiv:2005.14165, 2104.04473 (table 1), 2205.05198 (table 3)
PUBLISHED = {
    "llama2-7b": "6.74", "llama2-13b": "13.02", "llama2-70b": "68.98", "llama3-8b": "8.03",
    "llama3-70b": "70.55", "llama3-405b": "405.85", "mixtral-8x7b": "46.7",
    "mixtral-8x22b": "140.6",
    "qwen3-30b-a3b": "30.5", "qwen3-235b-a22b": "235.1", "gpt3-175b": "174.6", "gpt-1.7b": "1.7",
    "gpt-3.6b": "3.6", "gpt-7.5b": "7.5", "gpt-18b": "18.4", "gpt-39b": "39.1", "gpt-76b": "76.1",
    "gpt-145b": "145.6", "gpt-310b": "310.1", "gpt-530b": "529.6", "gpt-1t": "1008.0",
    "megatron-22b": "22.1",
    "turing-530b": "529.6", "megatron-1t": "1008.0", "megascale-175b": "175",
    "megascale-530b": "530",
    "nemotron4-340b": "341",
    # as the model cards print them, or the hub counts the weights
    "qwen3-0.6b": "0.6", "qwen3-1.7b": "1.7", "qwen3-4b": "4.0", "qwen3-8b": "8.2",
    "qwen3-14b": "14.8", "qwen3-32b": "32.8", "llama3.2-1b": "1.24", "llama3.2-3b": "3.21",
    "mistral-7b": "7.25", "mistral-nemo-12b": "12.2", "mistral-small-24b": "23.6",
    "phi-4": "14.7",
}  # fmt: skip
# mosaicml/llm-foundry scripts/train/benchmarking/README.md, at 2,048 tokens
PRINTED_BY_MOSAIC = {
    "mpt-125m": 125311488, "mpt-350m": 355985408, "mpt-760m": 760470528, "mpt-1b": 1315950592,
    "mpt-3b": 2651837440, "mpt-7b": 6658859008, "mpt-13b": 12853954560, "mpt-30b": 29975214080,
    "mpt-70b": 64862437376,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "model_type": "mixtral",
    "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "rope_theta": 1e6,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}  # fmt: skip
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip

GLM4_MOE = {
    "architectures": ["Glm4MoeForCausalLM"], "head_dim": 128, "hidden_size": 512,
    "intermediate_size": 1024, "model_type": "glm4_moe", "moe_intermediate_size": 128,
    "n_routed_experts": 8, "num_attention_heads": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 4, "num_key_value_heads": 2, "torch_dtype": "bfloat16",
    "vocab_size": 1000,
}  # fmt: skip


def folder(tmp_path: Path, config: dict[str, object], name: str) -> Path:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path / name


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_under_its_name(name) -> None:
    assert load_model(name).name == name
    assert preset_source(name)


def test_every_table_is_a_preset() -> None:
    files = (Path(twinstream.models.presets.__file__).parent / "presets").glob("*.toml")
    tables = [name for file in files for name in tomllib.loads(file.read_text())]
    assert len(tables) == len(set(tables)), "a name is in two files"
    assert set(tables) == set(preset_names())


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_those_published(name) -> None:
    _, _, decimals = PUBLISHED[name].partition(".")
    assert f"{load_model(name).num_parameters / 1e9:.{len(decimals)}f}" == PUBLISHED[name]


NOT_EMBEDDED = {"qwen3-0.6b": "0.44", "qwen3-1.7b": "1.4", "qwen3-4b": "3.6", "qwen3-8b": "6.95",
                "qwen3-14b": "13.2", "qwen3-32b": "31.2"}  # fmt: skip


@pytest.mark.parametrize("name", sorted(NOT_EMBEDDED))
def test_parameters_that_are_no_embeddings_are_those_of_the_model_cards(name) -> None:
    spec = load_model(name)
    tables = 1 if spec.tied_embeddings else 2
    rest = spec.num_parameters - tables * spec.vocab_size * spec.d_model
    digits = len(NOT_EMBEDDED[name].partition(".")[2])
    assert f"{rest / 1e9:.{digits}f}" == NOT_EMBEDDED[name]


@pytest.mark.parametrize(
    ("name", "own"),
    [("Qwen/Qwen3-8B", "qwen3-8b"), ("QWEN3-8b", "qwen3-8b"), ("Qwen3-8B-Base", "qwen3-8b"),
     ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b"), ("Llama-3.2-1B", "llama3.2-1b"),
     ("mistral-nemo", "mistral-nemo-12b"), ("microsoft/phi-4", "phi-4"), ("8B", "8b"),
     ("Qwen3-30B-A3B", "qwen3-30b-a3b")],
)  # fmt: skip
def test_models_have_the_names_of_the_hub_in_any_case(name, own) -> None:
    assert load_model(name).name == own


def test_a_folder_wins_over_a_model_of_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("qwen3-8b", "Qwen3-8B"):
        folder(tmp_path, META_LLAMA_3_8B, name)
        assert load_model(name).vocab_size == 128256


@pytest.mark.parametrize(
    ("name", "own"),
    [("gemma-3-4b", "gemma-3-4b"), ("google/gemma-3-1b-pt", "gemma-3-1b"),
     ("Gemma-3-27b-it", "gemma-3-27b"), ("microsoft/Phi-4-mini-instruct", "phi-4-mini")],
)  # fmt: skip
def test_models_without_kernels_here_are_traced_by_their_names(name, own) -> None:
    assert Path(config_of(name)).parent.name == own
    with pytest.raises(UnknownModelError, match=r"traced from transformers' own|hf download"):
        load_model(name)  # as clusters do


def test_a_traced_model_of_a_family_that_is_priced_is_priced_by_its_name() -> None:
    assert Path(config_of("GPT-OSS-20B")).parent.name == "gpt-oss-20b"
    assert load_model("GPT-OSS-20B").num_parameters == 20_914_757_184


def test_a_folder_wins_over_a_traced_model_of_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gemma-3-4b").mkdir()
    assert config_of("gemma-3-4b") == "gemma-3-4b" and config_of(Path("x")) == Path("x")


def test_a_folder_of_an_adapter_says_that_its_base_is_the_model(tmp_path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(HfConfigError, match=r"has an adapter .*; give its base"):
        load_model(str(tmp_path))


def test_weights_of_the_hub_are_not_random_ones() -> None:
    for name in ("Qwen/Qwen3-8B", "Qwen3-8B"):
        with pytest.raises(UnknownModelError, match="hf download Qwen/Qwen3-8B"):
            require_weights(name)
    with pytest.raises(UnknownModelError, match="hf download google/gemma-3-4b-it"):
        require_weights("google/gemma-3-4b-it")
    for name in ("qwen3-8b", "8B", "gemma-3-4b"):
        require_weights(name)


@pytest.mark.parametrize("name", sorted(PRINTED_BY_MOSAIC))
def test_parameters_are_those_mosaic_prints(name) -> None:
    assert load_model(name).num_parameters == PRINTED_BY_MOSAIC[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.2), ("qwen3-30b-a3b", 3.4),
     ("qwen3-235b-a22b", 22.2)],
)  # fmt: skip
def test_active_parameters(name, billions) -> None:
    # told are 12.9, 39, 3.3 and 22
    assert round(active_parameters(load_model(name)) / 1e9, 1) == billions


def test_the_recipe_of_the_405b_has_other_key_heads_than_the_model() -> None:
    assert load_model("llama3.1-405b").num_kv_heads == 8
    assert load_model("llama3.1-405b-nemo").num_kv_heads == 16


def test_a_model_with_two_names_is_one() -> None:
    assert load_model("llama3-8b") == load_model("8b") == load_model(load_preset("8b"))


def test_a_folder_of_a_dense_model(tmp_path) -> None:
    loaded = load_model(folder(tmp_path, META_LLAMA_3_8B, "8b"))
    assert loaded == load_model("8b")


@pytest.mark.parametrize(
    ("config", "name"), [(MIXTRAL, "mixtral-8x7b"), (QWEN3_MOE, "qwen3-30b-a3b")]
)
def test_a_folder_of_a_model_with_experts(tmp_path, config, name) -> None:
    assert load_model(str(folder(tmp_path, config, name))) == load_model(name)


def test_transformers_5_names_the_experts_of_qwen_otherwise(tmp_path) -> None:
    renamed = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    renamed["num_local_experts"] = QWEN3_MOE["num_experts"]
    assert load_model(folder(tmp_path, renamed, "qwen3-30b-a3b")) == load_model("qwen3-30b-a3b")


@pytest.mark.parametrize(
    ("keys", "dense"),
    [({"mlp_only_layers": [0, 3]}, (0, 3)), ({"decoder_sparse_step": 16}, tuple(
        i for i in range(48) if i not in (15, 31, 47)))],
)  # fmt: skip
def test_layers_without_experts(tmp_path, keys, dense) -> None:
    spec = load_model(folder(tmp_path, QWEN3_MOE | keys, "qwen3-30b-a3b"))
    assert spec.experts.dense_layers == dense
    assert spec.layer(dense[0]).experts is None and spec.layer(47 - (47 in dense)).experts
    whole = load_model("qwen3-30b-a3b")
    routed = 128 * 3 * 2048 * 768 + 128 * 2048
    assert whole.num_parameters - spec.num_parameters == len(dense) * (routed - 3 * 2048 * 6144)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (MIXTRAL | {"sliding_window": 4096}, "sliding_window = 4096"),
        (MIXTRAL | {"hidden_act": "gelu"}, "only silu is"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "routers have no noise here"),
        (META_LLAMA_3_8B | {"num_experts": 8}, "there are no experts in llama"),
        (META_LLAMA_3_8B | {"use_qk_norm": True}, "it is no key of llama"),
        (MIXTRAL | {"first_k_dense_replace": 1}, "it is no key of mixtral"),
        (QWEN3_MOE | {"shared_expert_intermediate_size": 8}, "it is no key of qwen3_moe"),
        (GLM4_MOE, "partial_rotary_factor = 'absent, which means 0.5'"),
        (GLM4_MOE | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (QWEN3_MOE | {"attention_bias": True}, "attention_bias = True"),
        (
            QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 4096},
            "only full causal attention",
        ),
    ],
)
def test_what_a_model_does_not_have_is_refused(tmp_path, config, told) -> None:
    with pytest.raises(UnsupportedConfigError, match=told):
        load_model(folder(tmp_path, config, "other"))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({k: v for k, v in MIXTRAL.items() if k != "num_local_experts"}, "num_local_experts"),
        ({k: v for k, v in QWEN3_MOE.items() if k != "num_experts"}, "'num_experts' is missing"),
        (QWEN3_MOE | {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (MIXTRAL | {"hidden_size": 4097}, "not a multiple of num_attention_heads"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "a token goes to 9 of 8 experts"),
        (MIXTRAL | {"vocab_size": "x"}, "vocab_size = 'x'"),
        ({}, "model_type"),
    ],
)
def test_a_broken_config_says_what_is_wrong(tmp_path, config, told) -> None:
    with pytest.raises(HfConfigError, match=told):
        load_model(folder(tmp_path, config, "other"))


def test_what_glm4_moe_means_by_saying_nothing(tmp_path) -> None:
    spec = load_model(folder(tmp_path, GLM4_MOE | {"partial_rotary_factor": 1.0}, "glm"))
    experts = spec.experts
    assert (experts.shared_d_ff, experts.dense_layers, experts.normalized) == (128, (0,), True)


def test_a_shared_expert_of_qwen2_moe_has_to_be_told(tmp_path) -> None:
    config = QWEN3_MOE | {"model_type": "qwen2_moe"}
    with pytest.raises(HfConfigError, match="'shared_expert_intermediate_size' is missing"):
        load_model(folder(tmp_path, config, "other"))


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("mixtral-8x7b", {"dense_layers": (1,)}, "a mixtral has not"),
        ("mixtral-8x7b", {"normalized": False}, "a mixtral has not"),
        ("mixtral-8x7b", {"scale": 2.0}, "a mixtral has not"),
        ("qwen3-30b-a3b", {"shared_d_ff": 768}, "a qwen3_moe has not"),
        ("mixtral-8x7b", {"shared_d_ff": 768}, "a qwen2_moe has not"),
        ("mixtral-8x7b", {"scores": "sigmoid", "correction_bias": False}, "a glm4_moe has not"),
    ],
)
def test_a_config_that_would_drop_something_is_refused(name, changes, told) -> None:
    spec = load_preset(name)
    experts = spec.experts.model_copy(update=changes)
    with pytest.raises(HfConfigError, match=told):
        to_hf_config(spec.model_copy(update={"experts": experts}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"shared_gate": True}, "shared_d_ff is 0"),
        ({"dense_layers": (1, 1)}, "each once and ascending"),
        ({"dense_layers": (48,)}, "layer 48 is to be dense, of 48 layers"),
        ({"num_groups": 3}, "cannot be chosen 8 a token from 1 of 3"),
        ({"per_token": 129}, "129 of 128 experts"),
    ],
)
def test_experts_that_make_no_sense_are_refused(changes, told) -> None:
    spec = load_preset("qwen3-30b-a3b")
    fields = spec.model_dump() | {"experts": spec.experts.model_dump() | changes}
    with pytest.raises(ValidationError, match=told):
        ModelSpec.model_validate(fields)


def test_an_unknown_name_says_the_nearest() -> None:
    with pytest.raises(UnknownModelError, match="did you mean 'mixtral-8x7b'") as told:
        load_model("mixtral-8x7")
    assert "\n" not in str(told.value)


def test_the_shapes_of_the_measured_tables() -> None:
    # from the recipes of NVIDIA/dgxc-benchmarking and mosaicml/llm-foundry, a source in each row
    table = Path(__file__).parent / "shapes" / "model_shapes.csv"
    rows = list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 16
    for row in rows:
        name = "llama3.1-405b-nemo" if row["model"] == "llama3.1-405b" else row["model"]
        shape = load_model(name)
        sizes = (shape.num_layers, shape.d_model, shape.d_ff, shape.num_heads, shape.num_kv_heads)
        assert sizes == tuple(
            int(row[k]) for k in ("n_layers", "hidden", "ffn", "heads", "kv_heads")
        )
        assert shape.vocab_size == int(row["vocab"])
        if row["mlp"]:
            assert shape.mlp == row["mlp"].removeprefix("fast-").replace("-", "_")
        if row["tied_embeddings"]:
            assert shape.tied_embeddings == (row["tied_embeddings"] == "true")
        told = (int(row["experts"]), int(row["experts_per_token"])) if row["experts"] else None
        assert told == (shape.experts and (shape.experts.count, shape.experts.per_token))
