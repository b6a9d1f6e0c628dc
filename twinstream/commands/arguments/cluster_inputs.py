"""Documents of clusters that commands are given, and the profiles that go with them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinstream.commands.arguments.inputs import read_as, top_level_keys
from twinstream.hardware_profiles.clusters.loader import cluster_names, load_cluster, machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import (
    ClusterTimeline,
    require_timeline_of_cluster,
)
from twinstream.schedule.cluster.verify_cluster import require_safe_cluster
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import DocumentError
from twinstream.simulator.cluster.simulate import simulate_cluster
from twinstream.simulator.cluster.stragglers import with_stragglers

_KEYS = {"mesh", "classes", "schedules"}
_AS_WRITTEN = re.compile(rb'\s*\{[^{}\[\]]*"mesh"\s*:\s*\{\s*"axes"')  # without reading all of it


class ClusterInputError(TwinstreamError):
    """What was given suits a device's schedule and not a cluster's, or the other way round."""


@dataclass(frozen=True)
class ClusterInputs:
    """A cluster's schedule, and the profiles of the cluster and of its nodes."""

    schedule: ClusterSchedule
    cluster: Cluster
    machine: Machine

    def simulated(self, stragglers: Mapping[str, float] | None = None) -> ClusterTimeline:
        """Its timeline there, with classes (by name) that take so many times as long."""
        slow = with_stragglers(self.schedule, self.machine, stragglers or {})
        return simulate_cluster(self.schedule, self.cluster, self.machine, slow)

    def timeline(self, predicted: Path | None) -> ClusterTimeline:
        """The timeline in a file, simulated if there is no file.

        Raises:
            DocumentError, TimelineMismatch: there is none of this schedule in it.
        """
        if predicted is None:
            return self.simulated()
        found = read_as(ClusterTimeline, predicted)
        require_timeline_of_cluster(self.schedule, found)
        return found


def holds_cluster(path: Path) -> bool:
    """Whether a file has a cluster's schedule, be it damaged; one that cannot be read has not."""
    try:
        text = path.read_bytes()
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


def cluster_inputs(path: Path, cluster: str | None, machine: str | None) -> ClusterInputs:
    """A cluster's schedule that is safe, on a cluster by name or file.

    Args:
        cluster: by default the shipped one that the schedule was made for.
        machine: the profile of a node in place of the cluster's own.

    Raises:
        DocumentError: there is no cluster's schedule in the file.
        UnsafeSchedule: it is damaged in its meaning.
        ClusterInputError: no cluster was given, and the schedule's is not a shipped one.
    """
    schedule = read_cluster(path)
    require_safe_cluster(schedule)
    name = cluster or schedule.machine.name
    if cluster is None and name not in cluster_names():
        raise ClusterInputError(
            f"the schedule was made for cluster '{name}', which is no shipped profile; give its "
            "profile: --cluster FILE.toml"
        )
    profile = load_cluster(name)
    node = machine_of(profile) if machine is None else load_machine(machine)
    return ClusterInputs(schedule, profile, node)


def refuse_cluster_options(path: Path, **given: object) -> None:
    """Refuse what only clusters have, where the schedule is one device's.

    Raises:
        ClusterInputError: says which option.
    """
    for name, value in given.items():
        if value:
            raise ClusterInputError(
                f"{path} is the schedule of one device, and --{name} is of clusters: leave it out"
            )


def refuse_measured(path: Path, measured: Path | None) -> None:
    """Refuse a measurement of a cluster's schedule.

    Raises:
        DocumentError: one was given.
    """
    if measured is not None:
        raise DocumentError(
            f"{path} is a cluster's schedule, and measured timelines are of one device's: leave "
            "--measured out"
        )


def stragglers_of(texts: Sequence[str] | None) -> dict[str, float]:
    """Factors by class of `CLASS=FACTOR`.

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
                f"cannot read the straggler '{text}'; write CLASS=FACTOR, such as 'stage 1=1.2' "
                "for ranks that take a fifth longer"
            )
        found[name] = factor
    return found
