"""Robust least squares on a linear model of the residuals, with priors and bounds (scipy)."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Vector = NDArray[np.float64]

NOISE = 0.01  # standard deviation of a relative residual: noise of runs and faults of the model
_ROBUST_FROM = 2.0  # residuals beyond so many standard deviations pull less than in proportion
_ROOM = 1e-9  # scipy wants its start strictly between the bounds


@dataclass(frozen=True)
class LinearFit:
    """residuals + jacobian (logs - at_logs), where residuals are log(predicted / measured).

    [observations] residuals and weights, [observations, parameters] jacobian, [parameters] the
    rest. Only `free` parameters vary; the others are at their prior, 0.
    """

    at_logs: Vector
    residuals: Vector
    jacobian: Vector
    weights: Vector
    prior_widths: Vector
    low: Vector
    high: Vector
    free: NDArray[np.bool_]

    def with_free(self, free: NDArray[np.bool_]) -> "LinearFit":
        return replace(self, free=free)

    def without(self, left_out: NDArray[np.bool_]) -> "LinearFit":
        """The same without some observations."""
        return replace(self, weights=np.where(left_out, 0.0, self.weights))

    def at(self, residuals: Vector, logs: Vector) -> "LinearFit":
        """The same slopes around another point, where the residuals are known."""
        return replace(self, residuals=residuals, at_logs=logs)

    def optimum(self) -> Vector:
        """Where the robust cost of the linear model is least."""
        free = self.free
        logs = np.zeros(len(free))
        if not free.any():
            return logs
        scale = np.sqrt(self.weights) / NOISE
        slopes = self.jacobian[:, free] * scale[:, None]
        # the linear model at 0 for those that are not free
        offset = (self.residuals - self.jacobian @ self.at_logs) * scale
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
            loss=self._loss,
        )
        logs[free] = found.x
        return logs

    def cost(self, residuals: Vector, logs: Vector) -> float:
        """Twice the robust cost of residuals and of the priors' pull at a point."""
        squares = self.weights * (residuals / NOISE) ** 2
        priors = ((logs / self.prior_widths) ** 2).sum()
        return float(self._loss(squares)[0].sum() + priors)

    def widths(self, logs: Vector) -> Vector:
        """Standard deviations of the posterior of the log factors, Gaussian around a point."""
        free = self.free
        widths = self.prior_widths.copy()
        residuals = self.residuals + self.jacobian @ (logs - self.at_logs)
        z = self.weights * (residuals / NOISE / _ROBUST_FROM) ** 2
        weights = self.weights / NOISE**2 / np.sqrt(1.0 + z)
        told = self.jacobian[:, free].T @ (weights[:, None] * self.jacobian[:, free])
        precision = told + np.diag(1.0 / self.prior_widths[free] ** 2)
        widths[free] = np.sqrt(np.diag(np.linalg.inv(precision)))
        return widths

    def told(self, logs: Vector, share: float) -> NDArray[np.bool_]:
        """Which free parameters have a posterior narrower than this share of their prior."""
        told: NDArray[np.bool_] = self.free & (self.widths(logs) <= share * self.prior_widths)
        return told

    def _loss(self, squares: Vector, /, *, cost_only: bool | None = None) -> Vector:
        """Soft l1 of the data, squares of the priors: loss, first and second derivative."""
        assert not cost_only  # scipy asks a loss that is a function for all three
        count = len(self.residuals)
        loss = np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])
        scale = _ROBUST_FROM**2
        root = np.sqrt(1.0 + squares[:count] / scale)
        loss[0, :count] = 2.0 * scale * (root - 1.0)
        loss[1, :count] = 1.0 / root
        loss[2, :count] = -0.5 / (scale * root**3)
        return loss
