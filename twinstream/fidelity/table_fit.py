"""Calibration from a table of measured runs, each replayed by the policy that made it.

Runs of ours are planned once, for the base, and that plan is timed on every profile that is tried:
a plan hangs on the profile, and what ran was planned before there were measurements.
"""

from collections.abc import Callable, Sequence
from functools import partial

from twinstream.fidelity.cell_workers import CellWorkers, held_cells
from twinstream.fidelity.timeline_fit import start_of
from twinstream.hardware_profiles.calibration.cells import (
    MOST_CELLS,
    informative_cells,
    sweep_of,
)
from twinstream.hardware_profiles.calibration.fitting import (
    Fit,
    Observation,
    fit,
    require_same_machine,
)
from twinstream.hardware_profiles.calibration.parameters import (
    Parameter,
    declared_parameters,
    prepared,
)
from twinstream.hardware_profiles.calibration.search import Problem
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.cost import Work


def informative_rows(
    base: Machine,
    candidates: Sequence[MeasuredRow],
    on_prediction: Callable[[], None] = lambda: None,
    most: int = MOST_CELLS,
    workers: CellWorkers | None = None,
) -> tuple[MeasuredRow, ...]:
    """The candidates that tell most of the base's parameters, by predictions alone.

    Raises:
        MissingNumberError: the base lacks a number that a schedule needs.
    """
    if len(candidates) <= most:
        return tuple(candidates)
    with held_cells(base, candidates, workers) as held:
        start, parameters = _start(base, candidates, held.works)
        predict = partial(held.seconds, on_prediction=on_prediction)
        ones = [1.0] * len(candidates)  # nothing measured
        problem = Problem(start, parameters, predict, ones, ones, ("",) * len(ones))
        return informative_cells(candidates, problem.effects_of_priors(), most)


def fit_table(
    base: Machine,
    rows: Sequence[MeasuredRow],
    on_prediction: Callable[[], None] = lambda: None,
    workers: CellWorkers | None = None,
) -> Fit:
    """Fit a profile to the measured step times of these rows, all of one machine.

    The rows are spread over the CPU cores; each worker makes the schedules of its own once.

    Args:
        workers: that hold rows already; by default some of its own.

    Raises:
        CalibrationError: rows are of several machines, one did not succeed or cannot be planned, or
            the fitted profile is still off by more than a factor of two.
        SizingRefused: the policy refuses a row.
        MissingNumberError: the base lacks a number that a schedule needs.
    """
    machines = sorted({row.machine for row in rows})
    if len(machines) > 1:
        raise CalibrationError(
            f"the rows are of {len(machines)} machines ({', '.join(machines)}); calibrate one"
        )
    speeds = [_tokens_per_s(row) for row in rows]
    with held_cells(base, rows, workers) as held:
        observations = [
            Observation(
                name_of(row),
                held.keys[i],
                held.tokens_per_step[i] / speeds[i],
                sweep=sweep_of(row),
            )
            for i, row in enumerate(rows)
        ]
        start, parameters = _start(base, rows, held.works)
        predict = partial(held.seconds, on_prediction=on_prediction)
        found = fit(start, parameters, observations, predict)
    require_same_machine(found, "the table's machine")
    return found


def name_of(row: MeasuredRow) -> str:
    """What a person calls a row: `8B seq 4096, 100/24 GiB` (host/device)."""
    policy = f", {row.policy}" if row.is_ours else ""
    return f"{row.model} seq {row.seq_len}, {row.host_mem_gib:g}/{row.dev_mem_gib:g} GiB{policy}"


def _start(
    base: Machine, rows: Sequence[MeasuredRow], works: Sequence[Work]
) -> tuple[Machine, tuple[Parameter, ...]]:
    """The profile to vary and its parameters; the seed system's attention is never another's."""
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
