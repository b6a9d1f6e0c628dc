"""Robust least squares of a profile's parameters, with priors, bounds and left-out errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from twinstream.hardware_profiles.calibration.linear_fit import LinearFit, Vector
from twinstream.hardware_profiles.calibration.parameters import Parameter, applied
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.schema import Machine

_STEP = 0.02  # of a log factor, for differences: well above the rounding of simulated times
_MOST_LINEARISATIONS = 6
_STILL = 0.01  # log factors that move less are where they belong: their effect is linear
_UNTOLD = 0.8  # a posterior wider than this share of the prior is the prior's
_FAR_OFF = 2.0
_UNHEARD = 0.99  # the same while the derivatives are still those far from the optimum


@dataclass(frozen=True)
class Observation:
    """A measured time. Those of one `group` are repeats of one schedule and left out together."""

    name: str
    group: str
    measured_s: float
    weight: float = 1.0


@dataclass(frozen=True)
class Trial:
    """One question to the predictor: how long takes observation `index` on this machine."""

    machine: Machine
    index: int


Predictor = Callable[[Sequence[Trial]], Sequence[float]]  # seconds, in the order of the trials


@dataclass(frozen=True)
class FittedParameter:
    """A parameter after the fit.

    `prior_value` and `value` are its first target's; widths are of the logarithm. `told` is
    False where the data say too little: then the value is the prior's.
    """

    parameter: Parameter
    prior_value: float
    value: float
    factor: float
    posterior_width: float
    told: bool

    @property
    def at_bound(self) -> bool:
        low, high = self.parameter.low, self.parameter.high
        return self.told and not low * 1.001 < self.value < high * 0.999


@dataclass(frozen=True)
class FittedObservation:
    """Predicted by the fit, and by a fit that has not seen it; `before_s` by the base."""

    observation: Observation
    before_s: float
    predicted_s: float
    left_out_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.observation.measured_s - 1.0

    @property
    def left_out_error(self) -> float:
        return self.left_out_s / self.observation.measured_s - 1.0

    @property
    def before_error(self) -> float:
        return self.before_s / self.observation.measured_s - 1.0


@dataclass(frozen=True)
class ErrorSummary:
    """Absolute relative errors of a fit, fractions."""

    mean_error: float
    max_error: float
    left_out_mean_error: float
    left_out_max_error: float


@dataclass(frozen=True)
class Fit:
    """What a calibration found; factors are on the base, in the order of the parameters."""

    base: Machine
    parameters: tuple[FittedParameter, ...]
    observations: tuple[FittedObservation, ...]
    num_predictions: int

    def machine(self, name: str, source: str) -> Machine:
        """The profile under this name, with this source on all that the data told."""
        told = [found for found in self.parameters if found.told]
        fitted = applied(self.base, [p.parameter for p in told], [p.factor for p in told], source)
        description = f"{self.base.description}; {source}"
        return fitted.model_copy(update={"name": name, "description": description})

    def summary(self) -> ErrorSummary:
        """Absolute relative errors on what was fitted, and on each schedule left out."""
        fitted = [abs(o.error) for o in self.observations]
        left_out = [abs(o.left_out_error) for o in self.observations]
        return ErrorSummary(
            mean_error=fmean(fitted),
            max_error=max(fitted),
            left_out_mean_error=fmean(left_out),
            left_out_max_error=max(left_out),
        )


def fit(
    base: Machine,
    parameters: Sequence[Parameter],
    observations: Sequence[Observation],
    predict: Predictor,
) -> Fit:
    """Fit the parameters' factors on the base to measured times.

    Minimises the sum of soft-l1 losses of log(predicted / measured) / NOISE and of the squares of
    log(factor) / width, see `linear_fit`. Predictions are dear and nearly linear in the log
    factors, so a few linearisations do. Parameters whose posterior stays as wide as their prior go
    back to it.

    Args:
        base: a profile, see `prepared`.
        predict: the simulator, or whatever prices an observation on a machine.

    Raises:
        CalibrationError: there are fewer than two observations, or one took no time.
    """
    _check(observations)
    problem = _Problem(base, tuple(parameters), tuple(observations), predict)
    before = problem.times_s(np.zeros(len(parameters)))
    found = problem.search()
    widths = found.widths(found.optimum)
    after, left_out = problem.times_s(found.optimum), problem.left_out_s(found)
    machine = problem.machine(found.optimum)
    return Fit(
        base=base,
        parameters=tuple(
            FittedParameter(
                parameter=parameter,
                prior_value=parameter.value_in(base),
                value=parameter.value_in(machine),
                factor=float(np.exp(found.optimum[i])),
                posterior_width=float(widths[i]),
                told=bool(found.linear.free[i]),
            )
            for i, parameter in enumerate(parameters)
        ),
        observations=tuple(
            FittedObservation(observation, float(before[i]), float(after[i]), float(left_out[i]))
            for i, observation in enumerate(observations)
        ),
        num_predictions=problem.num_predictions,
    )


@dataclass(frozen=True)
class _Found:
    """The optimum, and the linear model of the residuals around it."""

    optimum: Vector
    linear: LinearFit

    def widths(self, logs: Vector) -> Vector:
        return self.linear.widths(logs)


class _Problem:
    """Predicted times and their derivatives; the predictor is asked in batches."""

    def __init__(
        self,
        base: Machine,
        parameters: tuple[Parameter, ...],
        observations: tuple[Observation, ...],
        predict: Predictor,
    ) -> None:
        self._base, self._parameters, self._predict = base, parameters, predict
        self._observations = observations
        bounds = [p.factor_bounds(base) for p in parameters]
        self._low: Vector = np.log([low for low, _ in bounds])
        self._high: Vector = np.log([high for _, high in bounds])
        self._known: dict[bytes, Vector] = {}
        self.num_predictions = 0

    def machine(self, logs: Vector) -> Machine:
        return applied(self._base, self._parameters, [float(f) for f in np.exp(logs)], "trial")

    def times_s(self, logs: Vector) -> Vector:
        key = logs.tobytes()
        if key not in self._known:
            self._known[key] = self._ask([logs])[0]
        return self._known[key]

    def search(self) -> _Found:
        """Linearise, go to the linear model's robust optimum, and again until nothing moves.

        A step that does not lower the cost is halved, twice at most. What the data do not tell is
        put back to its prior and no longer varied.
        """
        logs = np.zeros(len(self._parameters))
        free = np.ones(len(logs), dtype=bool)
        for number in range(_MOST_LINEARISATIONS):
            linear = self._linearised(logs, free)
            share = _UNTOLD if number else _UNHEARD
            told = linear.told(linear.optimum(), share)
            if not (told == free).all():
                free, linear = told, linear.with_free(told)
            target, here = linear.optimum(), self._cost(linear, logs)
            start = np.where(free, logs, 0.0)
            for shrink in (1.0, 0.5, 0.25):
                point = start + shrink * (target - start)
                if self._cost(linear, point) < here:
                    break
            moved = float(np.abs(point - logs).max(initial=0.0))
            logs = point
            if moved < _STILL and number:
                break
        return _Found(logs, linear.at(self._residuals(logs), logs))

    def left_out_s(self, found: _Found) -> Vector:
        """Each time by the fit without its group: the linear model's optimum, then predicted."""
        trials = []
        optima: dict[str, Machine] = {}
        for index, observation in enumerate(self._observations):
            group = observation.group
            if group not in optima:
                kept = np.array([o.group != group for o in self._observations])
                optima[group] = self.machine(found.linear.without(~kept).optimum())
            trials.append(Trial(optima[group], index))
        self.num_predictions += len(trials)
        return np.array(self._predict(trials))

    def _linearised(self, logs: Vector, free: NDArray[np.bool_]) -> LinearFit:
        points, steps = [], []
        columns = np.flatnonzero(free)
        for column in columns:  # a difference towards the wider side stays within the bounds
            up = self._high[column] - logs[column] >= logs[column] - self._low[column]
            steps.append(_STEP if up else -_STEP)
            point = logs.copy()
            point[column] += steps[-1]
            points.append(point)
        here = np.log(self.times_s(logs))
        jacobian = np.zeros((len(here), len(logs)))
        for column, step, times in zip(columns, steps, self._ask(points), strict=True):
            jacobian[:, column] = (np.log(times) - here) / step
        return LinearFit(
            at_logs=logs,
            residuals=self._residuals(logs),
            jacobian=jacobian,
            weights=np.array([o.weight for o in self._observations]),
            prior_widths=np.array([p.width for p in self._parameters]),
            low=self._low,
            high=self._high,
            free=free,
        )

    def _residuals(self, logs: Vector) -> Vector:
        measured = np.array([o.measured_s for o in self._observations])
        errors: Vector = np.log(self.times_s(logs) / measured)
        return errors

    def _cost(self, linear: LinearFit, logs: Vector) -> float:
        return linear.cost(self._residuals(logs), logs)

    def _ask(self, points: Sequence[Vector]) -> list[Vector]:
        count = len(self._observations)
        trials = [Trial(m, i) for m in map(self.machine, points) for i in range(count)]
        times = np.array(self._predict(trials)).reshape(len(points), count)
        self.num_predictions += len(trials)
        return list(times)


def require_same_machine(found: Fit, measured_on: str) -> None:
    """A fit that stays far off within the bounds of its parameters began with another machine.

    Raises:
        CalibrationError: predicted times are still off by more than a factor of two in the middle.
    """
    factors = [one.predicted_s / one.observation.measured_s for one in found.observations]
    middle = median(factors)
    if not 1 / _FAR_OFF < middle < _FAR_OFF:
        raise CalibrationError(
            f"after the fit, predicted times are still {middle:.3g} times the measured ones in the "
            f"middle: '{found.base.name}' is no profile of {measured_on}, or its numbers are in "
            "other units"
        )


def _check(observations: Sequence[Observation]) -> None:
    if len(observations) < 2:
        raise CalibrationError(
            f"{len(observations)} measured times calibrate nothing; give at least 2, better 8 to 14"
        )
    for observation in observations:
        if not observation.measured_s > 0:
            raise CalibrationError(
                f"{observation.name} was measured to take {observation.measured_s:g} s; drop it"
            )
