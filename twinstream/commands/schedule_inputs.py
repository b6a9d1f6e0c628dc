"""Schedules that commands are given, and the profiles of what they are predicted on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from twinstream.clusters.running.places import machine_for, place_of
from twinstream.clusters.shared_machine import Place
from twinstream.commands.arguments.inputs import checked_schedule, read_timeline
from twinstream.commands.arguments.options import Profiles
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import Summary, summarize
from twinstream.schedule.analysis.comparison import by_rank
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.timeline import Timeline, require_timeline_of
from twinstream.simulator.replay import simulate
from twinstream.simulator.stragglers import with_stragglers


class ScheduleInputError(TwinstreamError):
    """What was given suits a device's schedule and not a mesh's, or the other way round."""


@dataclass(frozen=True)
class ScheduleInputs:
    """A safe schedule, and the profiles of what it is predicted on: a machine, of a mesh a cluster.

    `stragglers` are factors as they were given, `slow` the machines of the classes that are slower;
    where a single rank is, the schedule has more classes than that in the file. `place` is None of
    one device.
    """

    schedule: Schedule
    given: str | None
    place: Place | None = None
    stragglers: Mapping[str, float] = field(default_factory=dict)
    slow: Mapping[str, Machine] = field(default_factory=dict)

    @cached_property
    def machine(self) -> Machine:
        """That given, else the cluster's, or the shipped one that the schedule was planned for.

        Raises:
            UnknownMachineError: none was given, and the schedule's is not a shipped one as it is.
        """
        if self.place is not None:
            return self.place.machine
        return machine_for(self.schedule, self.given)

    def timeline(self, predicted: Path | None = None) -> Timeline:
        """Return the timeline in a file, simulated if there is no file.

        Raises:
            DocumentError, TimelineMismatch: there is none of this schedule in it.
            ScheduleInputError: stragglers were given, and the timeline is what it is.
        """
        if predicted is None:
            cluster = None if self.place is None else self.place.cluster
            return simulate(self.schedule, self.machine, cluster, self.slow)
        if self.stragglers:
            raise ScheduleInputError("--straggler is simulated: leave it or --predicted out")
        found = read_timeline(predicted, "simulated")
        require_timeline_of(self.schedule, found, "predicted")
        return found

    def measured(self, path: Path | None) -> Timeline | None:
        """Return what was measured, by a file; None if there is none.

        Raises:
            DocumentError, TimelineMismatch: it holds something else, or is of another schedule.
            ScheduleInputError: a single rank is a straggler: classes are not those measured.
        """
        if path is None:
            return None
        if self._has_more_classes:
            raise ScheduleInputError(
                "with a single rank as straggler the schedule has more classes than were "
                "measured: leave --straggler or --measured out"
            )
        found = read_timeline(path, "measured")
        require_timeline_of(self.schedule, found, "measured")
        return found

    def summary(self, timeline: Timeline) -> Summary:
        """Headline figures of a timeline; what ranks measured has a class for each."""
        return summarize(*by_rank(self.schedule, timeline), self.machine)

    def require_as_in_its_file(self) -> None:
        """Refuse to write a timeline of classes that no file has.

        Raises:
            ScheduleInputError: a single rank is a straggler.
        """
        if self._has_more_classes:
            raise ScheduleInputError(
                "with a single rank as straggler the schedule has more classes than its file, and "
                "a timeline of them would fit no file: leave -o out, or give a class of ranks"
            )

    @property
    def _has_more_classes(self) -> bool:
        return any(name not in self.stragglers for name in self.slow)

    @property
    def told(self) -> list[str]:
        """What is not as profiles say, or what no profile says; a line each."""
        slow = ", ".join(f"'{name}' {factor:g}" for name, factor in self.stragglers.items())
        found = [f"Stragglers, times as long: {slow}."] if slow else []
        assumed = self.place.assumed if self.place else ""
        return [*found, f"Assumed: {assumed}."] if assumed else found


def inputs_of(path: Path, where: Profiles) -> ScheduleInputs:
    """Read a schedule that is safe, and on what: a machine, or of ranks by default as `place_of`.

    Raises:
        DocumentError: there is no schedule in the file.
        UnsafeSchedule: it is damaged in its meaning.
        UnknownMachineError: of ranks no cluster was given, and none is known.
        StragglerError: there is no such straggler.
        ScheduleInputError: an option is of ranks, and the schedule is of one device.
    """
    schedule = checked_schedule(path)
    if schedule.is_one_device:
        refuse_cluster_options(path, where)
        return ScheduleInputs(schedule, where.machine)
    place = place_of(schedule, where.cluster, where.machine, path)
    factors = stragglers_of(where.straggler)
    cut, slow = with_stragglers(schedule, place.machine, factors)
    return ScheduleInputs(cut, where.machine, place, factors, slow)


def refuse_cluster_options(path: Path, where: Profiles) -> None:
    """Refuse what only meshes have, where the schedule is one device's.

    Raises:
        ScheduleInputError: says which option.
    """
    for name, value in (("cluster", where.cluster), ("straggler", where.straggler)):
        if value:
            raise ScheduleInputError(
                f"{path} is no cluster's schedule, and --{name} is of clusters: leave it out"
            )


def stragglers_of(texts: Sequence[str] | None) -> dict[str, float]:
    """Factors by who of `WHO=FACTOR`.

    >>> stragglers_of(["stage 1=1.2"])
    {'stage 1': 1.2}

    Raises:
        ScheduleInputError: a text is not of that form.
    """
    found: dict[str, float] = {}
    for text in texts or ():
        name, sign, number = text.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not sign or not name or math.isnan(factor):
            raise ScheduleInputError(
                f"cannot read the straggler '{text}'; write WHO=FACTOR, such as 'stage 1=1.2' "
                "for ranks that take a fifth longer"
            )
        found[name] = factor
    return found
