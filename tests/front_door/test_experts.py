"""The command line of models with experts."""

import json
from pathlib import Path

from tests.front_door.command_line import call, error_of
from twinstream.models.decoders.to_hf_config import to_hf_config
from twinstream.models.presets import load_preset

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


def test_layers_that_differ_are_planned_for_machines_and_clusters(tmp_path: Path) -> None:
    config = to_hf_config(load_preset("qwen3-30b-a3b")) | {"mlp_only_layers": [0], "num_experts": 8}
    config |= {"num_hidden_layers": 4, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("plan", "--model", tmp_path, "--seq-len", 512)
    for on in (("--machine", "h100", *STEP), ("--cluster", "h100_dgx", "--global-batch", 16)):
        told = call(*asked, *on, "--gpus", 2)
        assert told.code == 0, told.err


def test_recompute_of_experts_alone_is_asked_for_by_its_word(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert call(*PLAN, *STEP, "--recompute", "experts", "-o", plan).code == 0
    labels = [op.get("label") or {} for op in json.loads(plan.read_text())["ops"]]
    levels = {label["level"] for label in labels if label.get("kind") == "block_recompute"}
    assert levels == {"EXPERTS"}
    told = error_of(*PLAN, "--dtype", "bfloat16", "--policy", "ml_dataflow")
    assert "and experts" in told


def test_simulate_takes_the_loads_of_experts(tmp_path: Path) -> None:
    plan, load = tmp_path / "plan.json", tmp_path / "load.json"
    assert call(*PLAN, *STEP, "--dtype", "bfloat16", "-o", plan).code == 0
    load.write_text("[900, 20, 20, 20, 20, 20, 20, 20]")
    told = [call("simulate", plan, *more, "--json") for more in ((), ("--load", load))]
    even, skewed = (json.loads(one.out)["tokens_per_s"] for one in told)
    assert skewed < even  # tokens/s: seven experts waste most of a tile each
    load.write_text("[1, 2]")
    assert "has 8 experts" in error_of("simulate", plan, "--load", load)
    assert "cannot be read" in error_of("simulate", plan, "--load", tmp_path / "none.json")
