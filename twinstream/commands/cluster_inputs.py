"""Schedules that commands are given, and the profiles of what they are predicted on."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from twinstream import api
from twinstream.clusters.running.run_ranks import NotRunnableError, spec_of
from twinstream.clusters.shared_machine import Place, cores_here, place_here
from twinstream.commands.arguments.inputs import (
    checked_schedule,
    machine_of,
    read_as,
    read_timelines,
    top_level_keys,
)
from twinstream.commands.arguments.options import Profiles
from twinstream.hardware_profiles.clusters import loader as clusters
from twinstream.hardware_profiles.clusters.loader import cluster_names, load_cluster
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import Summary, summarize
from twinstream.schedule.analysis.comparison import by_rank
from twinstream.schedule.analysis.idle import AnyTimeline
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import (
    ClusterTimeline,
    require_timeline_of_cluster,
)
from twinstream.schedule.cluster.verify_cluster import require_safe_cluster
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import DocumentError, read_bytes
from twinstream.schedule.timeline import Timeline
from twinstream.simulator.replay import simulate_cluster
from twinstream.simulator.stragglers import with_stragglers

_KEYS = {"mesh", "classes", "schedules"}
_AS_WRITTEN = re.compile(rb'\s*\{[^{}\[\]]*"mesh"\s*:\s*\{\s*"axes"')  # without reading all of it


class ClusterInputError(TwinstreamError):
    """What was given suits a device's schedule and not a cluster's, or the other way round."""


@dataclass(frozen=True)
class DeviceInputs:
    """One device's schedule, and the machine that was asked for, by name or file."""

    schedule: Schedule
    given: str | None

    told: Sequence[str] = ()

    @cached_property
    def machine(self) -> Machine:
        """The machine given, else the shipped one that the schedule was planned for.

        Raises:
            UnknownMachineError: none was given, and the schedule's is not a shipped one as it is.
        """
        return machine_of(self.schedule, self.given)

    def timeline(self, predicted: Path | None = None) -> Timeline:
        """The timeline in a file, simulated if there is no file.

        Raises:
            DocumentError: there is none that was simulated in it.
        """
        found = read_timelines(predicted, None)[0]
        return found or api.simulate(self.schedule, self.machine)

    def measured(self, path: Path | None) -> Timeline | None:
        """What was measured, by a file; None if there is none.

        Raises:
            DocumentError: it holds something else.
        """
        return read_timelines(None, path)[1]

    def require_as_in_its_file(self) -> None:
        """It is."""

    def summary(self, timeline: AnyTimeline) -> Summary:
        """Headline figures of a timeline."""
        return summarize(self.schedule, timeline, self.machine)


@dataclass(frozen=True)
class ClusterInputs:
    """A cluster's schedule, and the profiles of the cluster and of its nodes.

    `stragglers` are factors as they were given, `slow` the machines of the classes that are slower;
    where a single rank is, the schedule has more classes than that in the file. `assumed` is what
    nobody measured of the cluster, or empty.
    """

    schedule: ClusterSchedule
    cluster: Cluster
    machine: Machine
    stragglers: Mapping[str, float]
    slow: Mapping[str, Machine]
    assumed: str = ""

    def timeline(self, predicted: Path | None = None) -> ClusterTimeline:
        """The timeline in a file, simulated if there is no file.

        Raises:
            DocumentError, TimelineMismatch: there is none of this schedule in it.
            ClusterInputError: stragglers were given, and the timeline is what it is.
        """
        if predicted is None:
            return simulate_cluster(self.schedule, self.cluster, self.machine, self.slow)
        if self.stragglers:
            raise ClusterInputError("--straggler is simulated: leave it or --predicted out")
        found = read_as(ClusterTimeline, predicted)
        require_timeline_of_cluster(self.schedule, found)
        return found

    def measured(self, path: Path | None) -> ClusterTimeline | None:
        """What ranks measured, by a file; None if there is none.

        Raises:
            DocumentError, TimelineMismatch: as `measured_of_cluster`.
            ClusterInputError: a single rank is a straggler, so that classes are not those measured.
        """
        if path is None:
            return None
        if any(name not in self.stragglers for name in self.slow):
            raise ClusterInputError(
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
            ClusterInputError: a single rank is a straggler.
        """
        if any(name not in self.stragglers for name in self.slow):
            raise ClusterInputError(
                "with a single rank as straggler the schedule has more classes than its file, and "
                "a timeline of them would fit no file: leave -o out, or give a class of ranks"
            )

    @property
    def told(self) -> list[str]:
        """What is not as profiles say, or what no profile says; a line each."""
        slow = ", ".join(f"'{name}' {factor:g}" for name, factor in self.stragglers.items())
        found = [f"Stragglers, times as long: {slow}."] if slow else []
        return [*found, f"Assumed: {self.assumed}."] if self.assumed else found


def holds_cluster(path: Path) -> bool:
    """Whether a file has a cluster's schedule, be it damaged; one that cannot be read has not."""
    try:
        text = read_bytes(path)
    except OSError:
        return False
    if _AS_WRITTEN.match(text):
        return True
    return b'"mesh"' in text and len(_KEYS & top_level_keys(path)) > 1


def inputs_of(path: Path, where: Profiles) -> DeviceInputs | ClusterInputs:
    """A schedule that is safe, and on what: a machine, or of a mesh a cluster.

    Raises:
        TwinstreamError: as `cluster_inputs`, `checked_schedule`; an option is not of its kind.
    """
    if holds_cluster(path):
        return cluster_inputs(path, where)
    refuse_cluster_options(path, where)
    return DeviceInputs(checked_schedule(path), where.machine)


def read_cluster(path: Path) -> ClusterSchedule:
    """The cluster's schedule in a file, as it is.

    Raises:
        DocumentError: there is none; says what is wrong and where.
    """
    return read_as(ClusterSchedule, path)


def cluster_inputs(path: Path, where: Profiles) -> ClusterInputs:
    """A cluster's schedule that is safe, on a cluster by name or file.

    Args:
        where: by default as `place_of`.

    Raises:
        DocumentError: there is no cluster's schedule in the file.
        UnsafeSchedule: it is damaged in its meaning.
        ClusterInputError: no cluster was given, and none is known.
        StragglerError: there is no such straggler.
    """
    schedule = read_cluster(path)
    require_safe_cluster(schedule)
    place = place_of(schedule, where.cluster, where.machine, path)
    if place is None:
        raise ClusterInputError(
            f"the schedule was made for cluster '{schedule.machine.name}', which is no shipped "
            "profile; give its profile: --cluster FILE.toml"
        )
    factors = stragglers_of(where.straggler)
    cut, slow = with_stragglers(schedule, place.machine, factors)
    return ClusterInputs(cut, place.cluster, place.machine, factors, slow, place.assumed)


def refuse_cluster_options(path: Path, where: Profiles) -> None:
    """Refuse what only clusters have, where the schedule is one device's.

    Raises:
        ClusterInputError: says which option.
    """
    for name, value in (("cluster", where.cluster), ("straggler", where.straggler)):
        if value:
            raise ClusterInputError(
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
        ClusterInputError: a text is not of that form.
    """
    found: dict[str, float] = {}
    for text in texts or ():
        name, sign, number = text.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not sign or not name or math.isnan(factor):
            raise ClusterInputError(
                f"cannot read the straggler '{text}'; write WHO=FACTOR, such as 'stage 1=1.2' "
                "for ranks that take a fifth longer"
            )
        found[name] = factor
    return found


def place_of(
    schedule: ClusterSchedule, cluster: str | None, machine: str | None, file: Path | None = None
) -> Place | None:
    """The cluster given, the shipped one that the schedule was made for, or that beside its file.

    Where there is none of these, and ranks can run the schedule, they are on this machine: links
    between them are assumed. None where nobody knows.

    Args:
        machine: of a node, by name or file; by default the cluster's, or the schedule's.
        file: of the schedule; a profile beside it has its name, plan.toml for plan.json.

    Raises:
        ProfileError: there is no such profile, or it is wrong.
    """
    beside = None if file is None else file.with_suffix(".toml")
    if cluster is None and schedule.machine.name in cluster_names():
        cluster = schedule.machine.name
    if cluster is None and beside is not None and beside != file and beside.is_file():
        cluster = str(beside)
    if cluster is None:
        return _processes_here(schedule, machine)
    profile = load_cluster(cluster)
    node = clusters.machine_of(profile) if machine is None else load_machine(machine)
    return Place(profile, node)


def _processes_here(schedule: ClusterSchedule, given: str | None) -> Place | None:
    machine = _rank_s_machine(schedule, given)
    if machine is None:
        return None
    try:
        spec_of(schedule)
    except NotRunnableError:
        return None
    return place_here(machine, schedule.mesh.size, cores_here())


def _rank_s_machine(schedule: ClusterSchedule, given: str | None) -> Machine | None:
    """The profile given, else the shipped one that the stages were planned for."""
    if given is not None:
        return load_machine(given)
    if schedule.machine.name not in machine_names():
        return None
    shipped = load_machine(schedule.machine.name)
    return shipped if shipped.content_hash == schedule.machine.content_hash else None
