"""The probe finds out which classes keep packed documents apart."""

import pytest

from twinstream.executor.modules.packing_probe import isolates_documents
from twinstream.models.traced import ModuleSource


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
