"""Runs on ranks of a model with four narrow layers, beside one device's."""

from pathlib import Path
from typing import Any

from tests.training.small_runs import options, state_files, trained, write_config
from twinstream.training.options import TrainOptions

STEPS = 9


def rank_options(folder: Path, **given: Any) -> TrainOptions:
    """Nine steps of eight chunks of 64 tokens, each a round, clipped, in `folder/run`."""
    model = str(write_config(folder / "model", num_layers=4))
    known = {
        "model": model, "steps": STEPS, "tokens_per_step": 512, "chunk_tokens": 64,
        "chunks_per_round": 1,
    }  # fmt: skip
    return options(folder, **(known | given))


def one_device(folder: Path, **given: Any) -> tuple[dict[str, bytes], list[float]]:
    """State and losses of the run on one device that nothing disturbs."""
    result, seen = trained(rank_options(folder, **given))
    return state_files(result.folder, result.step), seen.losses
