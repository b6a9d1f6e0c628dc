"""Small random models of every family, as transformers makes and saves them."""

from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from twinstream.executor.weights.hf_folder import HfFolder
from twinstream.models.decoders.spec import ModelSpec

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_NO_IDS = {"pad_token_id": None, "eos_token_id": None}
# By name: family, what differs, in which dtype it is saved.
MODELS: Mapping[str, tuple[str, Mapping[str, object], torch.dtype]] = {
    "llama": ("Llama", {}, torch.float32),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}, torch.bfloat16),
    "llama_stretched": ("Llama", {"rope_parameters": STRETCHED, "head_dim": 16}, torch.bfloat16),
    "mistral": ("Mistral", {"sliding_window": None}, torch.float32),
    "qwen2": ("Qwen2", {}, torch.bfloat16),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}, torch.float32),
    "qwen3": ("Qwen3", {"head_dim": 16}, torch.bfloat16),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, torch.float32),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "head_dim": 12}, torch.bfloat16),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, **_NO_IDS}, torch.float32),
    "qwen2_moe": (
        "Qwen2Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                     "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}, torch.bfloat16,
    ),
    "qwen3_moe": (
        "Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                     "head_dim": 16, "norm_topk_prob": True}, torch.float32,
    ),
    "dots1": (
        "Dots1", {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "head_dim": 16,
                  "topk_group": 1, "sliding_window": None, "max_window_layers": 2},
        torch.bfloat16,
    ),
}  # fmt: skip
WITH_EXPERTS = tuple(MODELS)[-5:]


def random_model(name: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Every parameter random, norms and biases too; frequencies of RoPE in float32 as ever."""
    family, options, own_dtype = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype or own_dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.15 * noise)
        for module in model.modules():  # float32 whatever the model's dtype, as checkpoints have it
            if (bias := getattr(module, "e_score_correction_bias", None)) is not None:
                module.e_score_correction_bias = 0.3 * torch.randn(bias.shape, generator=generator)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, max_shard_size: str = "1GB") -> ModelSpec:
    """As transformers saves it, and the spec that its config.json is read as."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return ModelSpec.from_hf_config(folder)


def read_flats(folder: HfFolder) -> dict[str, torch.Tensor]:
    """All groups, each read over garbage."""
    flats = {}
    for group in folder.spec.parameter_groups:
        size_bytes = folder.spec.group_layout(group).size_bytes
        flats[group] = torch.full((size_bytes,), 0xFF, dtype=torch.uint8)
        folder.read_group(group, flats[group])
    return flats


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(2 * 11).view(2, 11) * 5 % SIZES["vocab_size"]
    with torch.no_grad():
        return model(input_ids=ids).logits
