"""Documents of clusters that commands are given, and the profiles that go with them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinstream.commands.arguments.inputs import read_as, top_level_keys
from twinstream.commands.arguments.options import Profiles
from twinstream.commands.places import place_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import (
    ClusterTimeline,
    require_timeline_of_cluster,
)
from twinstream.schedule.cluster.verify_cluster import require_safe_cluster
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import DocumentError, read_bytes
from twinstream.simulator.replay import simulate_cluster
from twinstream.simulator.stragglers import with_stragglers

_KEYS = {"mesh", "classes", "schedules"}
_AS_WRITTEN = re.compile(rb'\s*\{[^{}\[\]]*"mesh"\s*:\s*\{\s*"axes"')  # without reading all of it


class ClusterInputError(TwinstreamError):
    """What was given suits a device's schedule and not a cluster's, or the other way round."""


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
