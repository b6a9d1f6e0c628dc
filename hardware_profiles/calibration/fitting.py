"""Parameters fitted to measured times: values, how sure they are, and left-out errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean, median

import numpy as np

from twinstream.hardware_profiles.calibration.parameters import Parameter, applied
from twinstream.hardware_profiles.calibration.search import FAR, WITHIN_SWEEP, Problem
from twinstream.hardware_profiles.calibration.trials import Predictor
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.schema import ExpectedError, Machine

_UNTOLD = 0.9  # a width over this share of the prior's is nearly the prior's
_WORSE = 1e-3  # of a mean error, that does not count
_LEAST_ERROR = 1e-4
_MOVED = 1e-3  # log factors under which a number stays what it was
_FAR_OFF = 2.0  # in the middle, whatever the parameters
_MOST_AT_BOUNDS = 2  # of a fit that does not end at the noise


@dataclass(frozen=True)
class Observation:
    """A measured time.

    Those of one `group` are repeats of one schedule and left out together. Those of one `sweep` are
    off together besides each by itself, see `LinearFit`.
    """

    name: str
    group: str
    measured_s: float
    weight: float = 1.0
    sweep: str = ""


@dataclass(frozen=True)
class FittedParameter:
    """A parameter after the fit.

    `prior_value` and `value` are its first target's; widths are of the logarithm.
    `posterior_width` is that of the value as an estimate, see `LinearFit.widths`. `num_rows`
    observations would move by more than their noise if it moved by its prior's width.
    """

    parameter: Parameter
    prior_value: float
    value: float
    factor: float
    posterior_width: float
    num_rows: int

    @property
    def identified(self) -> bool:
        """Return whether the data made it narrower, or took it over its width from the prior."""
        narrower = self.posterior_width < _UNTOLD * self.parameter.width
        return narrower or abs(log(self.factor)) > self.posterior_width

    @property
    def at_bound(self) -> bool:
        low, high = self.parameter.low, self.parameter.high
        return self.identified and not low * 1.001 < self.value < high * 0.999


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
    """Absolute relative errors of a fit, fractions; `before` are the base's."""

    before_mean_error: float
    mean_error: float
    max_error: float
    left_out_mean_error: float
    left_out_max_error: float


@dataclass(frozen=True)
class Fit:
    """A calibration's result; factors are relative to the base, in the order of the parameters."""

    base: Machine
    parameters: tuple[FittedParameter, ...]
    observations: tuple[FittedObservation, ...]
    num_predictions: int

    def machine(self, name: str, source: str) -> Machine:
        """The profile under this name, with this source on all that the data told."""
        moved = [found for found in self.parameters if abs(log(found.factor)) > _MOVED]
        fitted = applied(self.base, [p.parameter for p in moved], [p.factor for p in moved], source)
        update = {
            "name": name,
            "description": f"{self.base.description}; {source}",
            "expected_error": self.expected_error(source),
        }
        return fitted.model_copy(update=update)

    def expected_error(self, source: str) -> ExpectedError:
        """The error to expect of a prediction: the errors on each group, left out of the fit."""
        errors = self.summary()
        return ExpectedError(
            mean=max(_LEAST_ERROR, errors.left_out_mean_error),
            worst=max(_LEAST_ERROR, errors.left_out_max_error),
            kind="left_out",
            source=source,
        )

    def unexplained(self) -> tuple[FittedObservation, ...]:
        """Observations that are further off the fit than noise explains, the furthest first."""
        far = [o for o in self.observations if abs(o.error) * o.observation.weight**0.5 > FAR]
        return tuple(sorted(far, key=lambda o: -abs(o.error)))

    def require_same_machine(self, measured_on: str) -> None:
        """A fit that stays far off within the bounds of its parameters began with another machine.

        Args:
            measured_on: what was measured, as a message names it.

        Raises:
            CalibrationError: predicted times are still off by more than a factor of two in the
                middle, or by more than noise on average with several parameters at their bounds.
        """
        middle = median(one.predicted_s / one.observation.measured_s for one in self.observations)
        mean = self.summary().mean_error
        ends = [one.parameter.name for one in self.parameters if one.at_bound]
        if not 1 / _FAR_OFF < middle < _FAR_OFF:
            left = f"{middle:.3g} times the measured ones in the middle"
        elif mean > FAR and len(ends) > _MOST_AT_BOUNDS:
            left = f"off by {mean:.0%} on average with {', '.join(ends)} at their bounds"
        else:
            return
        raise CalibrationError(
            f"after the fit, predicted times are still {left}: '{self.base.name}' is no profile "
            f"of {measured_on}, or its numbers are in other units"
        )

    def require_no_worse(self) -> None:
        """Refuse a fit that predicts its own observations worse than its base.

        Raises:
            CalibrationError: it does, on average, each by its weight.
        """
        weights = [o.observation.weight for o in self.observations]
        before = np.average([abs(o.before_error) for o in self.observations], weights=weights)
        after = np.average([abs(o.error) for o in self.observations], weights=weights)
        if after > before + _WORSE:
            raise CalibrationError(
                f"the fit is off by {after:.2%} on average and its base '{self.base.name}' by "
                f"{before:.2%} on what was measured, so nothing is written: keep the base, or "
                "write the fit with --anyway"
            )

    def summary(self) -> ErrorSummary:
        """Absolute relative errors on what was fitted, and on each schedule left out."""
        fitted = [abs(o.error) for o in self.observations]
        left_out = [abs(o.left_out_error) for o in self.observations]
        return ErrorSummary(
            before_mean_error=fmean(abs(o.before_error) for o in self.observations),
            mean_error=fmean(fitted),
            max_error=max(fitted),
            left_out_mean_error=fmean(left_out),
            left_out_max_error=max(left_out),
        )


def fit(
    base: Machine,
    parameters: Sequence[Parameter],
    observations: Sequence[Observation],
    predict: Predictor[Machine],
) -> Fit:
    """Fit the parameters' factors on the base to measured times.

    Minimises the sum of soft-l1 losses of log(predicted / measured), each over the same noise, and
    of the priors' losses of log(factor) / width, see `LinearFit`. Predictions are dear and nearly
    linear in the log factors, so a few linearisations do. What the data do not tell stays near its
    prior.

    Args:
        base: a profile, see `prepared`.
        predict: the simulator, or whatever prices an observation on a machine.

    Raises:
        CalibrationError: there are fewer than two observations, or one took no time.
    """
    _check(observations)
    problem = Problem(
        base,
        tuple(parameters),
        predict,
        [o.measured_s for o in observations],
        [o.weight for o in observations],
        tuple(o.sweep for o in observations),
    )
    before = problem.trials.times_s(np.zeros(len(parameters)))
    found = problem.search()
    logs, linear = found.logs, found.linear
    after = problem.trials.times_s(logs)
    without = linear.left_out_optima(tuple(o.group for o in observations))
    left_out = problem.trials.times_at_s([without[o.group] for o in observations])
    machine = problem.machine(logs)
    widths = linear.widths(logs)
    priors = np.array([p.width for p in parameters])
    moved = np.abs(linear.jacobian) * priors > WITHIN_SWEEP
    return Fit(
        base=base,
        parameters=tuple(
            FittedParameter(
                parameter=parameter,
                prior_value=parameter.value_in(base),
                value=parameter.value_in(machine),
                factor=float(np.exp(logs[i])),
                posterior_width=float(widths[i]),
                num_rows=int(moved[:, i].sum()),
            )
            for i, parameter in enumerate(parameters)
        ),
        observations=tuple(
            FittedObservation(observation, float(before[i]), float(after[i]), float(left_out[i]))
            for i, observation in enumerate(observations)
        ),
        num_predictions=problem.trials.num_predictions,
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
