"""Every recorded run of davidsj/ml_par_sim comes out of the command line.

`ml_par_sim_vectors.json` has arguments and outputs of its two programs, 22 of 44 recorded runs;
source and commit are in its `meta`. What is exact in it are Python floats after the run.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.front_door.command_line import Outcome, call

RECORDED = json.loads((Path(__file__).parent / "ml_par_sim_vectors.json").read_text())["vectors"]
RUNS = [one for one in RECORDED if one["exit_ok"]]
REFUSED = [one for one in RECORDED if not one["exit_ok"]]
COMMAND = {"transformer.py": "work", "simple_transformer.py": "time"}
TOLD = {  # what each refusal of the programs is about, in our words
    "T21_err_noise": ("gradient noise", "16,777,216", "8,388,608"),
    "T23_err_microbatch": ("arithmetic intensity", "128", "at most 16"),
    "S19_err_layers": ("5 does not divide the 24 layers",),
}


def outcome_of(run: dict[str, Any], *more: str) -> Outcome:
    given = [one.replace("_", "-") if one.startswith("--") else one for one in run["args"]]
    return call("cost", COMMAND[run["script"]], *given, *more)


def named(runs: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("run", runs, ids=[run["name"] for run in runs])


def test_both_programs_and_their_refusals_are_there():
    assert len(RUNS) == 19 and len(REFUSED) == 3
    assert {run["script"] for run in RUNS} == {run["script"] for run in REFUSED} == set(COMMAND)


@named(RUNS)
def test_every_exact_figure_comes_out(run):
    found = outcome_of(run, "--json").json()
    for name, figure in run["exact"].items():
        assert found[name] == pytest.approx(figure, rel=1e-9, abs=0), name


@named([run for run in RUNS if run["script"] == "transformer.py"])
def test_our_own_names_say_the_same_of_a_count(run):
    found, exact = outcome_of(run, "--json").json(), run["exact"]
    assert found["num_params"] == exact["params"] and found["num_devices"] == exact["p"]
    assert found["flop_total"] == pytest.approx(exact["FLOP_total"], rel=1e-9)
    assert found["sent_bytes_total"] == pytest.approx(2 * exact["Tx_total"], rel=1e-9)
    assert found["received_bytes_fwd"] == pytest.approx(2 * exact["Rx_fwd"], rel=1e-9)
    assert found["run_days"] == pytest.approx(exact["runtime_sec"] / 86400, rel=1e-9)


@named([run for run in RUNS if run["script"] == "simple_transformer.py"])
def test_our_own_names_say_what_an_estimate_printed(run):
    found, printed = outcome_of(run, "--json").json(), run["parsed"]
    assert found["matmul_shape"] == printed["matmul_shape"]
    assert found["pipeline"] == printed["pipeline"]
    assert f"{found['flop_per_batch']:.2e}" == f"{printed['flop_per_batch']:.2e}"
    for name in ("pipeline_bubble_s", "pipeline_full_s", "grad_reduction_s", "batch_s"):
        assert found[name] == pytest.approx(printed[name], abs=5.1e-5), name
    assert found["utilization"] == pytest.approx(printed["utilization"], abs=5.1e-5)


@named([run for run in RUNS if run["script"] == "transformer.py"])
def test_every_figure_that_was_printed_is_on_the_screen(run):
    screen = outcome_of(run).out
    printed = run["parsed"]
    figures = [printed["N"], printed["D"], *printed["FLOP"], *printed["Tx"], *printed["Rx"]]
    figures += [*printed["net"], *printed["cluster_bytes_per_sec"], *printed["total_bytes_per_sec"]]
    for figure in figures:
        assert (f"{figure:.3e}" if figure else " 0 ") in screen, figure
    time, unit = printed["runtime"]
    assert f"training   {time:,} {unit}" in screen


@named(REFUSED)
def test_what_the_programs_refuse_is_refused(run):
    outcome = outcome_of(run, "--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1
    assert all(told in outcome.err for told in TOLD[run["name"]])
