"""Ranks that share experts train the folder of replicas that have all, and go on as these."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks.rank_runs import STEPS, model_files, rank_options, train_on
from tests.training.small_runs import trained, write_config
from twinstream.training.options import TrainOptions
from twinstream.training.trainer import Trainer


def with_experts(folder: Path, **given: Any) -> TrainOptions:
    model = write_config(folder / "m", "tiny-experts", num_layers=4)
    return rank_options(folder, **{"model": str(model), "max_grad_norm": 0.0, **given})


@pytest.mark.parametrize("ranks", [{"ranks": 2}, {"ranks": 4, "tp": 2, "parts": 2}])
def test_a_run_goes_on_with_all_experts_on_each_replica_to_the_same_folder(
    tmp_path: Path, ranks: Any
) -> None:
    data = {"eval_data": (str(tmp_path / "a" / "rows.jsonl"),), "eval_every": STEPS, **ranks}
    whole = with_experts(tmp_path / "a", dp=2, **data)
    wanted = with_experts(tmp_path / "b", dp=2, ep=2, zero=1, **data)
    straight, _, folder = train_on(whole, wanted, ep=1, zero=0)
    shared, seen = trained(with_experts(tmp_path / "c", dp=2, ep=2, **data))
    assert seen.losses == straight.losses
    assert [one.loss for one in seen.evals] == [one.loss for one in straight.evals]
    assert model_files(shared.folder) == model_files(folder)


def test_what_cannot_be_shared_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def prepared(**given: Any) -> Any:
        return Trainer(with_experts(tmp_path, **given)).prepare().plan

    experts = "r=4,alpha=8,targets=q,experts"
    dense = str(write_config(tmp_path / "dense"))
    for given, said in (
        ({"ep": 2}, "ep: of several ranks; say how many: ranks = N"),
        ({"ranks": 2, "dp": 2, "ep": 2, "model": dense}, "ep is 2, but .* has no experts"),
        ({"ranks": 3, "dp": 3, "ep": 3}, "8 experts are not divisible by ep 3"),
        ({"ranks": 3, "dp": 3, "ep": 2}, "dp 3 is not divisible by ep 2"),
        ({"ranks": 2, "ep": 2, "tp": 2}, "dp 1 is not divisible by ep 2"),
        ({"ranks": 2, "dp": 2, "ep": 2, "max_grad_norm": 1.0}, "clipped gradients, whose norm"),
        (
            {"ranks": 4, "tp": 2, "ep": 2, "lora": experts},
            "LoRA of experts beside tp 2 beside ep 2",
        ),
        ({"ranks": 2, "dp": 2, "ep": 2, "optimizer_state": "8bit"}, "8-bit optimizer state"),
    ):
        with pytest.raises(Exception, match=said):
            prepared(**given)
    assert not (tmp_path / "run").exists()


def test_columns_of_experts_on_other_ranks_of_tp_train_the_same_folder(tmp_path: Path) -> None:
    given = {"parts": 2, "lora": "r=2,alpha=4,targets=q,experts"}
    whole = with_experts(tmp_path / "a", ranks=1, **given)
    train_on(whole, with_experts(tmp_path / "b", ranks=2, tp=2, **given), ranks=1, tp=1)
