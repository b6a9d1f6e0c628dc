"""A Hugging Face config.json for a model that came without one."""

from pathlib import Path
from typing import Any

from twinstream.models.decoders.config import HfConfigError, config_fields
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.options import Experts

# The longest sequence that a plain RoPE is said to be for: generation and serving ask for one, and
# no computation depends on it.
MAX_POSITIONS = 32_768

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}


def to_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The keys of a config.json that transformers 4 and 5 load as this model.

    `ModelSpec.from_hf_config` reads it back, but for the name, which is that of the folder, and a
    width that no layer has. A model without biases and norms of Q and K is a llama, from whatever
    it was read.

    Raises:
        HfConfigError: no supported family computes all that the model asks for.
    """
    model_type = _model_type(spec)
    config = _config(spec, model_type)
    read = ModelSpec.model_validate(config_fields(Path("config.json"), config))
    is_used = any(kind.experts is None for kind, _ in spec.layer_kinds)
    found = [
        f"{name} = {getattr(spec, name)}"
        for name in ModelSpec.model_fields
        if getattr(spec, name) != getattr(read, name)
        and name != "name"
        and (name != "d_ff" or is_used)
    ]
    if found:
        problem = f"model '{spec.name}' has {'; '.join(found)}, which a {model_type} has not"
        raise HfConfigError(path="config.json", problem=problem)
    return config


def _config(spec: ModelSpec, model_type: str) -> dict[str, Any]:
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
    if model_type not in ("qwen2", "qwen2_moe"):
        config["attention_bias"] = False
    if model_type == "llama":
        config["mlp_bias"] = False
    elif model_type == "mixtral" or "qwen" in model_type:
        config |= {"sliding_window": None, "use_sliding_window": False}
    if spec.experts is not None:
        config |= _expert_keys(spec, spec.experts, model_type)
    return config


def _expert_keys(spec: ModelSpec, experts: Experts, model_type: str) -> dict[str, Any]:
    """Counts under the names of transformers 4, which 5 reads too."""
    found: dict[str, Any] = {"num_experts_per_tok": experts.per_token}
    if model_type in ("mixtral", "olmoe"):
        found["intermediate_size"] = experts.d_ff
    else:
        found["moe_intermediate_size"] = experts.d_ff
    if model_type != "mixtral":
        found["norm_topk_prob"] = experts.normalized
    if model_type in ("dots1", "glm4_moe"):
        found |= {
            "n_routed_experts": experts.count,
            "n_shared_experts": experts.shared_d_ff // experts.d_ff,
            "n_group": experts.num_groups,
            "topk_group": experts.groups_per_token,
            "routed_scaling_factor": experts.scale,
            "first_k_dense_replace": len(experts.dense_layers),
        }
        if model_type == "glm4_moe":
            found |= {"use_qk_norm": spec.qk_norm, "partial_rotary_factor": 1.0,
                      "num_nextn_predict_layers": 0}  # fmt: skip
        return found
    found["num_local_experts" if model_type == "mixtral" else "num_experts"] = experts.count
    if "qwen" in model_type:
        found |= {"mlp_only_layers": list(experts.dense_layers), "decoder_sparse_step": 1}
    if model_type == "qwen2_moe":
        found["shared_expert_intermediate_size"] = experts.shared_d_ff
    found |= {"output_router_logits": experts.aux_loss > 0}
    if experts.aux_loss:
        found["router_aux_loss_coef"] = experts.aux_loss
    return found


def _model_type(spec: ModelSpec) -> str:
    if spec.experts is not None:
        return _expert_model_type(spec, spec.experts)
    if spec.qkv_bias and spec.qk_norm:
        problem = (
            f"model '{spec.name}' has qkv_bias (qwen2) and qk_norm (qwen3), which no supported "
            "family has both: set one of them to false"
        )
        raise HfConfigError(path="config.json", problem=problem)
    if spec.qk_norm:
        return "qwen3"
    return "qwen2" if spec.qkv_bias else "llama"


def _expert_model_type(spec: ModelSpec, experts: Experts) -> str:
    """The family that computes alike; glm4_moe has no norms of Q and K here, dots1 has."""
    if experts.scores == "sigmoid":
        return "dots1" if spec.qk_norm else "glm4_moe"
    if spec.qk_norm_rows:
        return "olmoe"
    if spec.qk_norm:
        return "qwen3_moe"
    return "qwen2_moe" if spec.qkv_bias or experts.shared_d_ff else "mixtral"
