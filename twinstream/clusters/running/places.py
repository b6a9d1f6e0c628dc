"""On what a schedule runs: what is given, what it was planned for, or processes of this machine."""

import platform
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from twinstream.clusters.conforms import is_executable
from twinstream.clusters.shared_machine import Place, cores_here, place_here, rank_machine
from twinstream.hardware_profiles.clusters.loader import (
    cluster_names,
    load_cluster,
    machine_of,
    save_with_node,
)
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.hardware_profiles.profile_files import cache_folder
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.simulator.network_costs import share_of


class UnknownMachineError(TwinstreamError):
    """What a schedule was planned for is no shipped profile, and none was given."""


def machine_for(schedule: Schedule, given: str | Path | Machine | None) -> Machine:
    """Return the machine given, else the shipped one that one device's schedule was planned for.

    Raises:
        UnknownMachineError: none was given, and the schedule's is not a shipped one as it is.
    """
    if given is not None:
        return load_machine(given)
    name, planned_for = schedule.machine.name, schedule.machine.content_hash
    if name not in machine_names():
        raise UnknownMachineError(
            f"the schedule was planned for machine '{name}', which is no shipped profile; "
            "give its profile: --machine FILE.toml"
        )
    shipped = load_machine(name)
    if shipped.content_hash != planned_for:
        raise UnknownMachineError(
            f"the schedule was planned for another '{name}' ({planned_for}) than the shipped one "
            f"({shipped.content_hash}); give its profile: --machine FILE.toml, or the shipped one "
            f"all the same: --machine {name}"
        )
    return shipped


def place_of(
    schedule: Schedule, cluster: str | Path | Cluster | None,
    machine: str | Path | Machine | None, file: Path | None = None,
) -> Place:  # fmt: skip
    """Return where ranks of a layout run, as `known_place_of`.

    Raises:
        UnknownMachineError: nobody knows on what the schedule runs.
    """
    found = known_place_of(schedule, cluster, machine, file)
    if found is None:
        raise UnknownMachineError(
            f"the schedule was made for cluster '{schedule.machine.name}', which is no shipped "
            "profile; give its profile: --cluster FILE.toml"
        )
    return found


def known_place_of(
    schedule: Schedule, cluster: str | Path | Cluster | None,
    machine: str | Path | Machine | None, file: Path | None = None,
) -> Place | None:  # fmt: skip
    """Return the cluster given, the shipped one of the schedule, or that beside its file.

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
        cluster = beside
    if cluster is None:
        return _processes_here(schedule, machine)
    profile = load_cluster(cluster)
    return Place(profile, machine_of(profile) if machine is None else load_machine(machine))


def place_of_ranks_here(
    machine: Machine, num_ranks: int, nvlink: bool | None = None, num_hosts: int = 1
) -> Place:
    """Return where ranks run that start here, as `place_here`; links as they were probed here.

    A profile that cannot be read, or that another version has written, is left alone.
    """
    found = place_here(machine, num_ranks, cores_here(), nvlink, num_hosts)
    kept = _links_file(machine.device, num_ranks)
    if num_hosts == 1 and kept.is_file():
        with suppress(TwinstreamError):
            links = load_cluster(kept).model_copy(update={"machine": found.machine.name})
            lost = "" if links.compute_lost is None else f": {links.compute_lost.source}"
            return Place(links, found.machine, f"what exchanges take of compute{lost}")
    return found


def keep_links(cluster: Cluster, machine: Machine) -> None:
    """Keep what was measured of so many ranks here, for their runs; nothing where that cannot be.

    Args:
        machine: of a rank.
    """
    path = _links_file(machine.device, cluster.count("gpus_per_node"))
    with suppress(OSError, TwinstreamError):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_with_node(cluster, machine, path)


def _links_file(device: str, num_ranks: int) -> Path:
    facts = (platform.node(), str(cores_here()), _torch_version(), device)
    key = sha256("\n".join(facts).encode()).hexdigest()[:12]
    return cache_folder() / f"links-of-{num_ranks}-{key}.toml"


def _torch_version() -> str:
    """Nothing where a schedule is predicted without it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _processes_here(schedule: Schedule, given: str | Path | Machine | None) -> Place | None:
    machine = _rank_s_machine(schedule, given)
    if machine is None or not is_executable(schedule):
        return None
    return place_of_ranks_here(machine, schedule.mesh.size)


def _rank_s_machine(schedule: Schedule, given: str | Path | Machine | None) -> Machine | None:
    """Return the profile given, else the shipped one that the stages were planned for."""
    if given is not None:
        return load_machine(given)
    size, cores = schedule.mesh.size, cores_here()
    for name in machine_names():
        shipped = load_machine(name)
        ranks = (shipped, rank_machine(shipped, size, cores))
        planned_for = (*ranks, *(share_of(machine, size) for machine in ranks))
        if schedule.machine.content_hash in {machine.content_hash for machine in planned_for}:
            return shipped
    return None
