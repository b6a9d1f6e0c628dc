"""The loop closed: calibrate with the runs so far, predict a plan they do not know, run it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from twinstream import api
from twinstream.fidelity.fit_report import provenance
from twinstream.fidelity.timeline_fit import fit_timelines
from twinstream.hardware_profiles.calibration.fitting import Fit
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import Summary
from twinstream.schedule.analysis.comparison import BUSY_BELOW, Pair, busy_note
from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import PassSpans, RankTimeline, Timeline


@dataclass(frozen=True)
class Trial:
    """A schedule as predicted and as run."""

    schedule: Schedule
    predicted: Timeline
    run: api.Run
    predicted_summary: Summary
    measured_summary: Summary

    @property
    def core_share(self) -> float:
        """Of the kernels' time, how much they had a core: what is not measured counts as all."""
        return self.run.timeline.provenance.processor_share or 1.0

    @property
    def alone(self) -> RankTimeline:
        """The measured timeline; if others had the cores, as long as its kernels had one."""
        measured = self.run.timeline.only
        return measured if self.core_share >= BUSY_BELOW else _scaled(measured, self.core_share)


@dataclass(frozen=True)
class Row:
    """Step times of a plan, ns, by the profile as it was and as calibrated, and as measured.

    `wall_ns` is a step as it was; `before.measured` without the time that others had the cores,
    where they had more than a tenth of it.
    `calibrated_with`: this very run was among those that the profile was calibrated with.
    """

    name: str
    policy: str
    before: Pair
    after: Pair
    calibrated_with: bool
    wall_ns: float
    core_share: float


@dataclass(frozen=True)
class Loop:
    """What calibration gained, and whether others had the cores."""

    fit: Fit
    rows: tuple[Row, ...]

    @property
    def disturbed(self) -> str | None:
        """A sentence if others were at work; None if not."""
        busy = busy_note([row.core_share for row in self.rows])
        return busy and (
            f"{busy}, and only that is counted. Run it again with nothing beside for errors that "
            "are the model's."
        )


def calibrated(machine: Machine, trials: Sequence[Trial]) -> tuple[Machine, Fit]:
    """The profile corrected by the op times of some runs.

    Raises:
        CalibrationError: the profile is off by more than can be corrected.
    """
    fit = fit_timelines(machine, [(trial.schedule.only, trial.alone) for trial in trials])
    source = provenance(fit, f"{len(trials)} runs of the demo", datetime.now(UTC).date())
    return fit.machine(f"{machine.name}-calibrated", source), fit


def loop_rows(
    trials: Mapping[str, Trial], after: Machine, calibrated_with: Sequence[str]
) -> tuple[Row, ...]:
    """Both predictions of every run, by its name."""
    rows = []
    for name, trial in trials.items():
        measured_ns = trial.alone.step_ns
        again_ns = api.simulate(trial.schedule, after).step_ns
        rows.append(
            Row(
                name=name,
                policy=trial.schedule.policy,
                before=Pair(predicted=trial.predicted.step_ns, measured=measured_ns),
                after=Pair(predicted=again_ns, measured=measured_ns),
                calibrated_with=name in calibrated_with,
                wall_ns=trial.run.timeline.step_ns,
                core_share=trial.core_share,
            )
        )
    return tuple(rows)


def _scaled(timeline: RankTimeline, share: float) -> RankTimeline:
    """The same with all times, since the run began, in proportion."""

    def spans(of: PassSpans) -> PassSpans:
        return PassSpans(
            start_ns=tuple(round(share * t) for t in of.start_ns),
            end_ns=tuple(round(share * t) for t in of.end_ns),
        )

    update = {
        "passes": tuple(map(spans, timeline.passes)),
        "cold": spans(timeline.cold),
        "step_ns": share * timeline.step_ns,
        "spread_ns": share * timeline.spread_ns,
    }
    return timeline.model_copy(update=update)
