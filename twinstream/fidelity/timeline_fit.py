"""Calibration from op timelines: what the executor measured against what the simulator says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinstream.hardware_profiles.calibration.fitting import Fit, fit, require_same_machine
from twinstream.hardware_profiles.calibration.parameters import declared_parameters, prepared
from twinstream.hardware_profiles.calibration.search import Trial
from twinstream.hardware_profiles.calibration.timelines import (
    OpClass,
    mean_seconds,
    timeline_observations,
    works_of,
)
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import Timeline
from twinstream.simulator.replay import simulate


def fit_timeline(
    base: Machine,
    schedule: Schedule,
    timeline: Timeline,
    on_prediction: Callable[[], None] = lambda: None,
) -> Fit:
    """Fit a profile to the measured mean duration of each distinct call and copy of a run.

    Raises:
        CalibrationError: the timeline is of another schedule, has too little in it, or the fitted
            profile is still off by more than a factor of two.
        MissingNumberError: the base lacks a number that the schedule needs.
    """
    classes, observations = timeline_observations(schedule, timeline)
    start = prepared(base)
    simulator = _Replays(schedule, classes, on_prediction)
    parameters = declared_parameters(start, works_of(schedule))
    found = fit(start, parameters, observations, simulator.seconds)
    require_same_machine(found, "the machine of the timeline")
    return found


@dataclass
class _Replays:
    """Replays the schedule once for each machine that is asked for."""

    schedule: Schedule
    classes: Sequence[OpClass]
    on_prediction: Callable[[], None]
    known: dict[str, list[float]] = field(default_factory=dict)

    def seconds(self, trials: Sequence[Trial]) -> list[float]:
        return [self._of(trial.machine)[trial.index] for trial in trials]

    def _of(self, machine: Machine) -> list[float]:
        key = machine.content_hash
        if key not in self.known:
            timeline = simulate(self.schedule, machine)
            self.known[key] = mean_seconds(self.classes, timeline)
            self.on_prediction()
        return self.known[key]
