"""Models of other families on a GPU: the module's own bits, under every cap and after a resume."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.traced.test_trained import write_model
from tests.training.small_runs import options, state_files, trained, write_rows

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
    whole, straight = trained(options(tmp_path / "a", **given))
    wanted = options(tmp_path / "b", **given)
    stopped, before = trained(wanted, stop_after=3)
    again = wanted.model_copy(update={"policy": "streaming"})
    _, after = trained(again, resume=True)
    assert before.losses[: stopped.step] + after.losses == straight.losses
    assert straight.losses[-1] < straight.losses[0]
    assert state_files(wanted.output, 6) == state_files(whole.folder, 6)
    assert whole.model is not None
    trained_module = AutoModelForCausalLM.from_pretrained(whole.model, dtype=torch.float32)
    assert all(value.isfinite().all() for value in trained_module.state_dict().values())
