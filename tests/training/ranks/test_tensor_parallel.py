"""Tensor parallel ranks train one folder, whatever the layout, and go on in another."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks.rank_runs import STEPS, one_device, rank_options, train_on
from tests.training.small_runs import trained, write_config
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.training.ranks.planning import Plan
from twinstream.training.trainer import Trainer


def in_parts(folder: Path, **given: Any) -> TrainOptions:
    model = write_config(folder / "m", num_layers=4, num_heads=8, num_kv_heads=4)
    return rank_options(folder, model=str(model), **given)


def test_a_run_goes_on_with_other_ranks_of_tp_to_the_same_folder(tmp_path: Path) -> None:
    whole = in_parts(tmp_path / "a", ranks=2, tp=2, parts=4)
    wanted = in_parts(tmp_path / "b", ranks=4, tp=2, pp=2, parts=4)
    train_on(whole, wanted, ranks=1, tp=1, pp=1)


@pytest.mark.parametrize("base", ["model", "nf4"])
def test_adapters_in_parts_go_on_on_one_device_to_the_same_folder(
    tmp_path: Path, base: str
) -> None:
    """Rows of a part are whole blocks of 64 elements."""
    sizes = {"d_model": 64, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16, "d_ff": 128}
    given = {
        "model": str(write_config(tmp_path / "m", num_layers=4, **sizes)), "base": base,
        "lora": "r=4,alpha=8", "parts": 2,
    }  # fmt: skip
    whole = rank_options(tmp_path / "a", ranks=1, **given)
    train_on(whole, rank_options(tmp_path / "b", ranks=2, tp=2, **given), ranks=1, tp=1)


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        ({"tp": 4}, False), ({"tp": 2, "dp": 2, "zero": 3}, False), ({"tp": 2, "pp": 2}, False),
        ({"tp": 2, "pp": 2}, True),
    ],
)  # fmt: skip
def test_the_transports_sums_train_as_one_device_does(
    tmp_path: Path, layout: Any, tied: bool
) -> None:
    heads = {"num_heads": 8, "num_kv_heads": 4}
    model = str(write_config(tmp_path / "m", num_layers=4, tied_embeddings=tied, **heads))
    data = {"eval_data": (str(tmp_path / "one" / "rows.jsonl"),), "eval_every": STEPS}
    _, losses = one_device(tmp_path / "one", model=model)
    _, seen = trained(rank_options(tmp_path / "b", model=model, ranks=4, **layout, **data))
    assert seen.losses == pytest.approx(losses, rel=1e-5)
    alone, of_one = trained(rank_options(tmp_path / "c", model=model, **data))
    assert alone.step == STEPS
    told = [seen.evals[-1].loss, of_one.evals[-1].loss]
    assert told[0] == pytest.approx(told[1], rel=1e-5)


def test_what_cannot_be_in_parts_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def prepared(**given: Any) -> Plan:
        return Trainer(in_parts(tmp_path, **given)).prepare().plan

    with pytest.raises(OptionsError, match="tp: of several ranks; say how many: ranks = N"):
        prepared(tp=2)
    for given, said in (
        ({"ranks": 3, "tp": 2}, "3 ranks are not a multiple of tp 2"),
        (
            {"ranks": 2, "tp": 2, "lora": "r=4,alpha=8", "base": "nf4"},
            "a base in nf4, of which 64 elements of a row",
        ),
        ({"ranks": 8, "tp": 8}, "4 key and value heads in 8 parts"),
        ({"ranks": 4, "tp": 2, "pp": 4}, "tp 2 x pp 4 are 8 ranks, and there are 4"),
    ):
        with pytest.raises(Exception, match=said):
            prepared(**given)
    assert not (tmp_path / "run").exists()
