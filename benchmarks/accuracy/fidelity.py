r"""What docs/benchmarks/accuracy.md shows, from the CSV files that `validate -o` writes.

    python -m benchmarks.accuracy.fidelity summary PREDICTED.csv --measured TABLE.csv \
        --cells CELLS.csv
    python -m benchmarks.accuracy.fidelity plot PREDICTED.csv ... --measured TABLE.csv \
        --cells CELLS.csv ...
        -o PLOT.svg
    python -m benchmarks.accuracy.fidelity phases --machine PROFILE.toml
    python -m benchmarks.accuracy.fidelity borrow --machine NAME --relative NAME \
        [--keep CURVE] -o NEW.toml

`summary` leaves out the schedules of the calibration cells (as `calibrate --cells` takes them), and
counts each distinct schedule once.
"""

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from benchmarks.accuracy.borrowing import borrowed
from benchmarks.accuracy.fidelity_plot import Dot, plot
from twinstream.fidelity.rows import listed_rows
from twinstream.fidelity.seed_system.cells import Cell, cell_of, key_of
from twinstream.fidelity.seed_system.policy import timed_ns
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.measured_table import MeasuredRow, read_measured
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.ops import Compute
from twinstream.simulator.costs import MachineCosts
from twinstream.simulator.replay import replay_passes

STALLED = 0.10
# The two profiled runs of als244/ml_dataflow (8B, H100): seconds of forward, head, backward, round,
# optimizer and step, and the plan columns that tell which configuration it was.
PROFILED = {
    "8B, 8k": ((8192, 5, 4, 5, 6, 21), (0.437, 0.0811, 1.096, 1.614, 1.19, 56.1)),
    "8B, 64k": ((65536, 9, 8, 35, 53, 40), (3.32, 0.317, 8.03, 11.66, None, 59.46)),
}


@dataclass(frozen=True)
class Schedule:
    """A distinct schedule: mean speeds over its rows; `error` of tokens/s."""

    row: MeasuredRow
    rows: int
    predicted: float
    measured: float
    stall: float
    calibrated: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    @property
    def sweep(self) -> str:
        return self.row.columns.get("source_file", "")


def schedules(predicted: Path, measured: Path, cells: Path) -> list[Schedule]:
    """The predicted rows by schedule; those of `cells` are calibrated with."""
    table = read_measured(measured)
    with predicted.open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["error"]]
    name = lines[0]["machine"]
    rows = [row for row in table if row.machine == name and row.status == "ok"]
    seen = {key_of(row).plan for row in listed_rows(rows, cells)}
    by_caps = {_caps(dict(vars(row))): row for row in rows}
    groups: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        groups.setdefault(line["schedule"], []).append(line)
    found = []
    for group in groups.values():
        row = by_caps[_caps(group[0])]
        found.append(
            Schedule(
                row=row,
                rows=len(group),
                predicted=fmean(float(line["predicted_tokens_per_s"]) for line in group),
                measured=fmean(float(line["tokens_per_s"]) for line in group),
                stall=float(group[0]["stall"]),
                calibrated=key_of(row).plan in seen,
            )
        )
    return found


def _caps(values: dict[str, str]) -> tuple[str, ...]:
    names = ("seq_len", "host_mem_gib", "dev_mem_gib")
    return (values["model"], *(f"{float(values[name]):g}" for name in names))


def summary(found: Sequence[Schedule]) -> list[str]:
    """Rows of a Markdown table of absolute errors."""
    rest = [one for one in found if not one.calibrated]
    sweeps = {one.sweep for one in found if one.calibrated}
    lines = ["| schedules | number | mean | median | p90 | worst | bias |"]
    lines.append("|---|---|---|---|---|---|---|")
    groups = [
        ("calibrated with", [one for one in found if one.calibrated]),
        ("not calibrated with", rest),
        ("of these in sweeps of the calibration", [one for one in rest if one.sweep in sweeps]),
        ("of these stalled over 10 %", [one for one in rest if one.stall > STALLED]),
    ]
    for model in sorted({one.row.model for one in rest}):
        of_model = [one for one in rest if one.row.model == model]
        groups.append((model, of_model))
        for seq_len in sorted({one.row.seq_len for one in of_model}):
            of_length = [one for one in of_model if one.row.seq_len == seq_len]
            groups.append((f"{model}, {seq_len}", of_length))
    return lines + [_line(name, group) for name, group in groups]


def _line(name: str, found: Sequence[Schedule]) -> str:
    if not found:
        return f"| {name} | 0 | | | | | |"
    errors = sorted(abs(one.error) for one in found)
    p90 = float(np.percentile(errors, 90))
    figures = [fmean(errors), median(errors), p90, errors[-1]]
    shown = " | ".join(f"{error:.2%}" for error in figures)
    return f"| {name} | {len(found)} | {shown} | {fmean(one.error for one in found):+.2%} |"


def profiled_cells(measured: Path) -> dict[str, tuple[Cell, float]]:
    """The schedules of the two profiled runs, found by their plans, and the seconds of a step that
    the table records for them, without a profiler."""
    found = {}
    rows = [r for r in read_measured(measured) if (r.machine, r.model) == ("H100", "8B")]
    for name, (wanted, _) in PROFILED.items():
        for row in (row for row in rows if row.status == "ok"):
            plan = key_of(row).plan
            columns = (
                plan.seq_len, plan.param_blocks, plan.grad_blocks, plan.device_acts,
                plan.full_acts, plan.attention_acts,
            )  # fmt: skip
            if columns == wanted and row.step_time_s is not None:
                found[name] = cell_of(row), row.step_time_s
                break
    return found


@dataclass(frozen=True)
class Phases:
    """Seconds of the parts of a round in the middle (of the last one, where there are few rounds),
    of what follows the last round, and of the whole step."""

    forward_s: float
    head_s: float
    backward_s: float
    round_s: float
    optimizer_s: float
    step_s: float


def phases(cell: Cell, machine: Machine) -> Phases:
    """Where a step's time goes, by the starts and ends of compute tasks.

    A recompute before the first backward counts as backward.
    """
    (spans,) = replay_passes(cell.timed, MachineCosts(cell.timed, machine), 1)
    rounds = cell.schedule.workload.rounds_per_step
    starts: list[dict[str, int]] = [{} for _ in range(rounds)]
    ends: list[dict[str, int]] = [{} for _ in range(rounds)]
    for op, start_ns, end_ns in zip(cell.schedule.ops, spans.start_ns, spans.end_ns, strict=True):
        if isinstance(op, Compute) and op.label.round is not None:
            kind = "block_backward" if op.label.kind == "block_recompute" else op.label.kind
            starts[op.label.round].setdefault(kind, start_ns)
            ends[op.label.round][kind] = end_ns
    middle = min(1, rounds - 1)
    mark, end = starts[middle], ends[middle]["embed_backward"]
    after = timed_ns(cell.schedule, spans) + starts[0]["embed_forward"]
    return Phases(
        forward_s=(mark["head_loss"] - mark["embed_forward"]) / 1e9,
        head_s=(mark["block_backward"] - mark["head_loss"]) / 1e9,
        backward_s=(end - mark["block_backward"]) / 1e9,
        round_s=(end - mark["embed_forward"]) / 1e9,
        optimizer_s=(after - ends[-1]["embed_backward"]) / 1e9,
        step_s=cell.step_s(machine),
    )


def phase_lines(machine: Path, measured: Path) -> list[str]:
    """Phases of the profiled runs, predicted and measured, as a Markdown table.

    The last column takes the measured seconds at the pace of the same plan's recorded run.
    """
    profile = load_machine(machine)
    lines = ["| run | phase | predicted s | measured s | error | at the recorded run's pace |"]
    lines.append("|---|---|---|---|---|---|")
    for name, (cell, recorded_s) in profiled_cells(measured).items():
        seconds_seen = PROFILED[name][1]
        assert seconds_seen[-1] is not None
        pace = seconds_seen[-1] / recorded_s
        for (phase, seconds), seen in zip(
            vars(phases(cell, profile)).items(), seconds_seen, strict=True
        ):
            if seen is not None:
                errors = f"{seconds / seen - 1:+.1%} | {seconds / seen * pace - 1:+.1%}"
                shown = f"{seconds:.4g} | {seen:g} | {errors}"
                lines.append(f"| {name} | {phase.removesuffix('_s')} | {shown} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("summary", "plot", "phases", "borrow"))
    parser.add_argument("predicted", nargs="*", type=Path)
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--machine")
    parser.add_argument("--cells", action="append", default=[], type=Path)
    parser.add_argument("--relative")
    parser.add_argument("--keep", action="append", default=[])
    parser.add_argument("--note", default="")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    if given.what == "borrow":
        machine = borrowed(
            load_machine(given.machine),
            load_machine(given.relative),
            given.note,
            lambda key: key not in given.keep,
        )
        save_machine(machine.model_copy(update={"name": given.output.stem}), given.output)
    elif given.what == "phases":
        print("\n".join(phase_lines(given.machine, given.measured)))
    elif given.what == "summary":
        found = schedules(given.predicted[0], given.measured, given.cells[0])
        print("\n".join(summary(found)))
    else:
        panels = {}
        for path, cells in zip(given.predicted, given.cells, strict=True):
            found = schedules(path, given.measured, cells)
            name = found[0].row.machine
            panels[name] = [
                Dot(one.row.seq_len, one.error, one.row.model, one.calibrated, one.stall > STALLED)
                for one in found
            ]
        given.output.write_text(plot(panels), encoding="utf-8")


if __name__ == "__main__":
    main()
