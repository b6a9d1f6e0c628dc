"""One cell of a sweep: plan or search, predict, and what came of it as a row."""

import time
from typing import Any

from twinstream.clusters.layout import Layout
from twinstream.clusters.search.space import NoLayoutError, told
from twinstream.cost.bill import Prices, bill_of
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.explanation import explain
from twinstream.measures.metrics import summarize
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.planner import Planner
from twinstream.schedule.analysis.idle import exposed_communication
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.simulator.replay import simulate
from twinstream.sweep.asked.clusters import ClusterCell
from twinstream.sweep.asked.machines import Cell

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
_LAYOUT = tuple(name for name in Layout.model_fields if name not in ("stage_layers", "reduction"))
LAYOUT_FIGURES = (
    "layout", "step_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "memory_bytes",
    "room_bytes", "compute_share", "talk_share", "bubble_share", "bound_s", "gap", "num_layouts",
    "num_fit", "num_simulated", "money_per_million_tokens", "money_per_billion_tokens",
    *(f"layout.{name}" for name in _LAYOUT),
)  # fmt: skip


def run_cell(cell: Cell | ClusterCell, planner: Planner) -> Row:
    """Plan or search, and simulate; caps that are too small are a row, too."""
    start_s = time.perf_counter()
    row = _searched(cell) if isinstance(cell, ClusterCell) else _planned(cell, planner)
    return {**row, **_about(cell), "seconds": round(time.perf_counter() - start_s, 3)}


def _planned(cell: Cell, planner: Planner) -> Row:
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
    return row


def _searched(cell: ClusterCell) -> Row:
    try:
        return {"status": OK, **_layout_figures(cell)}
    except NoLayoutError as error:
        return {"status": INFEASIBLE, "reason": str(error)}
    except TwinstreamError as error:
        return {"status": REFUSED, "reason": str(error)}


def _differing(cell: Cell, other: Cell) -> str:
    """What was asked for otherwise, in words."""
    values = cell.values.items()
    return ", ".join(f"{name} {value}" for name, value in values if other.values[name] != value)


def bug_row(cell: Cell | ClusterCell, error: BaseException) -> Row:
    """The row of a cell whose planning fell over; the sweep goes on, and ends with an error."""
    return {"status": BUG, "reason": f"{type(error).__name__}: {error}", **_about(cell)}


def _about(cell: Cell | ClusterCell) -> Row:
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


def _layout_figures(cell: ClusterCell) -> Row:
    """Of the fastest layout."""
    found = cell.question.answer()
    best, prediction = found.best[0], found.best[0].prediction
    prices = Prices(price_per_gpu_hour=cell.price_per_gpu_hour)
    speed, num_gpus = prediction.tokens_per_s, prediction.num_gpus
    figures = {
        "layout": told(best.layout),
        "step_s": prediction.step_s,
        "tokens_per_s": speed,
        "tokens_per_s_per_gpu": speed / num_gpus,
        "mfu": prediction.mfu,
        "memory_bytes": prediction.memory_bytes,
        "room_bytes": prediction.room_bytes,
        "bound_s": found.least_bound_s,
        "gap": found.gap,
        "num_layouts": found.num_layouts,
        "num_fit": found.num_fit,
        "num_simulated": found.num_simulated,
        "money_per_million_tokens": bill_of(1e6 / speed, num_gpus, prices).money,
        "money_per_billion_tokens": bill_of(1e9 / speed, num_gpus, prices).money,
    }
    shares = {
        "compute_share": prediction.shares["compute"],
        "talk_share": exposed_communication(prediction.shares),
        "bubble_share": prediction.shares.get("bubble", 0.0),
    }
    layout = {f"layout.{name}": getattr(best.layout, name) for name in _LAYOUT}
    return figures | shares | layout
