"""Pipelines train to the bits of one device; replicas to its losses, but for rounding."""

from pathlib import Path

import pytest

from tests.training.ranks.rank_runs import STEPS, one_device, rank_options
from tests.training.small_runs import state_files, trained
from twinstream.log.metrics import StepMetrics, events_of_kind, read_metrics
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import read_document
from twinstream.schedule.ops import Copy
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.training.trainer import Trainer

RECIPE = (
    "dtype", "optimizer_state", "max_grad_norm", "freeze", "chunk_tokens", "chunks_per_round",
)  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"pp": 2}),
        (2, {"pp": 2, "pipeline": "interleaved", "virtual_stages": 2, "max_grad_norm": 0.0}),
        (2, {"pp": 2, "pipeline": "ring", "virtual_stages": 2, "dtype": "bfloat16"}),
        (4, {"pp": 4, "pipeline": "gpipe", "optimizer_state": "8bit"}),
        (2, {"pp": 2, "freeze": ("model.embed_tokens.*", "model.layers.0.*")}),
        (2, {"pp": 2, "chunk_tokens": 32, "chunks_per_round": 2}),
    ],
)
def test_a_pipeline_has_the_bits_of_one_device(
    tmp_path: Path, ranks: int, layout: dict[str, object]
) -> None:
    recipe = {name: layout[name] for name in RECIPE if name in layout}
    state, losses = one_device(tmp_path / "one", **recipe)
    wanted = rank_options(tmp_path / "several", ranks=ranks, **layout)
    result, seen = trained(wanted)
    assert result.step == STEPS and result.model is not None
    assert seen.losses == losses
    assert state_files(result.folder, STEPS) == state
    logged = events_of_kind(read_metrics(result.folder / "metrics.jsonl"), StepMetrics)
    assert [step.loss for step in logged] == losses
    assert all(step.predicted_tokens_per_s for step in logged)
    assert all((step.grad_norm is None) == ("max_grad_norm" in layout) for step in logged)


def test_a_ring_that_offloads_has_the_bits_of_one_device(tmp_path: Path) -> None:
    state, _ = one_device(tmp_path / "one")
    layout = {"ranks": 2, "pp": 2, "pipeline": "ring", "virtual_stages": 2}
    wanted = rank_options(tmp_path / "several", **layout)
    schedules = Trainer(wanted).prepare().plan.schedule.schedules
    fullest = max(arena_bytes(one, DEVICE) for one in schedules.values())
    result, _ = trained(wanted.model_copy(update={"device_mem": str(fullest * 7 // 10)}))
    kept = read_document(Schedule, result.folder / "cluster.json")
    assert all(any(isinstance(op, Copy) for op in one.ops) for one in kept.schedules.values())
    assert state_files(result.folder, STEPS) == state


def test_replicas_share_the_data_of_one_device(tmp_path: Path) -> None:
    _, alone = trained(rank_options(tmp_path / "one"))
    _, seen = trained(rank_options(tmp_path / "two", ranks=2, dp=2))
    # float32: the sums are grouped otherwise
    assert seen.losses == pytest.approx(alone.losses, rel=1e-5)
    assert [step.tokens for step in seen.steps] == [step.tokens for step in alone.steps]


@pytest.mark.parametrize(("ranks", "pp", "zero"), [(2, 1, 1), (2, 1, 3), (4, 2, 2)])
def test_sharded_replicas_have_the_bits_of_whole_ones(
    tmp_path: Path, ranks: int, pp: int, zero: int
) -> None:
    layout = {"ranks": ranks, "pp": pp}
    whole, _ = trained(rank_options(tmp_path / "whole", **layout, zero=0))
    wanted = rank_options(tmp_path / "shards", **layout, zero=zero)
    stopped, _ = trained(wanted, stop_after=2)
    assert stopped.stopped
    trained(wanted, resume=True)
    assert state_files(wanted.output, STEPS) == state_files(whole.folder, STEPS)
