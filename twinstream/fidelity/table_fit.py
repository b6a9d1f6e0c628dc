"""Calibration from a table of measured runs, each replayed by the policy that made it.

Runs of ours are planned once, for the base, and that plan is timed on every profile that is tried:
a plan hangs on the profile, and what ran was planned before there were measurements.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from twinstream.fidelity.measured import PredictableRow, Predictors, Ready, seconds
from twinstream.fidelity.own_rows import OwnCell
from twinstream.fidelity.rows import TableRow
from twinstream.fidelity.seed_system.cells import Cell
from twinstream.fidelity.timeline_fit import start_of
from twinstream.hardware_profiles.calibration.cells import MOST_CELLS, informative_cells, sweep_of
from twinstream.hardware_profiles.calibration.fitting import (
    Fit,
    Observation,
    fit,
)
from twinstream.hardware_profiles.calibration.parameters import (
    Parameter,
    declared_parameters,
    prepared,
)
from twinstream.hardware_profiles.calibration.search import Problem
from twinstream.hardware_profiles.calibration.timelines import works_of
from twinstream.hardware_profiles.calibration.trials import Predictor, TimeQuery
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.schedule.cost import Work


class Facts(NamedTuple):
    """A row's schedule as a fit knows it: equal `schedule` for equal ones, and its kernels."""

    schedule: str
    tokens_per_step: int
    works: list[Work]


def facts(
    row: PredictableRow[Machine], ready: Callable[[], Ready[Machine]], base: Machine
) -> Facts:
    """Make a row's schedule for the base.

    Raises:
        CalibrationError: it ran, and no plan of ours fits its caps.
        SizingRefused: the seed system refuses the row.
    """
    assert isinstance(row, TableRow)
    try:
        cell = ready()
    except InfeasiblePlan as error:
        raise CalibrationError(
            f"line {row.line.line} of the table ran, and policy '{row.line.policy}' has no plan "
            f"for it on {base.name}: {error}"
        ) from None
    assert isinstance(cell, Cell | OwnCell)
    return Facts(repr(cell.key.plan), cell.tokens_per_step, works_of(cell.timed))


def hold(
    predictors: Predictors,
    base: Machine,
    rows: Sequence[MeasuredRow],
    on_row: Callable[[], None] = lambda: None,
) -> list[Facts]:
    """Have the processes make the rows' schedules for the base, unless they hold them already."""
    return predictors.ask(facts, [(TableRow(row), base) for row in rows], on_row)


def informative_rows(
    base: Machine,
    candidates: Sequence[MeasuredRow],
    on_prediction: Callable[[], None] = lambda: None,
    most: int = MOST_CELLS,
    predictors: Predictors | None = None,
) -> tuple[MeasuredRow, ...]:
    """Choose the candidates that tell most of the base's parameters, by predictions alone.

    Raises:
        MissingNumberError: the base lacks a number that a schedule needs.
    """
    if len(candidates) <= most:
        return tuple(candidates)
    with _holding(predictors) as held:
        start, parameters = _start(base, candidates, hold(held, base, candidates))
        ones = [1.0] * len(candidates)  # nothing measured
        ask = _predictor(held, candidates, on_prediction)
        problem = Problem(start, parameters, ask, ones, ones, ("",) * len(ones))
        return informative_cells(candidates, problem.effects_of_priors(), most)


def fit_table(
    base: Machine,
    rows: Sequence[MeasuredRow],
    on_prediction: Callable[[], None] = lambda: None,
    predictors: Predictors | None = None,
) -> Fit:
    """Fit a profile to the measured step times of these rows, all of one machine.

    The rows are spread over the CPU cores; each process makes the schedules of its own once.

    Args:
        predictors: that hold rows already; by default some of its own.

    Raises:
        CalibrationError: rows are of several machines, or one did not succeed or cannot be planned.
        SizingRefused: the policy refuses a row.
        MissingNumberError: the base lacks a number that a schedule needs.
    """
    machines = sorted({row.machine for row in rows})
    if len(machines) > 1:
        raise CalibrationError(
            f"the rows are of {len(machines)} machines ({', '.join(machines)}); calibrate one"
        )
    speeds = [_tokens_per_s(row) for row in rows]
    with _holding(predictors) as held:
        known = hold(held, base, rows)
        observations = [
            Observation(
                name_of(row), each.schedule, each.tokens_per_step / speed, sweep=sweep_of(row)
            )
            for row, each, speed in zip(rows, known, speeds, strict=True)
        ]
        start, parameters = _start(base, rows, known)
        return fit(start, parameters, observations, _predictor(held, rows, on_prediction))


def name_of(row: MeasuredRow) -> str:
    """Return what a person calls a row: `8B seq 4096, 100/24 GiB` (host/device)."""
    policy = f", {row.policy}" if row.is_ours else ""
    return f"{row.model} seq {row.seq_len}, {row.host_mem_gib:g}/{row.dev_mem_gib:g} GiB{policy}"


def _holding(predictors: Predictors | None) -> Any:
    return nullcontext(predictors) if predictors is not None else Predictors(hold=True)


def _predictor(
    predictors: Predictors, rows: Sequence[MeasuredRow], on_prediction: Callable[[], None]
) -> Predictor[Machine]:
    def predict(trials: Sequence[TimeQuery[Machine]]) -> list[float]:
        asked = [(TableRow(rows[trial.index]), trial.profile) for trial in trials]
        return predictors.ask(seconds, asked, on_prediction)

    return predict


def _start(
    base: Machine, rows: Sequence[MeasuredRow], known: Sequence[Facts]
) -> tuple[Machine, tuple[Parameter, ...]]:
    """The profile to vary and its parameters; the seed system's attention is never another's."""
    works = [work for each in known for work in each.works]
    if any(row.is_ours for row in rows):
        return start_of(base, works)
    start = prepared(base)
    return start, declared_parameters(start, works)


def _tokens_per_s(row: MeasuredRow) -> float:
    if row.status != "ok" or row.tokens_per_s is None:
        raise CalibrationError(
            f"the row {name_of(row)} (line {row.line}) failed; calibrate with others"
        )
    return row.tokens_per_s
