"""One cell of a sweep: plan, predict, and what came of it as a row."""

import time
from typing import Any

from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.explanation import explain
from twinstream.measures.metrics import summarize
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.planner import Planner
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.simulator.replay import simulate
from twinstream.sweep.config import Cell

Row = dict[str, Any]

OK, INFEASIBLE, REFUSED, BUG = "ok", "infeasible", "refused", "bug"
FIGURES = (
    "tokens_per_s", "model_tflop_per_s", "mfu", "hfu", "step_time_s", "lower_bound_s", "gap",
    "gap_family", "limits", "idle_fraction", "recompute_fraction", "device_peak_bytes",
    "host_peak_bytes", "h2d_bytes", "d2h_bytes", "rounds_per_step", "chunks_per_round",
    "planned_chunk_tokens", "expected_error_mean", "expected_error_kind",
)  # fmt: skip
OUTCOME = (
    "status", "reason", "plan_of", "enough_device_bytes", "enough_host_bytes", "less_may_do",
    "seconds",
)  # fmt: skip


def run_cell(cell: Cell, planner: Planner) -> Row:
    """Plan and simulate a cell; caps that are too small are a row, too."""
    start_s = time.perf_counter()
    row: Row
    try:
        known = [] if cell.beside is None else [planner.plan(cell.beside.request)]
        schedule = planner.plan(cell.request, known)
        row = {"status": OK, **_figures(schedule, cell.request.machine)}
        if cell.beside is not None and schedule.ops is known[0].ops:
            row["reason"] = f"the plan of {_differing(cell.beside, cell)} is faster than its own"
            row["plan_of"] = cell.beside.key
    except InfeasiblePlan as error:
        found = error.shortage
        row = {
            "status": INFEASIBLE, "reason": str(error),
            "enough_device_bytes": found.enough_device_bytes,
            "enough_host_bytes": found.enough_host_bytes,
            "less_may_do": found.less_may_do,
        }  # fmt: skip
    except TwinstreamError as error:
        row = {"status": REFUSED, "reason": str(error)}
    return {**row, **_about(cell), "seconds": round(time.perf_counter() - start_s, 3)}


def _differing(cell: Cell, other: Cell) -> str:
    """What was asked for otherwise, in words."""
    values = cell.values.items()
    return ", ".join(f"{name} {value}" for name, value in values if other.values[name] != value)


def bug_row(cell: Cell, error: BaseException) -> Row:
    """The row of a cell whose planning fell over; the sweep goes on, and ends with an error."""
    return {"status": BUG, "reason": f"{type(error).__name__}: {error}", **_about(cell)}


def _about(cell: Cell) -> Row:
    return {"key": cell.key, **cell.values}


def _figures(schedule: Schedule, machine: Machine) -> Row:
    timeline = simulate(schedule, machine)
    summary = summarize(schedule, timeline, machine)
    explanation = explain(schedule, timeline, machine)
    work, uncertainty = schedule.workload, uncertainty_of(machine, schedule)
    found = {
        **summary.model_dump(),
        "model_tflop_per_s": schedule.model_flops / summary.step_time_s / 1e12,
        "limits": "; ".join(explanation.limits),
        "idle_fraction": sum(explanation.compute_idle_fraction.values()),
        "rounds_per_step": work.rounds_per_step,
        "chunks_per_round": work.chunks_per_round,
        "planned_chunk_tokens": work.chunk_tokens,
        "expected_error_mean": uncertainty.mean,
        "expected_error_kind": uncertainty.kind,
    }
    return {name: found[name] for name in FIGURES}
