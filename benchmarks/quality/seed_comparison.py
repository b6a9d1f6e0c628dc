"""`optimal` against what the seed system measured, at the same caps and tokens per step.

TWINSTREAM_MEASURED=TABLE.csv python -m benchmarks.quality.seed_comparison --out FILE.csv
python -m benchmarks.quality.seed_comparison --summary FILE.csv

Rows are those of its distinct plans, of each the first; they come in the order of the multiples of
the golden ratio, modulo one, so that any prefix is a fair sample, and are appended as they come: an
interrupted run goes on where it stopped. The profile of a row's machine is the shipped one of that
name. `ours_cold_s` is one pass from empty queues, drained at its end, `ours_steady_s` the mean of
passes back to back, as `seed_predicted_s` and `measured_s` are of steps apart from each other.
"""

import argparse
import csv
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context  # noqa: TID251 - sends functions of this script
from pathlib import Path
from statistics import median

from twinstream.fidelity.rows import TableRow
from twinstream.fidelity.seed_system.cells import key_of, sizing_of
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.measured_table import MeasuredRow, read_measured
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.presets import load_preset
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.document import Caps
from twinstream.simulator.replay import simulate, steady_state

COLUMNS = (
    *("line", "machine", "model", "seq_len", "host_gib", "device_gib", "tokens_per_step"),
    *("status", "measured_s", "seed_predicted_s", "ours_cold_s", "ours_steady_s", "bound_s"),
    *("chunk_tokens", "chunks_per_round", "rounds_per_step", "plan_seconds"),
)
GIB = 2**30
_GOLDEN = (math.sqrt(5) - 1) / 2
_CLEARLY = 1.005


def distinct_rows(table: Path) -> list[MeasuredRow]:
    """The first row of every plan that ran."""
    first: dict[object, MeasuredRow] = {}
    for row in read_measured(table):
        if row.status == "ok":
            first.setdefault(key_of(row).plan, row)
    rows = list(first.values())
    return [rows[i] for i in sorted(range(len(rows)), key=lambda i: (i + 1) * _GOLDEN % 1)]


def compared(row: MeasuredRow) -> dict[str, object]:
    """One line of the file."""
    machine = load_machine(row.machine.lower())
    tokens = sizing_of(row).workload.tokens_per_step
    found: dict[str, object] = {
        "line": row.line, "machine": row.machine, "model": row.model, "seq_len": row.seq_len,
        "host_gib": row.host_mem_gib, "device_gib": row.dev_mem_gib, "tokens_per_step": tokens,
        "measured_s": tokens / (row.tokens_per_s or math.nan),
        "seed_predicted_s": TableRow(row).ready(machine).step_s(machine),
    }  # fmt: skip
    begun = time.perf_counter()
    try:
        schedule = Planner(steady_state).plan(request_of(row, machine, tokens))
    except InfeasiblePlan:
        return found | {"status": "infeasible"}
    seconds = time.perf_counter() - begun
    timeline = simulate(schedule, machine)
    assert schedule.bound is not None
    return found | {
        "status": "ok",
        "ours_cold_s": timeline.cold_ns / 1e9,
        "ours_steady_s": timeline.step_ns / 1e9,
        "bound_s": schedule.bound.family_step_s,
        "chunk_tokens": schedule.workload.chunk_tokens,
        "chunks_per_round": schedule.workload.chunks_per_round,
        "rounds_per_step": schedule.workload.rounds_per_step,
        "plan_seconds": round(seconds, 2),
    }


def request_of(row: MeasuredRow, machine: Machine, tokens_per_step: int) -> PlanRequest:
    """With torch's own kernels, and the row's caps whatever host memory the profile states."""
    recipe = Recipe(kernels=KernelChoice())
    caps = Caps(
        device_bytes=round(row.dev_mem_gib * GIB),
        host_bytes=round(row.host_mem_gib * GIB),
        device_reserve_bytes=round(machine.number("device_reserve_bytes")),
    )
    step = TrainingStep(row.seq_len, tokens_per_step, recipe=recipe)
    return PlanRequest(load_preset(row.preset), step, machine, caps)


def run(path: Path, rows: list[MeasuredRow], budget_s: float, jobs: int) -> None:
    """Append what is missing, as long as there is time."""
    if not path.exists():
        path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    done = {int(row["line"]) for row in read(path)}
    todo = [row for row in rows if row.line not in done]
    begun = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        while todo and time.perf_counter() - begun < budget_s:
            some, todo = todo[: 2 * jobs], todo[2 * jobs :]
            for found in pool.map(compared, some):
                with path.open("a", newline="", encoding="utf-8") as file:
                    csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(found)
            print(f"{len(rows) - len(todo)} of {len(rows)}", flush=True)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def summary(rows: list[dict[str, str]]) -> str:
    """Markdown: how much faster, by machine and model, and where slower."""
    lines = [
        "| machine, model | cells | measured / ours, cold | measured / ours, steady "
        "| its prediction / ours, steady | over 0.5 % slower than measured |",
        "|---|---|---|---|---|---|",
    ]
    ran = [row for row in rows if row["status"] == "ok"]
    kinds = sorted({(row["machine"], row["model"]) for row in ran})
    for kind in kinds:
        mine = [row for row in ran if (row["machine"], row["model"]) == kind]
        ratios = [
            median(float(row[theirs]) / float(row[ours]) for row in mine)
            for theirs, ours in (
                ("measured_s", "ours_cold_s"),
                ("measured_s", "ours_steady_s"),
                ("seed_predicted_s", "ours_steady_s"),
            )
        ]
        slower = sum(map(is_slower, mine))
        told = " | ".join(f"{ratio:.3f}" for ratio in ratios)
        lines.append(f"| {' '.join(kind)} | {len(mine)} | {told} | {slower} |")
    lines += ["", "Slower than measured by more than half a percent, steady:", ""]
    for row in ran:
        if is_slower(row):
            place = f"{row['machine']} {row['model']} {row['seq_len']}"
            lines.append(
                f"- {place}, {row['device_gib']} + {row['host_gib']} GiB: "
                f"{float(row['ours_steady_s']):.2f} s, measured {float(row['measured_s']):.2f}, "
                f"its prediction {float(row['seed_predicted_s']):.2f}"
            )
    refused = sum(row["status"] != "ok" for row in rows)
    return "\n".join([*lines, "", f"{refused} of {len(rows)} cells without a plan of ours."])


def is_slower(row: dict[str, str]) -> bool:
    return float(row["ours_steady_s"]) > _CLEARLY * float(row["measured_s"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.seed_comparison")
    parser.add_argument("--out", type=Path, help="run, and append to this CSV file")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--budget-s", type=float, default=600.0, help="begin none after that")
    parser.add_argument("--summary", type=Path, help="print Markdown of this CSV file")
    given = parser.parse_args()
    if given.out:
        table = os.environ.get("TWINSTREAM_MEASURED")
        if table is None:
            parser.error("TWINSTREAM_MEASURED names no table of measured runs")
        run(given.out, distinct_rows(Path(table)), given.budget_s, given.jobs)
    if given.summary:
        print(summary(read(given.summary)))


if __name__ == "__main__":
    main()
