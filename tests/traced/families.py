"""Tiny configs of transformers' causal decoders, made from code: a general rule and exceptions."""

from typing import Any

from twinstream.executor.modules.packing_probe import NARROW, latent_heads

TINY = {
    **NARROW,
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 3
    ),
    **dict.fromkeys(("encoder_layers", "encoder_attention_heads"), 1),
    "encoder_ffn_dim": 32,
    "index_topk": 16,
}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_LINEAR = ["linear_attention", "full_attention", "linear_attention"]

# What a family needs besides; {} is nothing.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": _SLIDING, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": {},
    "axk2": {},
    "bamba": {"attn_layer_indices": [1]},
    "biogpt": {},
    "bitnet": {},
    "bloom": {},
    "codegen": {"rotary_dim": 8},
    "cohere": {},
    "cohere2": {"layer_types": _SLIDING},
    "cohere2_moe": {"layer_types": _SLIDING},
    "ctrl": {"dff": 96},
    "cwm": {"layer_types": _SLIDING},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "attn_pdrop": 0.0, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"topk_method": "greedy"},
    "deepseek_v3": {},
    "deepseek_v32": {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16},
    "deepseek_v4": {},
    "diffllama": {},
    "doge": {},
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 2},
    "exaone4": {"layer_types": _SLIDING, "sliding_window_pattern": 2},
    "exaone_moe": {"layer_types": _SLIDING, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "falcon": {},
    "falcon_h1": {},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {"layer_types": _SLIDING},
    "gemma3_text": {"layer_types": _SLIDING},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 16,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "glm_moe_dsa": {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 8},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gpt_oss": {"layer_types": _SLIDING},
    "gptj": {"rotary_dim": 8},
    "granite": {},
    "granite_swa": {"layer_types": _SLIDING},
    "granitemoe": {},
    "granitemoe_swa": {"layer_types": _SLIDING},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "granitemoeshared": {},
    "helium": {},
    "hrm_text": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": {},
    "hyperclovax": {},
    "inkling_text": {},
    "jais2": {},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "jetmoe": {"kv_channels": 16},
    "kimi_linear": {},
    "laguna": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama": {},
    "llama4_text": {
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
        "num_experts_per_tok": 1,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "no_rope_layers": [1, 0, 1],
    },
    "longcat_flash": {"zero_expert_num": 2},
    "mamba": {"expand": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "mellum": {},
    "mimo_v2_flash": {},
    "minicpm3": {},
    "minimax": {"layer_types": _LINEAR, "block_size": 8},
    "minimax_m2": {},
    "ministral": {"layer_types": _SLIDING},
    "ministral3": {},
    "mistral": {"sliding_window": None},
    "mixtral": {},
    "modernbert-decoder": {"layer_types": _SLIDING},
    "mpt": {"expansion_ratio": 2},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
        "n_groups": 1,
        "ssm_state_size": 8,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": {"layer_types": _SLIDING},
    "olmo_hybrid": {"layer_types": _LINEAR},
    "olmoe": {},
    "openai-gpt": {},
    "opt": {"word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_5_moe_text": {"layer_types": _LINEAR},
    "qwen3_5_text": {"layer_types": _LINEAR},
    "qwen3_moe": {},
    "qwen3_next": {"layer_types": _LINEAR},
    "qwen4_exp_text": {},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 64},
    "rwkv": {"attention_hidden_size": 64, "context_length": 256},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {"layer_types": _SLIDING},
    "xglm": {},
    "youtu": {},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    # Encoders' and encoder-decoders' decoders, alone.
    "bart": {},
    "bert": {"is_decoder": True},
    "bert-generation": {"is_decoder": True},
    "blenderbot": {},
    "blenderbot-small": {},
    "camembert": {"is_decoder": True},
    "data2vec-text": {"is_decoder": True},
    "electra": {"is_decoder": True, "embedding_size": 64},
    "ernie": {"is_decoder": True},
    "marian": {"decoder_start_token_id": 1},
    "mbart": {},
    "megatron-bert": {"is_decoder": True},
    "mvp": {},
    "pegasus": {},
    "plbart": {},
    "rembert": {"is_decoder": True},
    "roberta": {"is_decoder": True},
    "roberta-prelayernorm": {"is_decoder": True},
    "roc_bert": {"is_decoder": True},
    "roformer": {"is_decoder": True},
    "trocr": {},
    "xlm-roberta": {"is_decoder": True},
    "xlm-roberta-xl": {"is_decoder": True},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}


# The most used of each kind: what is looked at with every version of transformers.
FEW = (
    *("llama", "gemma3_text", "phi3", "gpt2", "gpt_oss", "qwen3", "qwen3_moe", "mixtral"),
    *("deepseek_v3", "mistral", "olmo2", "mamba2"),
)


def tiny_config(model_type: str, **more: Any) -> dict[str, Any]:
    """The config of a family, as a document."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    known = set(kind().to_dict()) | set(getattr(kind, "attribute_map", {}))
    given = {key: value for key, value in TINY.items() if key in known}
    given |= latent_heads(given)
    if "state_size" in given and "expand" in known:  # width of state spaces
        given["intermediate_size"] = 128
    config = kind(**{**given, **FAMILIES[model_type], **more}).to_dict()
    if model_type == "dbrx":  # which refuses what it writes itself
        for part in ("attn_config", "ffn_config"):
            config[part] = FAMILIES[model_type][part]
    return config


# Why a family is refused: words of the message.
REFUSED = {
    "aria_text": "depends on the values",
    "dbrx": "nonzero",
    "hrm_text": "a loop over blocks",
    "jetmoe": "depends on the values",
    "longcat_flash": "nonzero",
    "xmod": "nonzero",
}
# Sums of float32 in another order: relative errors up to 2e-5.
NOT_TO_THE_BIT = {"doge", "inkling_text"}
# Where torch's rule for shapes copies a tensor that the kernel does not copy.
ROUGH_PEAK = {"gpt_neo": 0.2, "openai-gpt": 0.41, "deepseek_v4": 0.04}
# Where the number of keys that are compressed has steps: FLOPs are fitted to 0.1 %.
ROUGH_FLOPS = {"deepseek_v4"}
