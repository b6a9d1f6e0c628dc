"""The seed system's plans and schedules over a whole table of recorded runs.

TWINSTREAM_MEASURED=TABLE.csv pytest -m bench -s tests/bench/test_bench_ml_dataflow.py
"""

import os
from pathlib import Path

import pytest

from twinstream.fidelity.seed_system.cells import cell_of, key_of, sizing_of
from twinstream.fidelity.seed_system.sizing import SizingRefused
from twinstream.hardware_profiles.measured_table import MeasuredRow, read_measured
from twinstream.models.lowering.lower import lower_again
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank

GIB = 2**30
TABLE = "TWINSTREAM_MEASURED"


@pytest.fixture(scope="module")
def rows() -> tuple[MeasuredRow, ...]:
    if TABLE not in os.environ:
        pytest.skip(f"{TABLE} names no table of recorded runs")
    return read_measured(Path(os.environ[TABLE]))


def differences(row: MeasuredRow) -> list[str]:
    """What of the recorded plan, or of the recorded reason, is not reproduced."""
    by_rule = row.model_copy(update={"rounds_per_step": None}) if row.rounds_rule else row
    try:
        plan = sizing_of(by_rule)
    except SizingRefused as error:
        return [] if error.reason == row.status_detail else [error.reason]
    if row.status == "failed":
        return ["planned"]
    counts = [plan.levels.count(level) for level in ("INPUT", "ATTENTION", "FULL")]
    found = {
        "chunk_size": plan.chunk_tokens, "chunks_per_round": plan.chunks_per_round,
        "home_acts": plan.home_acts, "dev_acts": plan.device_acts,
        "dev_param_blocks": plan.param_blocks, "dev_grad_blocks": plan.grad_blocks,
        "actual_inp_only": counts[0], "actual_inp_attn": counts[1], "actual_full": counts[2],
    }  # fmt: skip
    wrong = [name for name, value in found.items() if value != int(row.columns[name])]
    if plan.rounds_per_step != row.rounds_per_step:
        wrong.append("rounds_per_step")
    for name, used in (("host", plan.used_host_bytes), ("dev", plan.used_device_bytes)):
        if abs(used / GIB - float(row.columns[f"used_{name}_mem_gib"])) > 1e-3:
            wrong.append(f"used_{name}_mem_gib")
    return wrong


@pytest.mark.bench
def test_bench_recorded_plans(rows, capsys):
    wrong = {row.line: found for row in rows if (found := differences(row))}
    with capsys.disabled():
        print(f"\n{len(rows) - len(wrong)} of {len(rows)} rows as recorded; not: {wrong}")
    unexplained = {row.line for row in rows if row.status_detail == "failed_unexplained"}
    assert set(wrong) <= unexplained


@pytest.mark.bench
def test_bench_recorded_schedules_are_safe(rows, capsys):
    distinct = {key_of(row): row for row in rows if row.status == "ok"}
    for row in distinct.values():
        schedule = cell_of(row).schedule
        assert verify_rank(schedule) == [], row.line
        assert conforms(schedule, lower_again(schedule)) == [], row.line
    with capsys.disabled():
        print(f"\n{len(distinct)} distinct schedules are safe and conform")
