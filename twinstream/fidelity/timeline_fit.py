"""Calibration from op timelines: what the executor measured against what the simulator says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinstream.hardware_profiles.calibration.fitting import (
    Fit,
    Observation,
    fit,
)
from twinstream.hardware_profiles.calibration.parameters import (
    Parameter,
    cpu_parameters,
    declared_parameters,
    prepared,
)
from twinstream.hardware_profiles.calibration.timelines import (
    OpClasses,
    mean_seconds,
    timeline_observations,
    works_of,
)
from twinstream.hardware_profiles.calibration.trials import TimeQuery
from twinstream.hardware_profiles.curve_choice import with_own_rates
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.cost import Work
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.timeline import RankTimeline
from twinstream.simulator.replay import simulate_rank

MeasuredRun = tuple[RankSchedule, RankTimeline]


def fit_timelines(
    base: Machine, runs: Sequence[MeasuredRun], on_prediction: Callable[[], None] = lambda: None
) -> Fit:
    """Fit a profile to the measured mean duration of each distinct call and copy of some runs.

    Raises:
        CalibrationError: a timeline has too little in it.
        TimelineMismatch: a timeline is of another schedule.
        MissingNumberError: the base lacks a number that a schedule needs.
    """
    observations: list[Observation] = []
    places: list[tuple[_Replays, int]] = []
    works: list[Work] = []
    for schedule, timeline in runs:
        classes, found = timeline_observations(schedule, timeline)
        replays = _Replays(schedule, classes, on_prediction)
        observations += found
        places += [(replays, index) for index in range(len(found))]
        works += works_of(schedule)

    def seconds(trials: Sequence[TimeQuery[Machine]]) -> list[float]:
        found = []
        for trial in trials:
            replays, index = places[trial.index]
            found.append(replays.seconds(trial.profile)[index])
        return found

    start, parameters = start_of(base, works)
    return fit(start, parameters, observations, seconds)


def start_of(base: Machine, works: Sequence[Work]) -> tuple[Machine, tuple[Parameter, ...]]:
    """Return the profile that a fit to runs of ours varies, and its parameters."""
    base = with_own_rates(base, works)
    if base.device == "cpu":
        return base, cpu_parameters(base, works)
    start = prepared(base)
    return start, declared_parameters(start, works)


@dataclass
class _Replays:
    """Replays the schedule once for each machine that is asked for."""

    schedule: RankSchedule
    classes: OpClasses
    on_prediction: Callable[[], None]
    known: dict[str, list[float]] = field(default_factory=dict)

    def seconds(self, machine: Machine) -> list[float]:
        """Mean durations of the classes."""
        key = machine.content_hash
        if key not in self.known:
            timeline = simulate_rank(self.schedule, machine)
            self.known[key] = mean_seconds(self.classes, timeline)
            self.on_prediction()
        return self.known[key]
