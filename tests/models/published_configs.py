"""Config.json files in the form in which the Hub has them, and a way to vary them."""

import json
from pathlib import Path
from typing import Any

from twinstream.models.decoders.spec import ModelSpec

COMMON = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
META_LLAMA_3_8B = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.40.0.dev0",
    "vocab_size": 128256,
}
META_LLAMA_3_1_8B = META_LLAMA_3_8B | {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "transformers_version": "4.42.3",
}
MISTRAL_7B_V0_3 = COMMON | {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.42.0.dev0",
    "vocab_size": 32768,
}
QWEN2_5_0_5B = COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "transformers_version": "4.40.1",
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_0_6B = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
CONFIGS = {
    "llama": META_LLAMA_3_8B,
    "mistral": MISTRAL_7B_V0_3,
    "qwen2": QWEN2_5_0_5B,
    "qwen3": QWEN3_0_6B,
}


def read_config(
    folder: Path, config: dict[str, Any], *, without: tuple[str, ...] = ()
) -> ModelSpec:
    kept = {key: value for key, value in config.items() if key not in without}
    (folder / "config.json").write_text(json.dumps(kept))
    return ModelSpec.from_hf_config(folder)
