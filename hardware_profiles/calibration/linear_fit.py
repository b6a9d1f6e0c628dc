"""Robust least squares on a linear model of the residuals, with priors and bounds (scipy)."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from twinstream.hardware_profiles.calibration.trials import Vector

# The optimum takes each relative residual to be off by NOISE, by itself: a noise that the rows of a
# sweep share would explain away what only one sweep tells.
NOISE = 0.01
# Stated widths and the choice of rows take what recorded runs show: runs of a sweep (one model and
# length, one session of measuring) are off together by more than each by itself.
WITHIN_SWEEP = 0.005
BETWEEN_SWEEPS = 0.012
# Soft l1: beyond so many standard deviations the pull no longer grows with the distance.
_ROBUST_FROM = 1.0
_HEAVY_FROM = 0.5  # of a heavy-tailed prior
_NEVER = 1e3  # of another prior
_MEDIAN_SQUARE = 0.4549  # of a normal variable of variance 1
_ROOM = 1e-9  # scipy wants its start strictly between the bounds


def noise_covariance(sweeps: tuple[str, ...], weights: Vector) -> Vector:
    """[n, n] of relative residuals, for widths; "" is of no sweep."""
    own = np.where([bool(sweep) for sweep in sweeps], WITHIN_SWEEP, NOISE)
    together = np.array([[bool(a) and a == b for b in sweeps] for a in sweeps])
    found: Vector = np.diag(own**2 / weights) + BETWEEN_SWEEPS**2 * together
    return found


@dataclass(frozen=True)
class LinearFit:
    """residuals + jacobian (logs - at_logs), where residuals are log(predicted / measured).

    [observations] residuals, weights and sweeps, [observations, parameters] jacobian, [parameters]
    the rest. Only `free` parameters vary; the others are at their prior, 0. `heavy` are the
    parameters whose prior has heavy tails.
    """

    at_logs: Vector
    residuals: Vector
    jacobian: Vector
    weights: Vector
    sweeps: tuple[str, ...]
    prior_widths: Vector
    heavy: NDArray[np.bool_]
    low: Vector
    high: Vector
    free: NDArray[np.bool_]

    def without(self, left_out: NDArray[np.bool_]) -> "LinearFit":
        """The same without some observations."""
        kept = ~left_out
        return replace(
            self,
            residuals=self.residuals[kept],
            jacobian=self.jacobian[kept],
            weights=self.weights[kept],
            sweeps=tuple(s for s, keep in zip(self.sweeps, kept, strict=True) if keep),
        )

    def at(self, residuals: Vector, logs: Vector) -> "LinearFit":
        """The same slopes around another point, where the residuals are known."""
        return replace(self, residuals=residuals, at_logs=logs)

    def optimum(self) -> Vector:
        """Return where the robust cost of the linear model is least."""
        free = self.free
        logs = np.zeros(len(free))
        if not free.any():
            return logs
        scale = np.sqrt(self.weights) / NOISE
        slopes = scale[:, None] * self.jacobian[:, free]
        # the linear model at 0 for those that are not free
        offset = scale * (self.residuals - self.jacobian @ self.at_logs)
        widths = self.prior_widths[free]
        priors = np.diag(1.0 / widths)

        def residuals(x: Vector) -> Vector:
            return np.concatenate([offset + slopes @ x, x / widths])

        def derivatives(_: Vector) -> Vector:
            return np.concatenate([slopes, priors])

        found = least_squares(
            residuals,
            np.clip(self.at_logs[free], self.low[free], self.high[free]),
            derivatives,
            bounds=(self.low[free] - _ROOM, self.high[free] + _ROOM),
            x_scale=widths,
            loss=partial(_soft_l1, robust_from=self._robust_from(free)),
        )
        logs[free] = found.x
        return logs

    def cost(self, residuals: Vector, logs: Vector) -> float:
        """Twice the robust cost of residuals and of the priors' pull at a point."""
        return float(self._losses(residuals, logs)[0].sum())

    def widths(self, logs: Vector) -> Vector:
        """Standard deviations of the log factors where the optimum is at a point.

        Of the optimum as an estimate: what the priors' pull leaves of a truth that is their width
        away, and what the noise of sweeps and rows moves. Where the residuals left are larger than
        that noise (by their median, so that a wild one does not count), it is taken as so much
        larger.
        """
        precision, pull = self._curvature(logs)
        inverse = np.linalg.inv(precision)
        gain = inverse @ pull
        noise = noise_covariance(self.sweeps, self.weights)
        left = self.residuals + self.jacobian @ (logs - self.at_logs)
        squares = np.linalg.solve(np.linalg.cholesky(noise), left) ** 2
        used = float(np.trace(gain @ self.jacobian))  # parameters' worth
        freedom = len(squares) / max(1.0, len(squares) - used)
        noise *= max(1.0, float(np.median(squares)) / _MEDIAN_SQUARE * freedom)
        covariance = (inverse / self.prior_widths**2) @ inverse + gain @ noise @ gain.T
        widths: Vector = np.minimum(np.sqrt(np.diag(covariance)), self.prior_widths)
        return widths

    def left_out_optima(self, groups: tuple[str, ...]) -> dict[str, Vector]:
        """The optimum without each group of observations."""
        names = np.array(groups)
        return {group: self.without(names == group).optimum() for group in dict.fromkeys(groups)}

    def _curvature(self, logs: Vector) -> tuple[Vector, Vector]:
        """[parameters, parameters] of half the cost at a point, and [parameters, observations] how
        much a residual pulls."""
        left = self.residuals + self.jacobian @ (logs - self.at_logs)
        slopes = self._losses(left, logs)[1]
        count = len(left)
        pull = self.jacobian.T * (slopes[:count] * self.weights / NOISE**2)
        return pull @ self.jacobian + np.diag(slopes[count:] / self.prior_widths**2), pull

    def _losses(self, residuals: Vector, logs: Vector) -> Vector:
        """[3, observations and parameters]: loss, first and second derivative by its square."""
        squares = np.concatenate(
            [self.weights * (residuals / NOISE) ** 2, (logs / self.prior_widths) ** 2]
        )
        return _soft_l1(squares, robust_from=self._robust_from(np.ones(len(logs), dtype=bool)))

    def _robust_from(self, free: NDArray[np.bool_]) -> Vector:
        priors = np.where(self.heavy[free], _HEAVY_FROM, _NEVER)
        return np.concatenate([np.full(len(self.residuals), _ROBUST_FROM), priors])


def _soft_l1(squares: Vector, /, *, robust_from: Vector, cost_only: bool | None = None) -> Vector:
    assert not cost_only  # scipy asks a loss that is a function for all three
    scale = robust_from**2
    root = np.sqrt(1.0 + squares / scale)
    return np.stack([2.0 * scale * (root - 1.0), 1.0 / root, -0.5 / (scale * root**3)])
