"""Constants of one GPU type, fitted to the rows of a table that are for calibrating.

Least squares of ln(predicted / measured), so that twice as long and half as long err alike, with
residuals beyond 10 % counted less (soft L1): tables have outliers that nothing explains. A family
of runs weighs as one run, however many sizes it has. Bounds are those of the constants; where the
data say little a constant stays near its start: to go all its range weighs as an error of 15 %.

Not all rows are simulated at each trial. Of a family with pipelines one run is, the first on fewest
GPUs; none is whose simulated microbatches pass over 3,000 layers (a ring's steps count twice each),
which take minutes.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from twinstream.fidelity.clusters.constants import CONSTANTS, Constant
from twinstream.fidelity.clusters.measured_steps import ClusterRow
from twinstream.fidelity.clusters.scoring import Predicted
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.schedule.node import Node

_DIFF_STEP = 0.02  # of a constant's range: above the steps that whole nanoseconds make
_OUTLIER = 0.1
_AT_BOUND = 1e-3  # of the range
_PRIOR = 0.15
_MOST_LAYERS = 3_000
_PIPELINE_ROUNDS = 5  # times its stages: as many microbatches as are simulated of a pipeline
Predictor = Callable[[Sequence[ClusterRow], Sequence[Mapping[str, float]]], list[Predicted]]
_Vector = NDArray[np.float64]


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
    predicted: Predictor,
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
    errors = _Errors(kept, predicted, constants)
    solved = least_squares(
        errors.residuals, start, jac=errors.jacobian, bounds=(0.0, 1.0), loss="soft_l1",
        f_scale=_OUTLIER, max_nfev=most_evaluations, xtol=1e-4, ftol=1e-4,
    )  # fmt: skip
    before, after = errors.relative(start), errors.relative(solved.x)
    return ConstantsFit(
        gpu=gpu,
        constants=_fitted(
            constants, solved.x, errors.jacobian(solved.x), errors.residuals(solved.x)
        ),
        rows=len(kept),
        families=len({row.family for row in kept}),
        start_mean_error=fmean(abs(before)),
        mean_error=fmean(abs(after)),
        bias=fmean(after),
        num_predictions=errors.asked,
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
        if (not _pipelined(row) or row is taken[row.family]) and _layers(row) <= _MOST_LAYERS
    )


def _pipelined(row: ClusterRow) -> bool:
    return row.job is not None and row.job.layout.pp > 1


def _layers(row: ClusterRow) -> int:
    """Layers that all simulated microbatches pass."""
    if row.job is None:
        return 0
    most = _PIPELINE_ROUNDS * row.job.layout.pp
    steps = 2 * row.job.layout.cp if row.job.layout.cp > 1 else 1
    return row.job.shape.num_layers * min(row.job.num_microbatches, most) * steps


class _Errors:
    """Weighted log errors of the rows at positions between the bounds; each place asked once."""

    def __init__(
        self, rows: Sequence[ClusterRow], predicted: Predictor, constants: Sequence[Constant]
    ) -> None:
        self._rows, self._predicted, self._constants = rows, predicted, constants
        sizes = Counter(row.family for row in rows)
        self._weights = np.array([1 / math.sqrt(sizes[row.family]) for row in rows])
        self._known: dict[bytes, _Vector] = {}
        self._start = np.array([_position(one, one.start) for one in constants])
        self._slopes: _Vector | None = None
        self._slopes_at: _Vector = np.zeros(len(constants))
        self.asked = 0

    def relative(self, place: _Vector) -> _Vector:
        """Predicted / measured - 1."""
        return np.expm1(self._logs([place])[0])

    def residuals(self, place: _Vector) -> _Vector:
        return np.concatenate(
            [self._weights * self._logs([place])[0], _PRIOR * (place - self._start)]
        )

    def jacobian(self, place: _Vector) -> _Vector:
        """At the first place by differences; then updated by what a step has shown (Broyden)."""
        if self._slopes is None:
            self._slopes = self.differences(place)
        else:
            before, slopes = self._slopes_at, self._slopes
            step = place - before
            if length := float(step @ step):
                shown = self._logs([place])[0] - self._logs([before])[0]
                self._slopes = slopes + np.outer(shown - slopes @ step, step) / length
        self._slopes_at = place.copy()
        priors = _PRIOR * np.eye(len(place))
        return np.concatenate([self._weights[:, None] * self._slopes, priors])

    def differences(self, place: _Vector) -> _Vector:
        """Forward differences, inwards at the upper bound; all asked at once."""
        steps = [_DIFF_STEP if each + _DIFF_STEP <= 1 else -_DIFF_STEP for each in place]
        moved = [place + step * np.eye(len(place))[i] for i, step in enumerate(steps)]
        here, *there = self._logs([place, *moved])
        columns = [(one - here) / step for one, step in zip(there, steps, strict=True)]
        return np.array(columns).T

    def _logs(self, places: Sequence[_Vector]) -> list[_Vector]:
        new = {place.tobytes(): place for place in places if place.tobytes() not in self._known}
        trials = [_values(self._constants, place) for place in new.values() for _ in self._rows]
        found = self._predicted([*self._rows] * len(new), trials) if new else []
        self.asked += len(found)
        for i, key in enumerate(new):
            part = found[i * len(self._rows) : (i + 1) * len(self._rows)]
            self._known[key] = np.array(
                [_log_error(row, one) for row, one in zip(self._rows, part, strict=True)]
            )
        return [self._known[place.tobytes()] for place in places]


def _log_error(row: ClusterRow, found: Predicted) -> float:
    if found.step_s is None or row.measured_s is None:
        raise CalibrationError(f"{row.row_id} is predicted with some constants only")
    return math.log(found.step_s / row.measured_s)


def _fitted(
    constants: Sequence[Constant], places: _Vector, jacobian: _Vector, residuals: _Vector
) -> tuple[FittedConstant, ...]:
    freedom = max(1, len(residuals) - len(constants))
    spread = float(residuals @ residuals) / freedom
    widths = np.sqrt(np.diag(np.linalg.pinv(jacobian.T @ jacobian)) * spread)
    return tuple(
        FittedConstant(
            name=one.name,
            meaning=one.meaning,
            low=one.low,
            high=one.high,
            value=float(f"{one.low + place * (one.high - one.low):.4g}"),
            width=float(width) * (one.high - one.low),
            at_bound=bool(min(place, 1 - place) < _AT_BOUND),
        )
        for one, place, width in zip(constants, places, widths, strict=True)
    )


def _position(one: Constant, value: float) -> float:
    return (value - one.low) / (one.high - one.low)


def _values(constants: Sequence[Constant], places: _Vector) -> dict[str, float]:
    return {
        one.name: one.low + float(place) * (one.high - one.low)
        for one, place in zip(constants, places, strict=True)
    }
