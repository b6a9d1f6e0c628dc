"""Predictions for every distinct schedule of a table, beside what was measured."""

import csv
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median

from twinstream.fidelity.cells import cell_of, key_of
from twinstream.fidelity.predict import free_link_step_s, step_s
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.schema import Machine

STALLED = 0.10


@dataclass(frozen=True)
class Checked:
    """One distinct schedule: measured is the mean over its rows, seconds of a step."""

    machine: str
    model: str
    seq_len: int
    host_mem_gib: float
    dev_mem_gib: float
    sweep: str
    rows: int
    calibrated: int
    measured_s: float
    predicted_s: float
    stall: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0


def check(
    rows: Sequence[MeasuredRow], machine: Machine, cells: Sequence[MeasuredRow]
) -> list[Checked]:
    """Predict each distinct schedule among the successful rows, in parallel."""
    groups: dict[object, list[MeasuredRow]] = {}
    for row in rows:
        if row.status == "ok":
            groups.setdefault(key_of(row).plan, []).append(row)
    calibrated = {key_of(row).plan for row in cells}
    work = [(found, plan in calibrated) for plan, found in groups.items()]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(_checked, machine=machine), work, chunksize=4))


def _checked(work: tuple[list[MeasuredRow], bool], machine: Machine) -> Checked:
    rows, calibrated = work
    cell, row = cell_of(rows[0]), rows[0]
    seconds = step_s(cell, machine)
    speeds = [found.tokens_per_s for found in rows if found.tokens_per_s]
    return Checked(
        machine=row.machine,
        model=row.model,
        seq_len=row.seq_len,
        host_mem_gib=row.host_mem_gib,
        dev_mem_gib=row.dev_mem_gib,
        sweep=row.columns.get("source_file", ""),
        rows=len(rows),
        calibrated=int(calibrated),
        measured_s=cell.tokens_per_step / fmean(speeds),
        predicted_s=seconds,
        stall=seconds / free_link_step_s(cell, machine) - 1.0,
    )


def write_rows(found: Iterable[Checked], path: Path) -> None:
    names = [field.name for field in fields(Checked)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*names, "error"], lineterminator="\n")
        writer.writeheader()
        for one in found:
            figures = {name: _short(value) for name, value in asdict(one).items()}
            writer.writerow({**figures, "error": f"{one.error:.5f}"})


def read_rows(path: Path) -> list[Checked]:
    kinds = {field.name: field.type for field in fields(Checked)}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Checked(**{name: kinds[name](line[name]) for name in kinds})  # type: ignore[operator]
            for line in csv.DictReader(file)
        ]


def summary(found: Sequence[Checked], wanted: Callable[[Checked], bool] = lambda _: True) -> str:
    """`n, mean, median, p90, worst` of the absolute errors, as a row of a table."""
    errors = sorted(abs(one.error) for one in found if wanted(one))
    if not errors:
        return "0 | | | | "
    p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    return " | ".join(
        [str(len(errors)), *(f"{e:.2%}" for e in (fmean(errors), median(errors), p90, errors[-1]))]
    )


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
