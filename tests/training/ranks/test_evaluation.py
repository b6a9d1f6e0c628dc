"""Ranks evaluate between steps: the loss that one device finds, and a training left as it is."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks.rank_runs import STEPS, rank_options
from tests.training.small_runs import state_files, trained, write_rows
from twinstream.clusters.pipeline import cluster_evaluation_of
from twinstream.training.checkpoints import Checkpoint
from twinstream.training.options import TrainOptions
from twinstream.training.trainer import Trainer

RING = {"pp": 2, "pipeline": "ring", "virtual_stages": 2}
INTERLEAVED = {"pp": 2, "pipeline": "interleaved", "virtual_stages": 2}


def wanted(folder: Path, **given: Any) -> TrainOptions:
    """Evaluates after steps 4, 8 and 9, on chunks that do not fill the last pass."""
    rows = write_rows(folder.parent / "held_out.jsonl", 37)
    return rank_options(folder, eval_data=(str(rows),), eval_every=4, **given)


@pytest.mark.parametrize(
    "layout", [{"pp": 2}, RING, INTERLEAVED, {"pp": 2, "chunk_tokens": 32, "chunks_per_round": 2}]
)
def test_a_pipeline_finds_the_loss_of_one_device(tmp_path: Path, layout: dict[str, Any]) -> None:
    chunks = {name: layout[name] for name in layout if name.startswith("chunk")}
    alone, seen_alone = trained(wanted(tmp_path / "one", **chunks))
    result, seen = trained(wanted(tmp_path / "two", ranks=2, **layout))
    found = [(one.step, one.loss, one.perplexity, one.tokens) for one in seen.evals]
    assert [step for step, *_ in found] == [4, 8, STEPS]
    assert found == [(e.step, e.loss, e.perplexity, e.tokens) for e in seen_alone.evals]
    assert result.eval_loss == alone.eval_loss == seen.evals[-1].loss
    kept = Checkpoint(result.folder / f"checkpoint-{STEPS}").state
    assert kept.eval_loss == result.eval_loss
    assert seen.losses == seen_alone.losses  # which evaluations leave alone (test_trainer.py)
    assert state_files(result.folder, STEPS) == state_files(alone.folder, STEPS)


@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, {"dp": 2, "zero": 3}), (4, {"pp": 2, "dp": 2, "lora": "r=4"})]
)
def test_replicas_have_shares_of_the_held_out_data(
    tmp_path: Path, ranks: int, layout: dict[str, Any]
) -> None:
    lora = {"lora": layout["lora"]} if "lora" in layout else {}
    _, alone = trained(wanted(tmp_path / "one", **lora))
    _, seen = trained(wanted(tmp_path / "several", ranks=ranks, **layout))
    assert [one.tokens for one in seen.evals] == [one.tokens for one in alone.evals]
    # float32: the sums are grouped otherwise
    assert [one.loss for one in seen.evals] == pytest.approx(
        [one.loss for one in alone.evals], rel=1e-6
    )


def test_a_ring_that_offloads_evaluates_in_the_memory_that_it_has(tmp_path: Path) -> None:
    free = wanted(tmp_path / "free", ranks=2, **RING)
    part = Trainer(free).prepare().plan.schedule.schedules["stage 0"]
    most = max(slot.offset_bytes + slot.size_bytes for slot in part.slots) * 7 // 10
    tight = wanted(tmp_path / "tight", ranks=2, device_mem=str(most), **RING)
    schedule = Trainer(tight).prepare().plan.schedule
    evaluation = cluster_evaluation_of(schedule)
    for name, own in evaluation.schedules.items():
        assert own.slots == schedule.schedules[name].slots
        assert own.carried == schedule.schedules[name].carried
    _, seen = trained(tight)
    _, seen_free = trained(free)
    assert [one.loss for one in seen.evals] == [one.loss for one in seen_free.evals]
