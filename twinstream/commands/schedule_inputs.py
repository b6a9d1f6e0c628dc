"""Schedules that commands are given, and the profiles of what they are predicted on."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from twinstream.clusters.shared_machine import Place
from twinstream.commands.arguments.inputs import (
    checked_schedule,
    read_as,
    read_timelines,
    top_level_keys,
)
from twinstream.commands.arguments.options import Profiles
from twinstream.documents import machine_for, place_of, require_sound
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import Summary, summarize
from twinstream.schedule.analysis.comparison import by_rank
from twinstream.schedule.analysis.idle import AnySchedule, AnyTimeline
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import (
    ClusterTimeline,
    require_timeline_of_cluster,
)
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import DocumentError, read_bytes
from twinstream.simulator.replay import simulate, simulate_cluster
from twinstream.simulator.stragglers import with_stragglers

_KEYS = {"mesh", "classes", "schedules"}
_AS_WRITTEN = re.compile(rb'\s*\{[^{}\[\]]*"mesh"\s*:\s*\{\s*"axes"')  # without reading all of it


class ScheduleInputError(TwinstreamError):
    """What was given suits a device's schedule and not a mesh's, or the other way round."""


@dataclass(frozen=True)
class ScheduleInputs:
    """A safe schedule, and the profiles of what it is predicted on: a machine, of a mesh a cluster.

    `stragglers` are factors as they were given, `slow` the machines of the classes that are slower;
    where a single rank is, the schedule has more classes than that in the file. `place` is None of
    one device.
    """

    schedule: AnySchedule
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
        assert isinstance(self.schedule, Schedule)
        return machine_for(self.schedule, self.given)

    def timeline(self, predicted: Path | None = None) -> AnyTimeline:
        """The timeline in a file, simulated if there is no file.

        Raises:
            DocumentError, TimelineMismatch: there is none of this schedule in it.
            ScheduleInputError: stragglers were given, and the timeline is what it is.
        """
        schedule, place = self.schedule, self.place
        if isinstance(schedule, Schedule):
            return read_timelines(predicted, None)[0] or simulate(schedule, self.machine)
        assert place is not None
        if predicted is None:
            return simulate_cluster(schedule, place.cluster, place.machine, self.slow)
        if self.stragglers:
            raise ScheduleInputError("--straggler is simulated: leave it or --predicted out")
        found = read_as(ClusterTimeline, predicted)
        require_timeline_of_cluster(schedule, found)
        return found

    def measured(self, path: Path | None) -> AnyTimeline | None:
        """What was measured, by a file; None if there is none.

        Raises:
            DocumentError, TimelineMismatch: it holds something else, or is of another schedule.
            ScheduleInputError: a single rank is a straggler: classes are not those measured.
        """
        if isinstance(self.schedule, Schedule):
            return read_timelines(None, path)[1]
        if path is None:
            return None
        if self._has_more_classes:
            raise ScheduleInputError(
                "with a single rank as straggler the schedule has more classes than were "
                "measured: leave --straggler or --measured out"
            )
        return measured_of_cluster(self.schedule, path)

    def summary(self, timeline: AnyTimeline) -> Summary:
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


def holds_cluster(path: Path) -> bool:
    """Whether a file has a mesh's schedule, be it damaged; one that cannot be read has not."""
    try:
        text = read_bytes(path)
    except OSError:
        return False
    if _AS_WRITTEN.match(text):
        return True
    return b'"mesh"' in text and len(_KEYS & top_level_keys(path)) > 1


def read_any_schedule(path: Path) -> AnySchedule:
    """The schedule in a file, of a device or a mesh, as it is.

    Raises:
        DocumentError: there is none; says what is wrong and where.
    """
    return read_cluster(path) if holds_cluster(path) else read_as(Schedule, path)


def read_cluster(path: Path) -> ClusterSchedule:
    """The mesh's schedule in a file, as it is.

    Raises:
        DocumentError: there is none; says what is wrong and where.
    """
    return read_as(ClusterSchedule, path)


def inputs_of(path: Path, where: Profiles) -> ScheduleInputs:
    """A schedule that is safe, and on what: a machine, or of a mesh by default as `place_of`.

    Raises:
        DocumentError: there is no schedule in the file.
        UnsafeSchedule: it is damaged in its meaning.
        UnknownMachineError: of a mesh no cluster was given, and none is known.
        StragglerError: there is no such straggler.
        ScheduleInputError: an option is of meshes, and the schedule is of a device.
    """
    if not holds_cluster(path):
        refuse_cluster_options(path, where)
        return ScheduleInputs(checked_schedule(path), where.machine)
    schedule = read_cluster(path)
    require_sound(schedule)
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


def measured_of_cluster(schedule: ClusterSchedule, path: Path) -> ClusterTimeline:
    """What ranks of a schedule measured.

    Raises:
        DocumentError: the file holds no measured timeline of a cluster.
        TimelineMismatch: it is of another schedule.
    """
    found = read_as(ClusterTimeline, path)
    if found.provenance.kind != "measured":
        raise DocumentError(f"{path} is {found.provenance.kind}: give what `run -o` wrote")
    require_timeline_of_cluster(schedule, found)
    return found


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
