"""Adapters and tied embeddings on several ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks.rank_runs import STEPS, rank_options
from tests.training.small_runs import state_files, trained, write_config
from twinstream.training.trainer import Trainer

LORA = {"lora": "r=4"}


def files_of(folder: Path) -> dict[str, bytes]:
    """All tensors of the last checkpoint."""
    paths = (folder / f"checkpoint-{STEPS}").rglob("*")
    kinds = (".bin", ".safetensors")
    return {path.name: path.read_bytes() for path in paths if path.suffix in kinds}


@pytest.mark.parametrize(
    ("layout", "lora"),
    [
        ({"pp": 2}, "r=4"),
        ({"pp": 2}, "r=4,rslora,save=embed_tokens,lm_head"),
        ({"pp": 2, "pipeline": "ring", "virtual_stages": 2}, "r=4"),
    ],
)
def test_adapters_over_stages_have_the_bits_of_one_device(
    tmp_path: Path, layout: dict[str, Any], lora: str
) -> None:
    alone, seen_alone = trained(rank_options(tmp_path / "one", lora=lora))
    wanted = rank_options(tmp_path / "two", ranks=2, **layout, lora=lora)
    result, seen = trained(wanted)
    assert seen.losses == seen_alone.losses
    found = files_of(result.folder)
    assert found == files_of(alone.folder)
    assert "adapter_model.safetensors" in found and "model.safetensors" not in found
    written = sum(len(content) for content in found.values())
    told = Trainer(wanted, resume=True).prepare().plan.checkpoint_bytes
    assert 0.9 < told / written < 1.0  # headers are not counted


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_of_four_ranks_go_on_on_fewer(tmp_path: Path, ranks: int) -> None:
    alone, _ = trained(rank_options(tmp_path / "one", **LORA))
    wanted = rank_options(tmp_path / "b", ranks=4, pp=4, **LORA)
    stopped, _ = trained(wanted, stop_after=2)
    assert stopped.stopped
    again = wanted.model_copy(update={"ranks": ranks, "pp": ranks})
    trained(again, resume=True)
    assert files_of(wanted.output) == files_of(alone.folder)


@pytest.mark.parametrize("lora", ["r=4", "r=4,save=lm_head"])
def test_sharded_adapters_have_the_bits_of_whole_ones(tmp_path: Path, lora: str) -> None:
    whole, _ = trained(rank_options(tmp_path / "whole", ranks=2, dp=2, zero=0, lora=lora))
    shards, _ = trained(rank_options(tmp_path / "shards", ranks=2, dp=2, zero=3, lora=lora))
    assert files_of(shards.folder) == files_of(whole.folder)


def test_tied_embeddings_of_two_stages_are_those_of_four(tmp_path: Path) -> None:
    model = str(write_config(tmp_path / "tied", num_layers=4, tied_embeddings=True))
    _, alone = trained(rank_options(tmp_path / "one", model=model))
    four, seen = trained(rank_options(tmp_path / "four", ranks=4, pp=4, model=model))
    wanted = rank_options(tmp_path / "two", ranks=4, pp=4, model=model)
    trained(wanted, stop_after=2)
    two = wanted.model_copy(update={"ranks": 2, "pp": 2})
    trained(two, resume=True)
    assert state_files(two.output, STEPS) == state_files(four.folder, STEPS)
    # float32: each end adds up its own contributions to the embedding's gradient first
    assert seen.losses == pytest.approx(alone.losses, rel=1e-5)
    sharded = {"ranks": 4, "pp": 2, "dp": 2, "model": model}
    whole, _ = trained(rank_options(tmp_path / "whole", zero=0, **sharded))
    cut, _ = trained(rank_options(tmp_path / "cut", zero=1, **sharded))
    assert state_files(cut.folder, STEPS) == state_files(whole.folder, STEPS)
