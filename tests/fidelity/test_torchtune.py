"""Memory beside torchtune's own table (pytorch/torchtune, README.md@bd2a0fc7): active GiB without
CUDA's context, packed, a compiled model with recompute."""

from statistics import fmean
from typing import Any

import twinstream as ts

SMALL = {"model": "llama3.2-3b", "machine": "a100", "seq_len": 4096, "tokens_per_step": 8192}
LARGE = {"model": "llama3.1-8b", "machine": "rtx4090", "seq_len": 2048, "tokens_per_step": 4096}
ROWS: dict[str, tuple[dict[str, Any], float]] = {
    "all": (SMALL | {"clips": True}, 24.9),  # clipping keeps all gradients, as torch.optim does
    "LoRA": (SMALL | {"lora": "r=8"}, 8.5),
    "8B LoRA": (LARGE | {"lora": "r=8"}, 16.2),
    "8B QLoRA": (LARGE | {"lora": "r=8", "base": "nf4"}, 7.4),
}


def taken_gib(given: dict[str, Any]) -> float:
    """What a plan takes, less what the profile says of context and libraries."""
    chunk = given["tokens_per_step"]
    answer = ts.query(policy="full_recompute", chunk_tokens=chunk, **given).answer()
    reserve = ts.load_machine(given["machine"]).number("device_reserve_bytes")
    return (answer.summary.device_peak_bytes - reserve) / 2**30


def test_plans_take_what_the_rows_state() -> None:
    errors = {row: taken_gib(given) / stated - 1 for row, (given, stated) in ROWS.items()}
    assert max(map(abs, errors.values())) < 0.15, errors
    assert fmean(map(abs, errors.values())) < 0.10, errors
