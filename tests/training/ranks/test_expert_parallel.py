"""Ranks that share experts train the folder of replicas that have all, and go on as these."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks.rank_runs import STEPS, rank_options
from tests.training.ranks.test_tensor_parallel import model_files
from tests.training.small_runs import state_files, trained, write_config
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
    whole, straight = trained(with_experts(tmp_path / "a", dp=2, **data))
    wanted = with_experts(tmp_path / "b", dp=2, ep=2, zero=1, **data)
    stopped, before = trained(wanted, stop_after=3)
    assert stopped.stopped and 3 <= stopped.step < STEPS
    again = wanted.model_copy(update={"ep": 1, "zero": 0})
    result, after = trained(again, resume=True)
    assert before.losses[: stopped.step] + after.losses == straight.losses
    assert state_files(result.folder, STEPS) == state_files(whole.folder, STEPS)
    assert model_files(result.folder) == model_files(whole.folder)
    shared, seen = trained(with_experts(tmp_path / "c", dp=2, ep=2, **data))
    assert seen.losses == straight.losses
    assert [one.loss for one in seen.evals] == [one.loss for one in straight.evals]
    assert model_files(shared.folder) == model_files(whole.folder)


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
    whole, straight = trained(with_experts(tmp_path / "a", ranks=1, **given))
    wanted = with_experts(tmp_path / "b", ranks=2, tp=2, **given)
    stopped, before = trained(wanted, stop_after=3)
    again = wanted.model_copy(update={"ranks": 1, "tp": 1})
    result, after = trained(again, resume=True)
    assert before.losses[: stopped.step] + after.losses == straight.losses
    assert state_files(result.folder, STEPS) == state_files(whole.folder, STEPS)
    assert model_files(result.folder) == model_files(whole.folder)
