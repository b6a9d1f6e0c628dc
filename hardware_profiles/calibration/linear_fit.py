"""Robust least squares on a linear model of the residuals, with priors and bounds (scipy)."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Vector = NDArray[np.float64]

# Standard deviations of relative residuals: noise of runs and faults of the model. Runs of a sweep
# (one model and length, one session of measuring) are off together by more than each by itself.
NOISE = 0.01  # of what is of no sweep
WITHIN_SWEEP = 0.005
BETWEEN_SWEEPS = 0.012
_ROBUST_FROM = 2.0  # residuals beyond so many standard deviations pull less than in proportion
_MEDIAN_SQUARE = 0.4549  # of a normal variable of variance 1
_ROOM = 1e-9  # scipy wants its start strictly between the bounds


def whitening(sweeps: tuple[str, ...], weights: Vector) -> Vector:
    """[n, n] that turns residuals of observations into independent ones of variance 1.

    The symmetric root, so that each stays nearest to its own observation; "" is of no sweep.
    """
    own = np.where([bool(sweep) for sweep in sweeps], WITHIN_SWEEP, NOISE)
    together = np.array([[bool(a) and a == b for b in sweeps] for a in sweeps])
    covariance = np.diag(own**2 / weights) + BETWEEN_SWEEPS**2 * together
    values, vectors = np.linalg.eigh(covariance)
    root: Vector = (vectors / np.sqrt(values)) @ vectors.T
    return root


@dataclass(frozen=True)
class LinearFit:
    """residuals + jacobian (logs - at_logs), where residuals are log(predicted / measured).

    [observations] residuals, weights and sweeps, [observations, parameters] jacobian, [parameters]
    the rest. Only `free` parameters vary; the others are at their prior, 0.
    """

    at_logs: Vector
    residuals: Vector
    jacobian: Vector
    weights: Vector
    sweeps: tuple[str, ...]
    prior_widths: Vector
    low: Vector
    high: Vector
    free: NDArray[np.bool_]

    def with_free(self, free: NDArray[np.bool_]) -> "LinearFit":
        return replace(self, free=free)

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
        """Where the robust cost of the linear model is least."""
        free = self.free
        logs = np.zeros(len(free))
        if not free.any():
            return logs
        white = whitening(self.sweeps, self.weights)
        slopes = white @ self.jacobian[:, free]
        # the linear model at 0 for those that are not free
        offset = white @ (self.residuals - self.jacobian @ self.at_logs)
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
        squares = (whitening(self.sweeps, self.weights) @ residuals) ** 2
        priors = ((logs / self.prior_widths) ** 2).sum()
        return float(self._loss(squares)[0].sum() + priors)

    def widths(self, logs: Vector, *, inflated: bool = True) -> Vector:
        """Standard deviations of the posterior of the log factors, Gaussian around a point.

        `inflated`: where the residuals left are larger than the noise (by their median, so that a
        wild one does not count), the data count as much less.
        """
        free = self.free
        white = whitening(self.sweeps, self.weights)
        squares = (white @ (self.residuals + self.jacobian @ (logs - self.at_logs))) ** 2
        weights = 1.0 / np.sqrt(1.0 + squares / _ROBUST_FROM**2)
        slopes = white @ self.jacobian[:, free]
        told = slopes.T @ (weights[:, None] * slopes)
        priors = np.diag(1.0 / self.prior_widths[free] ** 2)
        if inflated:
            used = float(np.trace(np.linalg.solve(told + priors, told)))  # parameters' worth
            freedom = len(squares) / max(1.0, len(squares) - used)
            told /= max(1.0, float(np.median(squares)) / _MEDIAN_SQUARE * freedom)
        widths = self.prior_widths.copy()
        widths[free] = np.sqrt(np.diag(np.linalg.inv(told + priors)))
        return widths

    def scattered_widths(self, groups: tuple[str, ...]) -> Vector:
        """Widths as the scatter says by which the optimum moves without one group or another.

        Without a group, a factor should move by a variance of as much as its own grows by. The
        width is larger than the posterior's in the proportion in which it moves by more than that.
        """
        optimum, names = self.optimum(), np.array(groups)
        widths = self.widths(optimum, inflated=False)
        moved, expected = np.zeros(len(widths)), np.zeros(len(widths))
        for group in dict.fromkeys(groups):
            left = self.without(names == group)
            logs = left.optimum()
            moved += (logs - optimum) ** 2
            expected += left.widths(logs, inflated=False) ** 2 - widths**2
        scattered: Vector = widths * np.sqrt(moved / np.maximum(expected, widths**2 / len(names)))
        return scattered

    def left_out_optima(self, groups: tuple[str, ...]) -> dict[str, Vector]:
        """The optimum without each group of observations."""
        names = np.array(groups)
        return {group: self.without(names == group).optimum() for group in dict.fromkeys(groups)}

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
