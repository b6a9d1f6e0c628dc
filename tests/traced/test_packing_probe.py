"""The probe finds out which classes keep packed documents apart."""

import pytest

from twinstream.executor.modules.packing_probe import isolates_documents
from twinstream.models.providers.traced import ModuleSource


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "answer"),
    [
        ("llama", "isolated"),
        ("gemma3_text", "isolated"),
        ("qwen3_moe", "isolated"),
        ("gpt_oss", "isolated_by_mask"),
        ("qwen3_5_text", "leaks"),
        ("deepseek_v32", "leaks"),
    ],
)
def test_a_class_is_found_isolated_or_leaking(model_type, answer):
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]().to_dict()
    assert isolates_documents(ModuleSource(config=config)) == answer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", [1.0, 0.75])
def test_factors_of_many_frequencies_are_those_of_a_narrow_copy_too(share):
    """Sizes and keys of Phi-3-mini-128k's and Phi-4-mini's published configs."""
    config = {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32064,
        "num_hidden_layers": 32, "num_attention_heads": 32 if share == 1.0 else 24,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 262144,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": share,
        "pad_token_id": 32000, "bos_token_id": 1, "eos_token_id": 32000,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48,
                         "long_factor": [2.0 + at for at in range(48)]},
    }  # fmt: skip
    assert isolates_documents(ModuleSource(config=config)) == "isolated"
