"""Robust least squares of a profile's parameters, with priors, bounds and left-out errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from twinstream.hardware_profiles.calibration.parameters import Parameter, applied
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.schema import Machine

Vector = NDArray[np.float64]

NOISE = 0.01  # standard deviation of a relative residual: noise of runs and faults of the model
_ROBUST_FROM = 2.0  # residuals beyond so many standard deviations pull less than in proportion
_STEP = 0.02  # of a log factor, for differences: well above the rounding of simulated times
_MAX_EVALUATIONS = 12
_UNTOLD = 0.8  # a posterior wider than this share of the prior is the prior's
_RIDGE = 1e-12


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
    log(factor) / width. Parameters whose posterior stays as wide as their prior go back to it and
    the rest is fitted once more.

    Args:
        base: a profile, see `prepared`.
        predict: the simulator, or whatever prices an observation on a machine.

    Raises:
        CalibrationError: there are fewer than two observations, or one took no time.
    """
    _check(observations)
    problem = _Problem(base, tuple(parameters), tuple(observations), predict)
    before = problem.times_s(np.zeros(len(parameters)))
    found, jacobian, told = problem.solve_what_is_told()
    widths = problem.widths(found, jacobian, told)
    after, left_out = problem.times_s(found), problem.left_out_s(found, jacobian, told)
    machine = problem.machine(found)
    return Fit(
        base=base,
        parameters=tuple(
            FittedParameter(
                parameter=parameter,
                prior_value=parameter.value_in(base),
                value=parameter.value_in(machine),
                factor=float(np.exp(found[i])),
                posterior_width=float(widths[i]),
                told=bool(told[i]),
            )
            for i, parameter in enumerate(parameters)
        ),
        observations=tuple(
            FittedObservation(observation, float(before[i]), float(after[i]), float(left_out[i]))
            for i, observation in enumerate(observations)
        ),
        num_predictions=problem.num_predictions,
    )


class _Problem:
    """Residuals and their derivatives; the predictor is asked in batches, and once for a point."""

    def __init__(
        self,
        base: Machine,
        parameters: tuple[Parameter, ...],
        observations: tuple[Observation, ...],
        predict: Predictor,
    ) -> None:
        self._base, self._parameters, self._predict = base, parameters, predict
        self._observations = observations
        self._measured = np.array([o.measured_s for o in observations])
        self._weights = np.sqrt([o.weight for o in observations])
        self.prior_widths: Vector = np.array([p.width for p in parameters])
        bounds = [p.factor_bounds(base) for p in parameters]
        self._low: Vector = np.log([low for low, _ in bounds])
        self._high: Vector = np.log([high for _, high in bounds])
        self._last: tuple[bytes, Vector] | None = None
        self.num_predictions = 0

    def machine(self, logs: Vector) -> Machine:
        return applied(self._base, self._parameters, [float(f) for f in np.exp(logs)], "trial")

    def times_s(self, logs: Vector) -> Vector:
        if self._last is None or self._last[0] != logs.tobytes():
            self._last = (logs.tobytes(), self._ask([logs])[0])
        return self._last[1]

    def solve_what_is_told(self) -> tuple[Vector, Vector, NDArray[np.bool_]]:
        """The optimum with only those parameters free that the data narrow down."""
        told = np.ones(len(self._parameters), dtype=bool)
        found = np.zeros(len(told))
        while True:
            found, jacobian = self.solve(np.where(told, found, 0.0), told)
            still = told & (self.widths(found, jacobian, told) <= _UNTOLD * self.prior_widths)
            if (still == told).all():
                return found, jacobian, told
            told = still

    def solve(self, start: Vector, free: NDArray[np.bool_]) -> tuple[Vector, Vector]:
        """The optimum over the free parameters, and d log(time) / d log(factor) [times, all]."""
        jacobians: dict[bytes, Vector] = {}

        def full(x: Vector) -> Vector:
            logs = start.copy()
            logs[free] = x
            return logs

        def residuals(x: Vector) -> Vector:
            return np.concatenate([self._data(full(x)), x / self.prior_widths[free]])

        def derivatives(x: Vector) -> Vector:
            logs = full(x)
            jacobians[x.tobytes()] = self._jacobian(logs, free)
            data = jacobians[x.tobytes()][:, free] * (self._weights / NOISE)[:, None]
            return np.concatenate([data, np.diag(1.0 / self.prior_widths[free])])

        if not free.any():
            return start, np.zeros((len(self._measured), len(start)))
        room = 1e-9
        solution = least_squares(
            residuals,
            np.clip(start[free], self._low[free] - room, self._high[free] + room),
            derivatives,
            bounds=(self._low[free] - 2 * room, self._high[free] + 2 * room),
            x_scale=self.prior_widths[free],
            loss=self._loss,
            ftol=1e-4, xtol=1e-4, gtol=1e-4,
            max_nfev=_MAX_EVALUATIONS,
        )  # fmt: skip
        found = full(solution.x)
        known = jacobians.get(solution.x.tobytes())
        return found, self._jacobian(found, free) if known is None else known

    def widths(self, logs: Vector, jacobian: Vector, free: NDArray[np.bool_]) -> Vector:
        """Standard deviations of the posterior of log(factor), linear around the optimum."""
        precision = self._precision(self._robust_weights(logs), jacobian, free)
        widths = self.prior_widths.copy()
        widths[free] = np.sqrt(np.diag(np.linalg.inv(precision)))
        return widths

    def left_out_s(self, logs: Vector, jacobian: Vector, free: NDArray[np.bool_]) -> Vector:
        """Each time by the fit without its group: one Gauss-Newton step, then the predictor."""
        weights = self._robust_weights(logs)
        residuals = np.log(self.times_s(logs) / self._measured)
        trials = []
        for index, observation in enumerate(self._observations):
            kept = np.array([o.group != observation.group for o in self._observations])
            used = np.where(kept, weights, 0.0)
            gradient = jacobian[:, free].T @ (used * residuals)
            gradient += logs[free] / self.prior_widths[free] ** 2
            step = np.linalg.solve(self._precision(used, jacobian, free), gradient)
            moved = logs.copy()
            moved[free] = np.clip(logs[free] - step, self._low[free], self._high[free])
            trials.append(Trial(self.machine(moved), index))
        self.num_predictions += len(trials)
        return np.array(self._predict(trials))

    def _data(self, logs: Vector) -> Vector:
        errors: Vector = np.log(self.times_s(logs) / self._measured) * self._weights / NOISE
        return errors

    def _jacobian(self, logs: Vector, free: NDArray[np.bool_]) -> Vector:
        columns = np.flatnonzero(free)
        points, steps = [], []
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
        return jacobian

    def _ask(self, points: Sequence[Vector]) -> list[Vector]:
        count = len(self._measured)
        trials = [Trial(m, i) for m in map(self.machine, points) for i in range(count)]
        times = np.array(self._predict(trials)).reshape(len(points), count)
        self.num_predictions += len(trials)
        return list(times)

    def _precision(self, weights: Vector, jacobian: Vector, free: NDArray[np.bool_]) -> Vector:
        told = jacobian[:, free].T @ (weights[:, None] * jacobian[:, free])
        precision: Vector = told + np.diag(1.0 / self.prior_widths[free] ** 2 + _RIDGE)
        return precision

    def _robust_weights(self, logs: Vector) -> Vector:
        z = (self._data(logs) / _ROBUST_FROM) ** 2
        weights: Vector = self._weights**2 / NOISE**2 / np.sqrt(1.0 + z)
        return weights

    def _loss(self, squares: Vector, /, *, cost_only: bool | None = None) -> Vector:
        """Soft l1 of the data, squares of the priors: loss, first and second derivative."""
        assert not cost_only  # scipy asks a loss that is a function for all three
        count = len(self._measured)
        loss = np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])
        scale = _ROBUST_FROM**2
        root = np.sqrt(1.0 + squares[:count] / scale)
        loss[0, :count] = 2.0 * scale * (root - 1.0)
        loss[1, :count] = 1.0 / root
        loss[2, :count] = -0.5 / (scale * root**3)
        return loss


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
