"""Pipelines train to the bits of one device; replicas to its losses, but for rounding."""

from pathlib import Path

import pytest

from tests.training.ranks.rank_runs import STEPS, one_device, rank_options, rank_trained
from tests.training.small_runs import state_files, trained
from twinstream.log.metrics import StepMetrics, of_kind, read_metrics


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"pp": 2}),
        (2, {"pp": 2, "pipeline": "interleaved", "virtual_stages": 2}),
        (2, {"pp": 2, "pipeline": "ring", "virtual_stages": 2, "dtype": "bfloat16"}),
        (4, {"pp": 4, "pipeline": "gpipe", "optimizer_state": "8bit"}),
    ],
)
def test_a_pipeline_has_the_bits_of_one_device(
    tmp_path: Path, ranks: int, layout: dict[str, object]
) -> None:
    recipe = {name: layout[name] for name in ("dtype", "optimizer_state") if name in layout}
    state, losses = one_device(tmp_path / "one", **recipe)
    wanted = rank_options(tmp_path / "several", ranks=ranks, **layout)
    result, seen = rank_trained(wanted)
    assert result.step == STEPS and result.model is not None
    assert seen.losses == losses
    assert state_files(result.folder, STEPS) == state
    logged = of_kind(read_metrics(result.folder / "metrics.jsonl"), StepMetrics)
    assert [step.loss for step in logged] == losses
    assert all(step.predicted_tokens_per_s for step in logged)


def test_replicas_share_the_data_of_one_device(tmp_path: Path) -> None:
    _, alone = trained(rank_options(tmp_path / "one"))
    _, seen = rank_trained(rank_options(tmp_path / "two", ranks=2, dp=2))
    # float32: the sums are grouped otherwise
    assert seen.losses == pytest.approx(alone.losses, rel=1e-5)
    assert [step.tokens for step in seen.steps] == [step.tokens for step in alone.steps]
