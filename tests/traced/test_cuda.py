"""Models of other families on a GPU: the module's own bits, under every cap and after a resume."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.traced.test_trained import write_model
from tests.training.small_runs import same_bits_after_a_stop, write_rows

pytestmark = pytest.mark.gpu
FAMILIES = ("gemma3_text", "qwen3_moe", "gpt2", "phi3", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_under_another_policy(tmp_path: Path, family: str, dtype: str) -> None:
    model = str(write_model(tmp_path / "model", family, weights=True))
    given = {
        "model": model, "data": (str(write_rows(tmp_path / "rows.jsonl")),),
        "backend": "cuda", "machine": "h100", "dtype": dtype,
    }  # fmt: skip
    result = same_bits_after_a_stop(tmp_path, {"policy": "streaming"}, **given)
    assert result.model is not None
    trained_module = AutoModelForCausalLM.from_pretrained(result.model, dtype=torch.float32)
    assert all(value.isfinite().all() for value in trained_module.state_dict().values())
