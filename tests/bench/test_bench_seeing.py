"""Size and time of reports and traces, cells a minute; `pytest -m bench -s` on this file."""

import resource
import time

import pytest

from twinstream import api
from twinstream.api import simulate
from twinstream.hardware_profiles.loader import load_machine
from twinstream.planner.request import TrainingStep
from twinstream.report.report import report_html
from twinstream.report.trace import trace_of, write_trace
from twinstream.report.view import MeshView
from twinstream.study.sweep.cells import INFEASIBLE, OK
from twinstream.study.sweep.config import config_of
from twinstream.study.sweep.sweep import SweepSettings, run_sweep

pytestmark = pytest.mark.bench
LARGEST_BYTES = 10_000_000
MACHINE = "h100"


@pytest.mark.parametrize(("seq_len", "tokens"), [(8192, 524288), (524288, 524288)])
def test_a_report_and_a_trace_of_an_8b_step(seq_len, tokens, tmp_path):
    machine = load_machine(MACHINE)
    step = TrainingStep(seq_len, tokens)
    schedule = api.plan(
        "8b", machine, step=step, device_mem="24GiB", host_mem="400GiB", policy="streaming"
    )
    timeline = simulate(schedule, machine)
    start_s = time.process_time()
    html = report_html(schedule, machine, predicted=timeline, measured=timeline)
    report_s = time.process_time() - start_s
    path = tmp_path / "trace.json.gz"
    start_s = time.process_time()
    write_trace(trace_of([MeshView("predicted", schedule, timeline)]), path)
    trace_s = time.process_time() - start_s
    assert len(html.encode()) < LARGEST_BYTES
    print(
        f"\n| 8b, {tokens // seq_len} x {seq_len:,} tokens, {len(schedule.ops):,} ops | "
        f"{len(html.encode()) / 1e6:.1f} MB | {report_s:.1f} s | "
        f"{path.stat().st_size / 1e6:.2f} MB | {trace_s:.1f} s |"
    )


@pytest.mark.parametrize(
    ("policy", "effort", "num_cells"),
    [
        ("streaming", "normal", 24),
        ("resident", "normal", 8),
        ("layer_offload", "normal", 8),
        ("optimal", "quick", 16),
        ("optimal", "normal", 4),
    ],
)
def test_cells_a_minute_of_an_8b_sweep(policy, effort, num_cells, tmp_path):
    sizes = [f"{20 + 60 * i // num_cells}GiB" for i in range(num_cells)]
    document = {
        "fixed": {
            "model": "8b", "machine": MACHINE, "seq_len": 8192, "tokens_per_step": 32768,
            "host_mem": "160GiB", "policy": policy, "effort": effort,
        },
        "axes": {"device_mem": sizes},
    }  # fmt: skip
    config = config_of(document, source="bench", folder=tmp_path)
    start_s, start_cpu_s = time.perf_counter(), cpu_of_children_s()
    swept = run_sweep(config, SweepSettings(tmp_path / "rows", num_jobs=2))
    seconds, cpu_s = time.perf_counter() - start_s, cpu_of_children_s() - start_cpu_s
    statuses = [row["status"] for row in swept.rows]
    assert set(statuses) <= {OK, INFEASIBLE}
    print(
        f"\n| {policy} | {len(statuses)}, {statuses.count(OK)} of them planned | {seconds:.1f} s | "
        f"{cpu_s / len(statuses):.2f} s |"
    )


def cpu_of_children_s() -> float:
    """Of processes that have ended; starting them, about a second each, is part of it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
