"""The search for the factors: predicted times and derivatives, until nothing moves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinstream.hardware_profiles.calibration.linear_fit import NOISE, LinearFit
from twinstream.hardware_profiles.calibration.parameters import Parameter, applied
from twinstream.hardware_profiles.calibration.trials import Predictor, Trials, Vector
from twinstream.hardware_profiles.schema import Machine

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
        """Of the points where one heavy-tailed parameter is far off alone, those of least cost."""
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
