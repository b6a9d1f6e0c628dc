"""Context parallel ranks train one folder, whatever the layout, and go on in another."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks.rank_runs import STEPS, model_files, rank_options, train_on
from tests.training.small_runs import trained, write_config
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.training.ranks.planning import Plan
from twinstream.training.trainer import Trainer


def in_slices(folder: Path, **given: Any) -> TrainOptions:
    model = write_config(folder / "m", num_layers=2)
    known = {"model": str(model), "tokens_per_step": 256}
    return rank_options(folder, **(known | given))


def test_a_run_goes_on_with_other_ranks_of_cp_to_the_same_folder(tmp_path: Path) -> None:
    evaluated = {"eval_data": (str(tmp_path / "a" / "rows.jsonl"),), "eval_every": STEPS}
    whole = in_slices(tmp_path / "a", cp_parts=2, **evaluated)
    wanted = in_slices(tmp_path / "b", ranks=4, cp=2, pp=2, cp_parts=2, **evaluated)
    straight, after, _ = train_on(whole, wanted, ranks=2, cp=2, pp=1, zero=1)
    assert after.evals[-1].loss == straight.evals[-1].loss


@pytest.mark.parametrize("base", ["model", "nf4"])
def test_adapters_of_slices_go_on_on_one_device_to_the_same_folder(
    tmp_path: Path, base: str
) -> None:
    lora = {"lora": "r=4,alpha=8", "base": base, "cp_parts": 2}
    wanted = in_slices(tmp_path / "b", ranks=2, cp=2, zero=1, **lora)
    *_, folder = train_on(in_slices(tmp_path / "a", **lora), wanted, ranks=1, cp=1, zero=None)
    assert "adapter_model.safetensors" in model_files(folder)


def test_a_ring_trains_as_one_rank_does_and_goes_on_without_one(tmp_path: Path) -> None:
    _, straight = trained(in_slices(tmp_path / "a", cp_parts=1))
    wanted = in_slices(tmp_path / "b", ranks=2, cp=2, cp_exchange="ring")
    stopped, before = trained(wanted, stop_after=3)
    again = wanted.model_copy(update={"cp_exchange": None})
    _, after = trained(again, resume=True)
    losses = before.losses[: stopped.step] + after.losses
    assert losses == pytest.approx(straight.losses, rel=1e-5)


def test_what_cannot_be_in_slices_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def prepared(**given: Any) -> Plan:
        return Trainer(in_slices(tmp_path, **given)).prepare().plan

    with pytest.raises(OptionsError, match="cp: of several ranks; say how many: ranks = N"):
        prepared(cp=2)
    for given, said in (
        ({"ranks": 3, "cp": 2}, "3 ranks are not a multiple of cp 2"),
        (
            {"ranks": 2, "cp": 2, "lora": "r=4,alpha=8,save=lm_head"},
            "modules that LoRA saves whole beside cp 2",
        ),
        ({"ranks": 2, "cp": 2, "cp_parts": 3}, "3 parts of a sequence on cp 2"),
        (
            {"ranks": 2, "cp": 2, "cp_parts": 2, "cp_exchange": "ring"},
            "a ring of 2 parts of a sequence",
        ),
        (
            {"ranks": 2, "cp": 2, "seq_len": 62, "chunk_tokens": 62, "tokens_per_step": 248},
            "62 is not divisible by 2 x cp 2",
        ),
    ):
        with pytest.raises(Exception, match=said):
            prepared(**given)
    assert not (tmp_path / "run").exists()
