"""Runs on ranks of a model with four narrow layers, beside one device's."""

from pathlib import Path
from typing import Any

from tests.training.small_runs import Seen, options, state_files, trained, write_config
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


def model_files(folder: Path) -> dict[str, bytes]:
    """What a run leaves for others to load."""
    return {path.name: path.read_bytes() for path in sorted((folder / "model").iterdir())}


def train_on(whole: TrainOptions, wanted: TrainOptions, **others: Any) -> tuple[Seen, Seen, Path]:
    """Stop a run after some steps and go on on other ranks: that ends as `whole` does.

    Returns what was seen of `whole`, and of the run when it went on; and the run's folder.
    """
    undisturbed, straight = trained(whole)
    stopped, before = trained(wanted, stop_after=3)
    assert stopped.stopped and 3 <= stopped.step < STEPS
    result, after = trained(wanted.model_copy(update=others), resume=True)
    assert before.losses[: stopped.step] + after.losses == straight.losses
    assert state_files(result.folder, STEPS) == state_files(undisturbed.folder, STEPS)
    assert model_files(result.folder) == model_files(undisturbed.folder)
    return straight, after, result.folder
