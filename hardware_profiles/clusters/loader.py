"""Clusters in TOML: reading them, by name or path, with inheritance; and writing them."""

import os
from pathlib import Path
from typing import Any

from twinstream.hardware_profiles.clusters.merging import merged, validated, with_tables
from twinstream.hardware_profiles.clusters.schema import CLUSTER_NUMBERS, Cluster
from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.overrides import merge, nearest
from twinstream.hardware_profiles.schema import NUMBER_FIELDS, Machine
from twinstream.hardware_profiles.toml_text import (
    parsed_toml,
    profile_path,
    read_profile,
    toml_lines,
    toml_value,
)
from twinstream.schedule.errors import require
from twinstream.schedule.files import write_text
from twinstream.schedule.node import Node

_DATA = Path(__file__).parent / "data"


def cluster_names() -> tuple[str, ...]:
    """Names of the shipped clusters, sorted."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.toml")))


def load_cluster(name_or_path: str | Path | Cluster) -> Cluster:
    """The cluster of a shipped profile (`h100_dgx`) or of a TOML file; a cluster is itself.

    Raises:
        ProfileError: there is no such profile, or its content is wrong.
    """
    require("cluster", name_or_path, str, Path, Cluster)
    if isinstance(name_or_path, Cluster):
        return name_or_path
    path = profile_path(name_or_path, {name: _DATA / f"{name}.toml" for name in cluster_names()})
    if path is None:
        raise ProfileError(
            f"unknown cluster '{name_or_path}'; shipped clusters: {', '.join(cluster_names())}. "
            'To add one, write a TOML file with base = "<a shipped name>" and the numbers that '
            "differ and give its path"
        )
    return _load_file(path, loading=())


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
    return merge(machine, {"name": f"{cluster.name}-node", **changes} if changes else {}, where)


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a profile that loads back equal; what it inherited is written out.

    Raises:
        DocumentError: the file cannot be written.
    """
    write_text(cluster_toml(cluster), path)


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


def cluster_toml(cluster: Cluster) -> str:
    """The profile as TOML: one table for each number, level and curve."""
    head = {field: getattr(cluster, field) for field in ("name", "description", "machine")}
    lines = [f"{key} = {toml_value(value)}" for key, value in head.items()]
    numbers: dict[str, Node | None] = {f: getattr(cluster, f) for f in CLUSTER_NUMBERS}
    numbers |= {f"machine_changes.{f}": number for f, number in cluster.machine_changes.items()}
    for field, number in numbers.items():
        if number is not None:
            lines += ["", f"[{field}]", *toml_lines(number)]
    for level in cluster.levels:
        lines += ["", "[[levels]]", f"name = {toml_value(level.name)}"]
        for field in ("nodes", "oversubscription", "latency_ns"):
            inline = ", ".join(toml_lines(getattr(level, field)))
            lines.append(f"{field} = {{ {inline} }}")
    for curve in cluster.curves:
        lines += ["", "[[curves]]", *toml_lines(curve)]
    return "\n".join(lines) + "\n"


def _load_file(path: Path, loading: tuple[Path, ...]) -> Cluster:
    text = read_profile(path, loading)
    document = parsed_toml(text, str(path))
    document.setdefault("name", path.stem)
    base = document.pop("base", None)
    _resolve_machine(document, path.parent)
    if base is None:
        document.setdefault("description", "")
        cluster = validated(with_tables(document, f"plain number in {path.name}"), str(path))
    else:
        found = _load_base(base, path, (*loading, path.resolve()))
        document.setdefault("description", f"{found.name} with other numbers: {path}")
        told = f"override in {path.name}; of {found.name}"
        cluster = merged(found, with_tables(document, told), str(path))
    machine_of(cluster)  # a node that is not there is a fault of the profile
    return cluster


def _load_base(base: Any, path: Path, loading: tuple[Path, ...]) -> Cluster:
    if not isinstance(base, str):
        raise ProfileError(f"{path}: base needs a name or a path in quotes, got {base!r}")
    if base in cluster_names():
        return _load_file(_DATA / f"{base}.toml", loading)
    beside = path.parent / base
    if not os.path.isfile(beside):  # noqa: PTH113
        raise ProfileError(
            f"{path}: unknown base '{base}': neither a shipped cluster "
            f"({nearest(base, list(cluster_names()))}) nor a file at {beside}"
        )
    return _load_file(beside, loading)


def _resolve_machine(document: dict[str, Any], directory: Path) -> None:
    """A machine's path starts where the profile lies."""
    machine = document.get("machine")
    if isinstance(machine, str) and Path(machine).suffix:
        document["machine"] = str(directory / machine)
