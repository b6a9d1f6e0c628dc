"""The search for the factors: predicted times and derivatives, and robust least squares on a linear
model of the residuals with priors and bounds, until nothing moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from twinstream.hardware_profiles.calibration.parameters import Parameter, applied
from twinstream.hardware_profiles.calibration.trials import Predictor, Trials, Vector
from twinstream.hardware_profiles.schema import Machine

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
    # cov(r_i, r_j) = own_i^2 / w_i [i = j] + between^2 [same sweep]
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

        # Minimise sum rho((r + J (x - x0))^2 w / noise^2) + sum rho((x / width)^2), where rho is
        # soft l1: a prior is one more residual.
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
        # x = G r, G = H^-1 P: noise N of r moves it by G N G^T; what the priors' pull leaves of a
        # truth t, of covariance D = diag(width^2), is H^-1 D^-1 t, of covariance H^-1 D^-1 H^-1.
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
    # rho(s) = 2 c^2 (sqrt(1 + s / c^2) - 1), which is s for small s and 2 c sqrt(s) for large.
    scale = robust_from**2
    root = np.sqrt(1.0 + squares / scale)
    return np.stack([2.0 * scale * (root - 1.0), 1.0 / root, -0.5 / (scale * root**3)])


_STEP = 0.02  # of a log factor, for differences: well above the rounding of simulated times
_MOST_LINEARISATIONS = 9
_MOST_WITHOUT_LATE = 3
_STILL = 0.01  # log factors that move less are where they belong: their effect is linear
_NEARLY_STILL = 0.05
_FAR_START = 1.0  # a log factor
_OTHER_STARTS = 2
FAR = 3 * NOISE  # residuals beyond are not explained by noise


@dataclass(frozen=True)
class FittedFactors:
    """Log factors where the search ended, and the linear model of the residuals around it."""

    logs: Vector
    linear: LinearFit

    @property
    def cost(self) -> float:
        return self.linear.cost(self.linear.residuals, self.logs)


class Problem:
    """Predicted times of measured ones and their derivatives; the predictor is asked in batches.

    [observations] measured_s, weights and sweeps, see `LinearFit`.
    """

    def __init__(
        self,
        base: Machine,
        parameters: tuple[Parameter, ...],
        predict: Predictor[Machine],
        measured_s: Sequence[float],
        weights: Sequence[float],
        sweeps: tuple[str, ...],
    ) -> None:
        self._base, self._parameters = base, parameters
        self._measured_s, self._weights = np.array(measured_s), np.array(weights)
        self._sweeps = sweeps
        bounds = [p.factor_bounds(base) for p in parameters]
        self._low: Vector = np.log([low for low, _ in bounds])
        self._high: Vector = np.log([high for _, high in bounds])
        self.trials = Trials(len(measured_s), self.machine, predict)

    def machine(self, logs: Vector) -> Machine:
        """Return the base with these log factors."""
        return applied(self._base, self._parameters, [float(f) for f in np.exp(logs)], "trial")

    def effects_of_priors(self) -> Vector:
        """[observations, parameters]: how far each prior's width downwards moves the log times.

        Over a whole width, so that a limit that only binds further down is seen too.
        """
        widths = np.array([p.width for p in self._parameters])
        steps = np.maximum(-widths, np.minimum(self._low, -_STEP))
        slopes = self.trials.slopes(np.zeros(len(steps)), dict(enumerate(steps)))
        effects: Vector = slopes * widths
        return effects

    def search(self) -> FittedFactors:
        """Descend from the prior; where that does not end at the noise, from other points too.

        The late parameters stay at their priors until the others are nearly still: what is small
        does not make up for what is still far off.
        """
        found = self._descended(np.zeros(len(self._parameters)))
        if np.abs(np.sqrt(self._weights) * found.linear.residuals).max() > FAR:
            others = [self._descended(start) for start in self._other_starts(found.linear)]
            found = min([found, *others], key=lambda one: one.cost)
        return found

    def _descended(self, logs: Vector) -> FittedFactors:
        """Linearise, go to the linear model's robust optimum, and again until nothing moves.

        A step that does not lower the cost is halved, twice at most, and not made where that does
        not help.
        """
        free = np.array([not p.late for p in self._parameters])
        for number in range(_MOST_LINEARISATIONS):
            if number == _MOST_WITHOUT_LATE or not free.any():
                free = np.ones(len(logs), dtype=bool)
            linear = self._linearised(logs, free)
            point = self._lower(linear, logs)
            moved = float(np.abs(point - logs).max(initial=0.0))
            logs = point
            if free.all() and moved < _STILL:
                break
            if moved < _NEARLY_STILL:
                free = np.ones(len(logs), dtype=bool)
        return FittedFactors(logs, linear.at(self._residuals(logs), logs))

    def _other_starts(self, linear: LinearFit) -> list[Vector]:
        """Return the points of least cost where one heavy-tailed parameter is far off alone."""
        heavy = [i for i, p in enumerate(self._parameters) if p.heavy_tails]
        points = []
        for column in heavy:
            for log in (-_FAR_START, _FAR_START):
                point = np.zeros(len(self._parameters))
                point[column] = np.clip(log, self._low[column], self._high[column])
                points.append(point)
        measured = np.log(self._measured_s)
        costs = [
            linear.cost(np.log(times) - measured, point)
            for point, times in zip(points, self.trials.ask(points), strict=True)
        ]
        return [points[i] for i in np.argsort(costs)[:_OTHER_STARTS]]

    def _lower(self, linear: LinearFit, logs: Vector) -> Vector:
        target, here = linear.optimum(), linear.cost(linear.residuals, logs)
        for share in (1.0, 0.5, 0.25):
            point = logs + share * (target - logs)
            if linear.cost(self._residuals(point), point) < here:
                return point
        return logs

    def _linearised(self, logs: Vector, free: NDArray[np.bool_]) -> LinearFit:
        # A difference towards the wider side stays within the bounds.
        wider = self._high - logs >= logs - self._low
        steps = {int(c): _STEP if wider[c] else -_STEP for c in np.flatnonzero(free)}
        return LinearFit(
            at_logs=logs,
            residuals=self._residuals(logs),
            jacobian=self.trials.slopes(logs, steps),
            weights=self._weights,
            sweeps=self._sweeps,
            prior_widths=np.array([p.width for p in self._parameters]),
            heavy=np.array([p.heavy_tails for p in self._parameters]),
            low=self._low,
            high=self._high,
            free=free,
        )

    def _residuals(self, logs: Vector) -> Vector:
        errors: Vector = np.log(self.trials.times_s(logs) / self._measured_s)
        return errors
