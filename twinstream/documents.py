"""What can be asked of a schedule, be it of one device or of all ranks of a mesh.

Nobody above this module asks which of the two a document is in order to prove or to predict it.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import overload

from twinstream.clusters.conforms import conforms_cluster
from twinstream.clusters.running.run_ranks import NotRunnableError, spec_of
from twinstream.clusters.shared_machine import Place, cores_here, place_here, rank_machine
from twinstream.hardware_profiles.clusters.loader import cluster_names, load_cluster, machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower_again
from twinstream.schedule.analysis.idle import AnySchedule, AnyTimeline
from twinstream.schedule.chain import Chain
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.cluster.verify_cluster import verify_cluster
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import ArgumentError, TwinstreamError, require
from twinstream.schedule.files import DocumentError
from twinstream.schedule.proof import conforms as of_chain
from twinstream.schedule.proof.verify import verify as verify_device
from twinstream.schedule.proof.violations import UnsafeSchedule, Violation
from twinstream.schedule.timeline import Timeline
from twinstream.simulator.network_costs import share_of
from twinstream.simulator.replay import simulate as simulate_device
from twinstream.simulator.replay import simulate_cluster
from twinstream.simulator.stragglers import with_stragglers

_NOBODY: Mapping[str, float] = MappingProxyType({})


class UnknownMachineError(TwinstreamError):
    """What a schedule was planned for is no shipped profile, and none was given."""


def verify(schedule: AnySchedule) -> list[Violation]:
    """All that makes a schedule unsafe; an empty list is a proof that every execution is safe.

    Of a mesh also that all classes of ranks agree in what they exchange, and none waits for ever.
    """
    require("schedule", schedule, Schedule, ClusterSchedule)
    if isinstance(schedule, ClusterSchedule):
        return verify_cluster(schedule)
    return verify_device(schedule)


def conforms(schedule: AnySchedule, chain: Chain | None = None) -> list[Violation]:
    """All in which a schedule differs from the training step that it says it computes.

    An empty list is a proof that it computes that, all of it and nothing else.

    Args:
        chain: of a device, the step that it should compute; by default its own model, workload and
            recipe are lowered again, as those of a mesh are for every stage.

    Raises:
        TwinstreamError: its model or recipe is not valid, or far too large for its ops.
    """
    require("schedule", schedule, Schedule, ClusterSchedule)
    if isinstance(schedule, ClusterSchedule):
        if chain is not None:
            raise ArgumentError("chain: a mesh has one for each stage: leave it out")
        return conforms_cluster(schedule)
    return of_chain.conforms(schedule, chain_of(schedule) if chain is None else chain)


def require_sound(schedule: AnySchedule) -> None:
    """
    Raises:
        UnsafeSchedule: `verify` finds something; or else, of a device, `conforms`.
    """
    found = verify(schedule)
    if not found and isinstance(schedule, Schedule):
        found = conforms(schedule)
    if found:
        raise UnsafeSchedule(found)


@overload
def simulate(
    schedule: Schedule, machine: str | Path | Machine | None = None, *,
    cluster: str | Path | Cluster | None = None, stragglers: Mapping[str, float] = ...,
) -> Timeline: ...  # fmt: skip
@overload
def simulate(
    schedule: ClusterSchedule, machine: str | Path | Machine | None = None, *,
    cluster: str | Path | Cluster | None = None, stragglers: Mapping[str, float] = ...,
) -> ClusterTimeline: ...  # fmt: skip
def simulate(
    schedule: AnySchedule, machine: str | Path | Machine | None = None, *,
    cluster: str | Path | Cluster | None = None, stragglers: Mapping[str, float] = _NOBODY,
) -> AnyTimeline:  # fmt: skip
    """Predict the timeline of a schedule, whatever it was planned for.

    Args:
        machine: of one device, or of a node of the cluster; by default the shipped profile that the
            schedule was planned for.
        cluster: of a mesh, likewise.
        stragglers: how many times as long the ranks of a class, or `rank 5` alone, take; of a
            single rank the timeline has more classes than the schedule.

    Raises:
        UnsafeSchedule: `verify` finds something: an edit gave it a race or a circle of waits, say.
        TwinstreamError: a profile cannot be read, or lacks a number that the schedule needs.
    """
    if found := verify(schedule):
        raise UnsafeSchedule(found)
    if isinstance(schedule, Schedule):
        if cluster is not None or stragglers:
            raise ArgumentError("cluster and stragglers are of several ranks: leave them out")
        return simulate_device(schedule, machine_for(schedule, machine))
    place = place_of(schedule, cluster, machine)
    cut, slow = with_stragglers(schedule, place.machine, stragglers)
    return simulate_cluster(cut, place.cluster, place.machine, slow)


def chain_of(schedule: Schedule) -> Chain:
    """The chain that a schedule says it was planned for.

    Raises:
        TwinstreamError: its model or recipe is not valid, or far too large for its ops.
    """
    work, layers = schedule.workload, schedule.model.spec.get("num_layers")
    blocks = work.rounds_per_step * work.chunks_per_round * (layers if type(layers) is int else 1)
    if blocks > len(schedule.ops):  # do not lower what a slip made astronomical
        raise DocumentError(
            f"the schedule's workload and model have {blocks:,} blocks to compute, but it has only "
            f"{len(schedule.ops):,} ops; is 'workload' or 'model' damaged?"
        )
    return lower_again(schedule)


def machine_for(schedule: Schedule, given: str | Path | Machine | None) -> Machine:
    """The machine given, else the shipped one that the schedule was planned for.

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
    schedule: ClusterSchedule, cluster: str | Path | Cluster | None,
    machine: str | Path | Machine | None, file: Path | None = None,
) -> Place:  # fmt: skip
    """As `known_place_of`.

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
    schedule: ClusterSchedule, cluster: str | Path | Cluster | None,
    machine: str | Path | Machine | None, file: Path | None = None,
) -> Place | None:  # fmt: skip
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
        cluster = beside
    if cluster is None:
        return _processes_here(schedule, machine)
    profile = load_cluster(cluster)
    return Place(profile, machine_of(profile) if machine is None else load_machine(machine))


def _processes_here(schedule: ClusterSchedule, given: str | Path | Machine | None) -> Place | None:
    machine = _rank_s_machine(schedule, given)
    if machine is None:
        return None
    try:
        spec_of(schedule)
    except NotRunnableError:
        return None
    return place_here(machine, schedule.mesh.size, cores_here())


def _rank_s_machine(
    schedule: ClusterSchedule, given: str | Path | Machine | None
) -> Machine | None:
    """The profile given, else the shipped one whose ranks here the stages were planned for."""
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
