"""The command line of models with experts."""

import json
from pathlib import Path

from tests.front_door.command_line import call, error_of

PLAN = ("plan", "--model", "tiny-experts", "--machine", "h100", "--seq-len", 512)
STEP = ("--tokens-per-step", 4096)


def test_a_load_balancing_loss_is_asked_for_by_a_flag(tmp_path: Path) -> None:
    found = {}
    for name, more in (("without", ()), ("with", ("--aux-loss", 0.01))):
        told = call(*PLAN, *STEP, *more, "-o", tmp_path / f"{name}.json")
        assert told.code == 0, told.err
        found[name] = json.loads((tmp_path / f"{name}.json").read_text())
    tensors = {name: {t["tensor_id"] for t in plan["tensors"]} for name, plan in found.items()}
    assert "balance" in tensors["with"] - tensors["without"]
    assert found["with"]["model"]["spec"]["experts"]["aux_loss"] == 0.01
    told = error_of("plan", "--model", "tiny", *PLAN[3:], "--aux-loss", 0.01)
    assert "'tiny' has none" in told and "leave it out" in told


def test_simulate_takes_the_loads_of_experts(tmp_path: Path) -> None:
    plan, load = tmp_path / "plan.json", tmp_path / "load.json"
    assert call(*PLAN, *STEP, "--dtype", "bfloat16", "-o", plan).code == 0
    load.write_text("[900, 20, 20, 20, 20, 20, 20, 20]")
    told = [call("simulate", plan, *more, "--json") for more in ((), ("--load", load))]
    even, skewed = (json.loads(one.out)["tokens_per_s"] for one in told)
    assert even != skewed
    load.write_text("[1, 2]")
    assert "has 8 experts" in error_of("simulate", plan, "--load", load)
    assert "cannot be read" in error_of("simulate", plan, "--load", tmp_path / "none.json")
