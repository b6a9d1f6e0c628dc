"""`twinstream train` on a GPU: stopped, gone on with under another cap, evaluated between steps."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.training.small_runs import (
    options,
    same_bits_after_a_stop,
    state_files,
    trained,
    write_rows,
)

pytestmark = pytest.mark.gpu
CUDA: dict[str, Any] = {
    "backend": "cuda", "machine": "h100", "dtype": "bfloat16", "seq_len": 128,
    "tokens_per_step": 512, "kernels": "triton", "attention": "eager",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["model", "8bit", "float32_master"])
def test_a_run_goes_on_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    given = CUDA | {"optimizer_state": kind}
    same_bits_after_a_stop(tmp_path, {"policy": "streaming"}, **given)


@pytest.mark.parametrize("optim", ["sgd", "lion", "muon"])
def test_other_optimizers_go_on_to_the_same_bits(optim: str, tmp_path: Path) -> None:
    if optim == "muon" and "FAKE_CUDA_VALUES" in os.environ:
        pytest.skip("the fake device adds products wrongly to a tensor that lies column by column")
    rate = 0.3 if optim == "sgd" else 3e-3
    given = CUDA | {"optim": optim, "learning_rate": rate}
    same_bits_after_a_stop(tmp_path, {"policy": "streaming"}, **given)


def test_evaluations_between_steps_change_nothing(tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", 17)
    plain, before = trained(options(tmp_path / "plain", **CUDA))
    wanted = options(tmp_path, eval_data=(str(held_out),), eval_every=2, **CUDA)
    result, seen = trained(wanted)
    assert seen.losses == before.losses and len(seen.evals) == 3
    assert state_files(result.folder, 6) == state_files(plain.folder, 6)
