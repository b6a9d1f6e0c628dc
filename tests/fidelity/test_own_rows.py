"""Rows of our own policies: planned as `plan` plans them, and a hidden machine is found again."""

import pytest

import twinstream as ts
from tests.front_door.command_line import call, error_of
from twinstream.fidelity.own_rows import own_key
from twinstream.fidelity.rows import TableRow
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.measured_table import read_measured

HEADER = "machine,policy,model,seq_len,host_mem_gib,dev_mem_gib,tokens_per_step,tokens_per_s"
BASE = "rtx4090"
SEEN = [("streaming", 512, 24, 8), ("streaming", 512, 32, 20), ("streaming", 8192, 32, 20)]
HELD_OUT = [
    ("optimal", 2048, 32, 20),
    ("streaming", 2048, 32, 12),
    ("full_recompute", 4096, 32, 20),
]


def hidden():
    """The shipped profile, 20 % slower in matmuls and 15 % in attention."""
    base = load_machine(BASE)
    slower = {"matmul": 0.8, "attention_forward": 0.85, "attention_backward": 0.85}
    curves = {
        key: curve.model_copy(update={"max": curve.max * slower.get(key.split("/")[0], 1.0)})
        for key, curve in base.efficiency.items()
    }
    return base.model_copy(update={"efficiency": curves})


def measured(rows, path, extra=""):
    """A table of `plan`'s schedules for the base, as fast as the hidden machine runs them."""
    lines = [HEADER + (",planned_for" if extra else "")]
    truth = hidden()
    for policy, seq_len, host, device in rows:
        plan = ts.plan(
            "1b", BASE, step=ts.TrainingStep(seq_len, tokens_per_step=8192), policy=policy,
            device_mem=f"{device}GiB", host_mem=f"{host}GiB",
        )  # fmt: skip
        speed = 8192 / (ts.simulate(plan, truth).step_ns / 1e9)
        lines.append(f"RTX 4090,{policy},1B,{seq_len},{host},{device},8k,{speed}{extra}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_of_our_own_policies_calibrate(tmp_path):
    """A base 20 % off comes within 2 % of what the hidden machine does with rows not seen."""
    table = measured(SEEN, tmp_path / "own.csv")
    held_out = measured(HELD_OUT, tmp_path / "held_out.csv", f",{BASE}")
    mine = tmp_path / "mine.toml"
    found = call("calibrate", "--base", BASE, "--measured", table, "-o", mine, "--json").json()
    assert len(found["observations"]) == len(SEEN)
    assert found["before_mean_error"] > 0.1 and found["mean_error"] < 0.01
    check = ("validate", "--measured", held_out, "--jobs", 1, "--json", "--machine")
    assert call(*check, BASE).json()["mean_error"] > 0.1
    after = call(*check, mine).json()
    assert after["cells"] == after["schedules"] == len(HELD_OUT)
    assert after["max_error"] < 0.02


def rows_of(tmp_path, *lines, header=HEADER):
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def test_a_row_is_planned_with_the_options_of_its_columns(tmp_path):
    """Tokens of a step by step time where no column says them; LoRA as an option of `plan`."""
    header = "machine,policy,model,seq_len,host_mem_gib,dev_mem_gib,tokens_per_s,step_time_s,LoRA"
    line = "mine,optimal,tiny,64,1,1,1000,0.26,r=4"
    [row] = read_measured(rows_of(tmp_path, line, header=header))
    assert dict(own_key(row).values)["tokens_per_step"] == 256  # the multiple of 64 nearest to 260
    cpu = load_machine("cpu")
    plan = ts.query(
        model="tiny", machine="cpu", seq_len=64, tokens_per_step=256, lora="r=4",
        device_mem="1GiB", host_mem="1GiB",
    ).answer()  # fmt: skip
    assert TableRow(row).ready(cpu).step_s(cpu) == pytest.approx(plan.step_s)


def test_what_does_not_fit_is_refused_as_a_run_of_ours(tmp_path):
    """A run that was out of memory, as its plan is; one that ran although no plan fits."""
    head = f"{HEADER},status"
    ran, small = "mine,streaming,tiny,64,1,1,64,1000,ok", "mine,optimal,tiny,64,1,0.001,64,"
    table = rows_of(tmp_path, f"{small},oom", ran, header=head)
    found = call("validate", "--measured", table, "--machine", "cpu", "--jobs", 1, "--json").json()
    assert (found["cells"], found["failed_rows"], found["refused_alike"]) == (1, 1, 1)
    table = rows_of(tmp_path, f"{small}100,ok", ran, header=head)
    found = call("validate", "--measured", table, "--machine", "cpu", "--jobs", 1, "--json").json()
    assert (found["cells"], found["refused_rows"]) == (1, 1)
    told = error_of("calibrate", "--base", "cpu", "--measured", table)
    assert "line 2 of the table ran, and policy 'optimal' has no plan for it on cpu" in told


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("mine,fastest,tiny,64,1,1,64,9", "line 2 of the table: policy 'fastest' is unknown"),
        ("mine,own.py:RULE,tiny,64,1,1,64,9", "'own.py:RULE' is of a Python file, and a table"),
        ("mine,optimal,tiny,64,1,1,few,9", "line 2 of the table: tokens_per_step needs a positive"),
        ("mine,optimal,tiny,64,1,1,100,9", "line 2 of the table: 100 tokens per step are"),
        ("mine,optimal,9b9,64,1,1,64,9", "unknown model '9b9'"),
        ("RTX4090,,8b,512,64,8,8k,9", "name the policy of twinstream's own runs in a column 'pol"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_message(line, told, tmp_path):
    table = rows_of(tmp_path, line, line)
    for command in (("calibrate", "--base"), ("validate", "--jobs", 1, "--machine")):
        message = error_of(*command, "cpu", "--measured", table)
        assert told in message
