"""Clusters in TOML: reading them, by name or path, with inheritance; and writing them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinstream.hardware_profiles.clusters.schema import NETWORK_FIELDS, NODE_FIELDS, Cluster
from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.overrides import changed
from twinstream.hardware_profiles.profile_files import (
    ProfileLoader,
    nearest,
    profile_toml,
    shipped_names,
)
from twinstream.hardware_profiles.schema import NUMBER_FIELDS, Machine
from twinstream.schedule.files import write_text

_FOLDER = Path(__file__).parent / "data"


def cluster_names() -> tuple[str, ...]:
    """Names of the shipped clusters, sorted."""
    return shipped_names(_FOLDER)


def load_cluster(name_or_path: str | Path | Cluster) -> Cluster:
    """The cluster of a shipped profile (`h100_dgx`) or of a TOML file; a cluster is itself.

    Raises:
        ProfileError: there is no such profile, or its content is wrong.
    """
    return _CLUSTERS.load(name_or_path)


def machine_of(cluster: Cluster) -> Machine:
    """The profile of one node of the cluster, with what the cluster changes of it.

    Raises:
        ProfileError: there is no such profile, or a change is of no number of a machine.
    """
    machine = load_machine(cluster.machine)
    where = f"cluster '{cluster.name}', machine_changes"
    for field in cluster.machine_changes:
        if field not in NUMBER_FIELDS:
            hint = nearest(field, list(NUMBER_FIELDS))
            raise ProfileError(f"{where}: unknown number '{field}': {hint}")
    changes = {field: number.model_dump() for field, number in cluster.machine_changes.items()}
    named = {"name": f"{cluster.name}-node", **changes} if changes else {}
    return changed(Machine, named, machine, where)


def place_names(place: Cluster | Machine) -> tuple[str, ...]:
    """The names by which a price of it may be given: its own, its node's machine, the GPU's.

    >>> place_names(load_cluster("h100_dgx")), place_names(load_machine("b200"))
    (('h100_dgx', 'h100_training', 'h100'), ('b200',))
    """
    machine = load_machine(place.machine) if isinstance(place, Cluster) else place
    return tuple(dict.fromkeys((place.name, machine.name, machine.name.partition("_")[0])))


def with_fields(
    cluster: Cluster, document: Mapping[str, Any], where: str, source: str | None = None
) -> Cluster:
    """The cluster with the fields of a document in place of its own.

    Curves are replaced one by one. Where the document changes a number of a tier, the cluster's
    curves of that tier are gone: they were measured on other links. Changes of another machine
    replace those of the one before; where the document has none, those stay.
    """
    if {"machine", "machine_changes"} <= document.keys():
        cluster = cluster.model_copy(update={"machine_changes": {}})
    stale_node = any(field in document for field in NODE_FIELDS)
    stale_network = stale_node or any(field in document for field in ("levels", *NETWORK_FIELDS))
    found = changed(Cluster, {"curves": (), **document}, cluster, where, source)
    replaced = {curve.key for curve in found.curves}
    kept = tuple(
        curve
        for curve in cluster.curves
        if curve.key not in replaced and not (stale_node if curve.within_a_node else stale_network)
    )
    return found.model_copy(update={"curves": (*kept, *found.curves)})


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a profile that loads back equal; what it inherited is written out.

    Raises:
        DocumentError: the file cannot be written.
    """
    write_text(profile_toml(cluster), path)


def save_with_node(cluster: Cluster, machine: Machine, path: Path) -> None:
    """Write a profile, and that of its node beside it (`node_file`), which it then names.

    Raises:
        DocumentError: a file cannot be written.
    """
    node = node_file(path)
    save_machine(machine, node)
    save_cluster(cluster.model_copy(update={"machine": node.name}), path)


def node_file(path: Path) -> Path:
    """The profile of a cluster's node, beside that of the cluster.

    >>> node_file(Path("here.toml")).name
    'here_node.toml'
    """
    return path.with_name(f"{path.stem}_node.toml")


def _made(document: dict[str, Any], base: Cluster | None, source: str, directory: Path) -> Cluster:
    machine = document.get("machine")
    if isinstance(machine, str) and Path(machine).suffix:  # starts where the profile lies
        document["machine"] = str(directory / machine)
    if base is None:
        cluster = changed(Cluster, document, None, source)
    else:
        cluster = with_fields(base, document, source)
    machine_of(cluster)  # a node that is not there is a fault of the profile
    return cluster


_CLUSTERS = ProfileLoader("cluster", Cluster, _FOLDER, _made)
