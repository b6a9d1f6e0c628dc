"""On which cluster a schedule's ranks run, where the user does not say so."""

from pathlib import Path

from twinstream.clusters.running.run_ranks import NotRunnableError, spec_of
from twinstream.clusters.shared_machine import Place, cores_here, place_here
from twinstream.hardware_profiles.clusters.loader import cluster_names, load_cluster, machine_of
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule


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
    return Place(profile, machine_of(profile) if machine is None else load_machine(machine))


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
