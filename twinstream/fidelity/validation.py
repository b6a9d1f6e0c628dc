"""Every row of a measured table predicted, and how far off the predictions are."""

import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import fmean

import numpy as np

from twinstream.fidelity.predict import Prediction, RowKey, predict_row
from twinstream.fidelity.rows import Known, nothing_left, planned, profiles_of
from twinstream.hardware_profiles.measured_table import OUT_OF_MEMORY, MeasuredRow
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.schedule.worker_processes import WorkerContext

STALLED = 0.10
_FEW_SCHEDULES = 4
Starts = Callable[[str, int], Callable[[], None]]


class ValidationError(TwinstreamError):
    """Nothing of a table can be predicted with the profiles given."""


class Errors(Node):
    """Absolute relative errors of tokens/s, as fractions, over distinct schedules; None of none."""

    schedules: int
    mean_error: float | None = None
    median_error: float | None = None
    p90_error: float | None = None
    max_error: float | None = None


class ValidatedRow(Node):
    """A measured row and its prediction; `refused` is the reason where the policy refuses it.

    `error` is predicted / measured - 1; `schedule` is the number of its distinct schedule.
    """

    row: MeasuredRow
    schedule: int | None = None
    predicted_tokens_per_s: float | None = None
    predicted_step_s: float | None = None
    stall: float | None = None
    error: float | None = None
    refused: str | None = None


class Validation(Node):
    """All rows in the table's order, and the errors over distinct schedules.

    A schedule's measured and predicted speeds are the means over its rows. `stalled` are those
    predicted over 10 % slower than with infinite links. `failed_rows` of the table did not run;
    `refused_alike` of these are refused for the reason that the table gives, or for want of memory
    where it gives that; `refused_rows` ran,
    but the policy refuses them, so that nothing is predicted of them. `left_out` rows are
    of machines that no profile was given for, `without_rows` are profiles given whose machine has
    none; `unknown` counts rows of models that nobody here knows, by the reason.
    """

    rows: tuple[ValidatedRow, ...]
    cells: int
    overall: Errors
    stalled: Errors
    by_model: dict[str, Errors]
    by_seq_len: dict[str, Errors]
    failed_rows: int
    refused_alike: int
    refused_rows: int
    left_out: int
    without_rows: tuple[str, ...] = ()
    unknown: dict[str, int]


def validate(
    rows: Sequence[MeasuredRow],
    machines: Sequence[Machine],
    *,
    jobs: int | None = None,
    on_start: Starts | None = None,
) -> Validation:
    """Predict the rows of a table with the profiles of their machines.

    Args:
        rows: of `read_measured`.
        machines: profiles; each is used for the rows of the machine whose class its name begins
            with, see `profiles_of`.
        jobs: processes; by default as many as there are cores.
        on_start: is told what begins and of how many parts (sizing rows, then predicting distinct
            schedules), and returns what to call after each.

    Raises:
        ValidationError: no row is of any of the machines, or none could be run.
        TwinstreamError: a row's machine or model is not known, or a profile lacks a number.
    """
    profiles = _profiles(rows, machines)
    mine = [row for row in rows if row.machine in profiles]
    start = on_start or (lambda what, total: lambda: None)
    known = planned(mine, start("sizing", len(mine)))
    plannable = [row for row in mine if row.line in known.keys]
    if not any(row.status == "ok" for row in plannable):
        raise ValidationError(nothing_left(known))
    first_rows: dict[RowKey, MeasuredRow] = {}
    for row in plannable:
        if row.status == "ok" or row.is_ours:
            first_rows.setdefault(known.keys[row.line], row)
    advance = start("predicting", len(first_rows))
    tasks = {key: (row, profiles[row.machine]) for key, row in first_rows.items()}
    predictions: dict[RowKey, Prediction] = {}
    refused: dict[RowKey, str] = {}
    for key, outcome in _predicted(tasks, jobs):
        if isinstance(outcome, str):
            refused[key] = outcome
        else:
            predictions[key] = outcome
        advance()
    of_lines = {line: refused[key] for line, key in known.keys.items() if key in refused}
    known = replace(known, refused={**known.refused, **of_lines})
    found = _summed_up(mine, known, predictions, left_out=len(rows) - len(mine))
    without = [machine.name for machine in machines if machine not in profiles.values()]
    return found.model_copy(update={"without_rows": tuple(without)})


def _profiles(rows: Sequence[MeasuredRow], machines: Sequence[Machine]) -> dict[str, Machine]:
    """The profile of each machine of the table that has one."""
    names = sorted({row.machine for row in rows})
    found = profiles_of(names, machines)
    if not found:
        given = ", ".join(machine.name for machine in machines)
        raise ValidationError(
            f"the table has rows of {', '.join(names)}, the profiles given are {given}: give the "
            "profile of one of the table's machines with --machine"
        )
    return found


def _predicted(
    tasks: Mapping[RowKey, tuple[MeasuredRow, Machine]], jobs: int | None
) -> Iterator[tuple[RowKey, Prediction | str]]:
    """Predictions, or the reason of a refusal, the longest first."""
    keys = sorted(tasks, key=lambda key: (-tasks[key][0].seq_len, tasks[key][0].line))
    rows, machines = [tasks[key][0] for key in keys], [tasks[key][1] for key in keys]
    jobs = min(jobs or os.cpu_count() or 1, len(keys))
    if jobs == 1 or len(keys) <= _FEW_SCHEDULES:
        yield from zip(keys, map(_outcome, rows, machines), strict=True)
        return
    context = WorkerContext()  # a fork would copy the progress bar's thread
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from zip(keys, pool.map(_outcome, rows, machines), strict=True)


def _outcome(row: MeasuredRow, machine: Machine) -> Prediction | str:
    try:
        return predict_row(row, machine)
    except InfeasiblePlan as error:
        return "failed_dev_mem" if error.shortage.cap == "device" else "failed_host_mem"


def _is_alike(each: "ValidatedRow") -> bool:
    told = each.row.status_detail
    return each.refused is not None and (each.refused == told or told.lower() in OUT_OF_MEMORY)


def _summed_up(
    rows: Sequence[MeasuredRow],
    known: Known,
    predictions: Mapping[RowKey, Prediction],
    *,
    left_out: int,
) -> Validation:
    numbers: dict[Hashable, int] = {}
    found: list[ValidatedRow] = []
    for row in rows:
        key = known.keys.get(row.line)
        prediction = predictions.get(key) if key is not None and row.status == "ok" else None
        if key is None or prediction is None or row.tokens_per_s is None:
            found.append(ValidatedRow(row=row, refused=known.refused.get(row.line)))
            continue
        found.append(
            ValidatedRow(
                row=row,
                schedule=numbers.setdefault(key.plan, len(numbers)),
                predicted_tokens_per_s=prediction.tokens_per_s,
                predicted_step_s=prediction.step_s,
                stall=prediction.stall,
                error=prediction.tokens_per_s / row.tokens_per_s - 1.0,
            )
        )
    compared = [each for each in found if each.error is not None]
    failed = [each for each in found if each.row.status == "failed"]
    ran = [each for each in found if each.row.status == "ok"]
    return Validation(
        rows=tuple(found),
        cells=len(compared),
        overall=errors_of(compared),
        stalled=errors_of([each for each in compared if (each.stall or 0.0) > STALLED]),
        by_model=_grouped(compared, lambda row: f"{row.machine} {row.planned_model}"),
        by_seq_len=_grouped(compared, lambda row: str(row.seq_len)),
        failed_rows=len(failed),
        refused_alike=sum(map(_is_alike, failed)),
        refused_rows=sum(each.refused is not None for each in ran),
        left_out=left_out,
        unknown=dict(known.unknown),
    )


def errors_of(rows: Iterable[ValidatedRow]) -> Errors:
    """Errors over the distinct schedules of predicted rows."""
    by_schedule: dict[int, list[ValidatedRow]] = {}
    for each in rows:
        assert each.schedule is not None
        by_schedule.setdefault(each.schedule, []).append(each)
    errors = [_error(group) for group in by_schedule.values()]
    if not errors:
        return Errors(schedules=0)
    return Errors(
        schedules=len(errors),
        mean_error=fmean(errors),
        median_error=float(np.median(errors)),
        p90_error=float(np.percentile(errors, 90)),
        max_error=max(errors),
    )


def _error(group: Sequence[ValidatedRow]) -> float:
    predicted = fmean(each.predicted_tokens_per_s or math.nan for each in group)
    measured = fmean(each.row.tokens_per_s or math.nan for each in group)
    return abs(predicted / measured - 1.0)


def _grouped(
    rows: Sequence[ValidatedRow], name_of: Callable[[MeasuredRow], str]
) -> dict[str, Errors]:
    groups: dict[str, list[ValidatedRow]] = {}
    for each in sorted(rows, key=lambda e: (e.row.machine, e.row.model, e.row.seq_len)):
        groups.setdefault(name_of(each.row), []).append(each)
    return {name: errors_of(group) for name, group in groups.items()}
