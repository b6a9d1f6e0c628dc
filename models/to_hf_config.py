"""A Hugging Face config.json for a model that came without one."""

from typing import Any

from twinstream.models.hf.config import HfConfigError
from twinstream.models.spec import ModelSpec

# The longest sequence that a plain RoPE is said to be for: generation and serving ask for one, and
# no computation depends on it.
MAX_POSITIONS = 32_768

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def to_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The keys of a config.json that transformers 4 and 5 load as this model.

    `ModelSpec.from_hf_config` reads it back, but for the name, which is that of the folder. A
    model without biases and norms of Q and K is a llama, from whatever it was read.

    Raises:
        HfConfigError: no supported family has both a bias and norms of Q and K.
    """
    model_type = _model_type(spec)
    scaling = spec.rope_scaling
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]],
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.d_model,
        "initializer_range": 0.02,
        "intermediate_size": spec.d_ff,
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": model_type,
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "rope_scaling": None,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tied_embeddings,
        "torch_dtype": spec.dtype,
        "use_cache": True,
        "vocab_size": spec.vocab_size,
    }
    if scaling is not None:
        config["rope_scaling"] = {"rope_type": "llama3", **scaling.model_dump()}
        stretched = scaling.factor * scaling.original_max_position_embeddings
        config["max_position_embeddings"] = int(stretched)
    if model_type != "qwen2":
        config["attention_bias"] = False
    if model_type == "llama":
        config["mlp_bias"] = False
    else:
        config |= {"sliding_window": None, "use_sliding_window": False}
    return config


def _model_type(spec: ModelSpec) -> str:
    if spec.qkv_bias and spec.qk_norm:
        problem = (
            f"model '{spec.name}' has qkv_bias (qwen2) and qk_norm (qwen3), which no supported "
            "family has both: set one of them to false"
        )
        raise HfConfigError(path="config.json", problem=problem)
    if spec.qk_norm:
        return "qwen3"
    return "qwen2" if spec.qkv_bias else "llama"
