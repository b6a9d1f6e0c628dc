"""`--lora` and `--freeze`: planned, run, swept, and refused in words."""

from pathlib import Path

import pytest

from tests.front_door.command_line import TINY_STEP, call, error_of
from twinstream.study.sweep.config import config_of

STEP = (*TINY_STEP, "--machine", "cpu")


def test_a_plan_says_what_it_trains(tmp_path):
    lora = call("plan", *STEP, "--lora", "r=8,targets=q,v")
    assert "adapters of rank 8, alpha 16, on q, v" in lora.out
    frozen = call("plan", *STEP, "--freeze", "model.layers.[0-2].*", "--freeze", "model.embed*")
    assert "all but layers 0, 1, 2 and embedding" in frozen.out


def test_a_run_trains_adapters_only(tmp_path):
    plan, options = tmp_path / "plan.json", ("--steps", "3", "--learning-rate", "0.01")
    assert call("plan", *STEP, "--lora", "r=8", "-o", plan).code == 0
    losses = call("run", plan, *options, "--backend", "cpu", "--json").json()["losses"]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--lora", "r=0"), "rank"),
        (("--lora", "r=8", "--freeze", "*"), "leave out --freeze"),
        (("--freeze", "*"), "nothing is left to train"),
        (("--freeze", "*.q_proj.*"), "only in part"),
        (("--lora", "r=8", "--policy", "ml_dataflow"), "trains all parameters"),
    ],
)
def test_what_cannot_be_is_refused(options, told):
    assert told in error_of("plan", *STEP, "--kernels", "eager", "--attention", "eager", *options)


@pytest.mark.parametrize(
    "policy", ["streaming", "full_recompute", "optimizer_offload", "layer_offload"]
)
def test_every_policy_plans_adapters(policy):
    plan = call("plan", *STEP, "--lora", "r=4", "--policy", policy, "--json").json()
    assert plan["tokens_per_s"] > 0


def test_a_sweep_varies_adapters():
    document = {
        "fixed": {"model": "tiny", "machine": "cpu", "seq_len": 64, "tokens_per_step": 256},
        "axes": {"lora": ["none", "r=4", "r=8"]},
    }
    cells = config_of(document, source="here", folder=Path()).cells()
    ranks = [
        cell.query.request.recipe.lora and cell.query.request.recipe.lora.rank for cell in cells
    ]
    assert ranks == [None, 4, 8]
    assert len({cell.key for cell in cells}) == 3
