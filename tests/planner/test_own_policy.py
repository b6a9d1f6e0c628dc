"""A policy from a person's own file."""

import csv
from pathlib import Path

import pytest

from tests.contract.package_tree import REPO
from tests.front_door.command_line import call, error_of

GREEDY = f"{REPO / 'examples' / 'greedy_policy.py'}:POLICY"
STEP = ("plan", "--model", "tiny", "--seq-len", 128, "--tokens-per-step", 1024,
        "--chunk-tokens", 128, "--machine", "cpu")  # fmt: skip


def test_the_example_plans_and_offloads_where_memory_is_short():
    roomy = call(*STEP, "--policy", GREEDY, "--json").json()
    tight = call(*STEP, "--policy", GREEDY, "--device-mem", "10MiB", "--json").json()
    assert roomy["policy"] == tight["policy"] == "greedy"
    assert tight["h2d_bytes"] > 4 * roomy["h2d_bytes"]
    assert tight["step_time_s"] >= tight["lower_bound_s"]


def test_own_policies_are_compared_with_the_others_by_a_sweep(tmp_path: Path):
    assert "a sweep with axes.policy compares them" in error_of(*STEP, "--policy", f"all,{GREEDY}")
    config = tmp_path / "policies.toml"
    config.write_text(
        '[fixed]\nmodel = "tiny"\nmachine = "cpu"\nseq_len = 64\n'
        'tokens_per_step = 256\n[axes]\npolicy = ["streaming", "' + GREEDY + '"]\n'
    )
    assert call("sweep", config, "-o", tmp_path / "out", "--json").json()["num_cells"]["ok"] == 2
    rows = list(csv.DictReader((tmp_path / "out" / "rows.csv").read_text().splitlines()))
    assert {row["policy"].rpartition(":")[2] for row in rows} == {"streaming", "POLICY"}
    assert all(float(row["step_time_s"]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read"),
        ("POLICY = 1", "is a int, not a Policy"),
        ("OTHER = 1", "has no 'POLICY'"),
        ("1 / 0", "fails with ZeroDivisionError"),
    ],
)
def test_a_file_that_is_no_policy_is_refused(tmp_path: Path, content: str | None, said: str):
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    assert said in error_of(*STEP, "--policy", f"{file}:POLICY")
