"""Constants of one GPU type, fitted to the rows of a table that are for calibrating.

The fit is `BoundedFit`'s. A family of runs weighs as one run, however many sizes it has.

Not all rows are simulated at each trial. Of a family with pipelines one run is, the first on fewest
GPUs; none is whose simulated microbatches pass over 3,000 layers (a ring's steps count twice each),
which take minutes.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np

from twinstream.fidelity.cluster_rows import ClusterRow, Values
from twinstream.fidelity.constants import CONSTANTS, Constant
from twinstream.fidelity.measured import Predicted
from twinstream.hardware_profiles.calibration.bounded_fit import BoundedFit, is_at_bound
from twinstream.hardware_profiles.calibration.trials import TimeQuery, Vector
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.schedule.node import Node

_MOST_LAYERS = 3_000
Predict = Callable[[Sequence[ClusterRow], Sequence[Values]], list[Predicted]]


class FittedConstant(Node):
    """A constant's value, and how wide the data leave it: one standard deviation."""

    name: str
    meaning: str
    low: float
    high: float
    value: float
    width: float
    at_bound: bool


class ConstantsFit(Node):
    """Constants of a GPU type, how far off the fitted rows are, and which did not predict."""

    gpu: str
    constants: tuple[FittedConstant, ...]
    rows: int
    families: int
    start_mean_error: float
    mean_error: float
    bias: float
    num_predictions: int
    left_out: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, float]:
        """Value of each constant by name."""
        return {one.name: one.value for one in self.constants}


def fit_constants(
    gpu: str,
    rows: Sequence[ClusterRow],
    predicted: Predict,
    constants: Sequence[Constant] = CONSTANTS,
    most_evaluations: int = 15,
) -> ConstantsFit:
    """Fit the constants of a GPU type to those of the rows that are for calibrating.

    Raises:
        CalibrationError: too few of the rows are for this, or can be predicted.
    """
    chosen = fitted_rows(rows, gpu)
    if not chosen:
        known = sorted({row.gpu for row in rows if row.calibrates})
        raise CalibrationError(
            f"no row of these tables is for calibrating {gpu}; there are some of "
            f"{', '.join(known) or 'no GPU type'}"
        )
    start = np.array([_position(one, one.start) for one in constants])
    at_start = predicted(chosen, [_values(constants, start)] * len(chosen))
    kept = [row for row, one in zip(chosen, at_start, strict=True) if one.step_s is not None]
    if len(kept) <= len(constants):
        raise CalibrationError(f"{len(kept)} rows can be predicted for {len(constants)} constants")
    sizes = Counter(row.family for row in kept)

    def predict(trials: Sequence[TimeQuery[Values]]) -> list[float]:
        asked = [kept[trial.index] for trial in trials]
        found = predicted(asked, [trial.profile for trial in trials])
        return [_step_s(row, one) for row, one in zip(asked, found, strict=True)]

    fit = BoundedFit(
        lambda place: _values(constants, place),
        predict,
        measured_s=[row.measured_s or math.nan for row in kept],
        weights=[1 / math.sqrt(sizes[row.family]) for row in kept],
        start=start,
    )
    place = fit.solve(most_evaluations)
    before, after, widths = fit.errors(start), fit.errors(place), fit.widths(place)
    return ConstantsFit(
        gpu=gpu,
        constants=tuple(map(_fitted, constants, place, widths)),
        rows=len(kept),
        families=len(sizes),
        start_mean_error=fmean(abs(before)),
        mean_error=fmean(abs(after)),
        bias=fmean(after),
        num_predictions=fit.num_predictions,
        left_out=tuple(row.row_id for row in chosen if row not in kept),
    )


def fitted_rows(rows: Sequence[ClusterRow], gpu: str) -> tuple[ClusterRow, ...]:
    """The rows that a fit of the GPU type simulates, in the tables' order."""
    chosen = [row for row in rows if row.gpu == gpu and row.calibrates]
    taken: dict[str, ClusterRow] = {}
    for row in sorted(chosen, key=lambda row: row.num_gpus):
        if _pipelined(row):
            taken.setdefault(row.family, row)
    return tuple(
        row
        for row in chosen
        if (not _pipelined(row) or row is taken[row.family]) and row.effort <= _MOST_LAYERS
    )


def _pipelined(row: ClusterRow) -> bool:
    return row.job is not None and row.job.layout.pp > 1


def _step_s(row: ClusterRow, found: Predicted) -> float:
    if found.step_s is None or row.measured_s is None:
        raise CalibrationError(f"{row.row_id} is predicted with some constants only")
    return found.step_s


def _fitted(one: Constant, position: float, width: float) -> FittedConstant:
    return FittedConstant(
        name=one.name,
        meaning=one.meaning,
        low=one.low,
        high=one.high,
        value=float(f"{one.low + position * (one.high - one.low):.4g}"),
        width=float(width) * (one.high - one.low),
        at_bound=is_at_bound(position),
    )


def _position(one: Constant, value: float) -> float:
    return (value - one.low) / (one.high - one.low)


def _values(constants: Sequence[Constant], places: Vector) -> dict[str, float]:
    return {
        one.name: one.low + float(place) * (one.high - one.low)
        for one, place in zip(constants, places, strict=True)
    }
