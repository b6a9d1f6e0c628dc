"""Robust least squares between bounds, where slopes are dear: measured once, then kept up to date.

Twice as long and half as long err alike, as the logarithm of predicted / measured. A point is a
position between the bounds of each parameter, from 0 to 1.
"""

from collections.abc import Callable, Sequence
from typing import Generic

import numpy as np
from scipy.optimize import least_squares

from twinstream.hardware_profiles.calibration.trials import (
    Predictor,
    Profile,
    TimeQuery,
    Trials,
    Vector,
)

_DIFF_STEP = 0.02  # of a parameter's range: above the steps that whole nanoseconds make
_OUTLIER = 0.1  # soft l1: residuals beyond count less, as tables have outliers nothing explains
_PRIOR = 0.15  # to go all its range weighs as an error of 15 %
_AT_BOUND = 1e-3  # of the range


class BoundedFit(Generic[Profile]):
    """Times fitted from a start, near which what the data say little of stays."""

    def __init__(
        self,
        profile_of: Callable[[Vector], Profile],
        predict: Predictor[Profile],
        measured_s: Sequence[float],
        weights: Sequence[float],
        start: Vector,
    ) -> None:
        def ratios(trials: Sequence[TimeQuery[Profile]]) -> list[float]:
            found = zip(trials, predict(trials), strict=True)
            return [seconds / measured_s[trial.index] for trial, seconds in found]

        self._trials = Trials(len(measured_s), profile_of, ratios)
        self._weights = np.array(weights)
        self._start, self._at = start, start
        self._slopes: Vector | None = None

    @property
    def num_predictions(self) -> int:
        """Return how many predictions were asked for."""
        return self._trials.num_predictions

    def solve(self, most_evaluations: int) -> Vector:
        """Return the position of least cost."""
        found: Vector = least_squares(
            self._residuals,
            self._start,
            jac=self._jacobian,
            bounds=(0.0, 1.0),
            loss="soft_l1",
            f_scale=_OUTLIER,
            max_nfev=most_evaluations,
            xtol=1e-4,
            ftol=1e-4,
        ).x
        return found

    def errors(self, place: Vector) -> Vector:
        """Return predicted / measured - 1 of each observation."""
        return np.expm1(self._logs(place))

    def widths(self, place: Vector) -> Vector:
        """Return how wide the data leave each parameter, of its range: one standard deviation."""
        jacobian, residuals = self._jacobian(place), self._residuals(place)
        freedom = max(1, len(residuals) - len(place))
        spread = float(residuals @ residuals) / freedom
        # The covariance of least squares: s^2 (J^T J)^-1, where s^2 is what is left a freedom.
        widths: Vector = np.sqrt(np.diag(np.linalg.pinv(jacobian.T @ jacobian)) * spread)
        return widths

    def _logs(self, place: Vector) -> Vector:
        logs: Vector = np.log(self._trials.times_s(place))
        return logs

    def _residuals(self, place: Vector) -> Vector:
        return np.concatenate([self._weights * self._logs(place), _PRIOR * (place - self._start)])

    def _jacobian(self, place: Vector) -> Vector:
        """Measure slopes at the first place, inwards at the upper bound; then update them.

        Broyden's update is the least change of the slopes J by which the last step s explains what
        was seen of it, y: J + (y - J s) s^T / (s^T s).
        """
        if self._slopes is None:
            steps = [_DIFF_STEP if each + _DIFF_STEP <= 1 else -_DIFF_STEP for each in place]
            self._slopes = self._trials.slopes(place, dict(enumerate(steps)))
        else:
            step = place - self._at
            if length := float(step @ step):
                seen = self._logs(place) - self._logs(self._at)
                self._slopes = self._slopes + np.outer(seen - self._slopes @ step, step) / length
        self._at = place.copy()
        return np.concatenate([self._weights[:, None] * self._slopes, _PRIOR * np.eye(len(place))])


def is_at_bound(position: float) -> bool:
    """Return whether a position is a bound's."""
    return bool(min(position, 1 - position) < _AT_BOUND)
