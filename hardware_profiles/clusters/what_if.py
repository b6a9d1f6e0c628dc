"""A hypothetical cluster: one with some numbers of its links, network or nodes changed."""

from collections.abc import Mapping
from typing import Any

from twinstream.hardware_profiles.clusters.curves import CollectiveCurve
from twinstream.hardware_profiles.clusters.loader import machine_of, with_fields
from twinstream.hardware_profiles.clusters.schema import (
    CLUSTER_NUMBERS,
    RATE_FIELDS,
    Cluster,
)
from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.overrides import (
    changed,
    override,
    what_if_name,
    what_if_number,
)
from twinstream.hardware_profiles.profile_files import nearest
from twinstream.hardware_profiles.schema import NUMBER_FIELDS, Number

MACHINE, LEVELS = "machine.", "levels."
_OF_LEVELS = ("nodes", "oversubscription", "latency_ns")


def with_numbers(cluster: Cluster, changes: Mapping[str, float]) -> Cluster:
    """This cluster with some numbers changed.

    Keys are numbers of the cluster (`nic_bytes_per_s`), of one of its levels
    (`levels.spine.oversubscription`) or of its node's machine (`machine.hbm_bytes_per_s`). Measured
    curves of a link whose rate changes stay: what they take beyond their least is divided by how
    much faster the link is, between nodes as if NICs were the limit. Where another number of a link
    changes, its curves are gone.

    >>> from twinstream.hardware_profiles.clusters.loader import load_cluster
    >>> with_numbers(load_cluster("h100_dgx"), {"nic_bytes_per_s": 1e11}).number("nic_bytes_per_s")
    100000000000.0

    Raises:
        ProfileError: there is no such number, or its value is out of range.
    """
    where = f"cluster '{cluster.name}'"
    own = {f: v for f, v in changes.items() if not f.startswith((MACHINE, LEVELS))}
    for field in own:
        if field not in CLUSTER_NUMBERS:
            known = [*CLUSTER_NUMBERS, "levels.<name>.oversubscription"]
            raise ProfileError(f"{where}: unknown number '{field}': {nearest(field, known)}")
    document: dict[str, Any] = {
        field: what_if_number(value, getattr(cluster, field)) for field, value in own.items()
    }
    if levels := {f: v for f, v in changes.items() if f.startswith(LEVELS)}:
        document["levels"] = _levels(cluster, levels, where)
    if machine := {f: v for f, v in changes.items() if f.startswith(MACHINE)}:
        document["machine_changes"] = _machine_changes(cluster, machine, where)
    rates = {field: document.pop(field) for field in RATE_FIELDS if field in document}
    found = with_fields(cluster, document, where) if document else cluster
    if rates:
        faster = {f: own[f] / cluster.number(f) for f in rates if getattr(cluster, f) is not None}
        found = changed(Cluster, rates, found, where)  # before a curve is divided by it
        curves = tuple(_scaled(curve, faster).model_dump() for curve in found.curves)
        found = changed(Cluster, {"curves": curves}, found, where)
    return found.model_copy(update={"name": what_if_name(cluster.name)})


def _levels(
    cluster: Cluster, changes: Mapping[str, float], where: str
) -> tuple[dict[str, Any], ...]:
    levels = {level.name: level.model_dump() for level in cluster.levels}
    for path, value in changes.items():
        name, _, field = path.removeprefix(LEVELS).rpartition(".")
        if name not in levels or field not in _OF_LEVELS:
            known = [f"{LEVELS}{one}.{field}" for one in levels for field in _OF_LEVELS]
            hint = nearest(path, known) if known else "the cluster states no levels"
            raise ProfileError(f"{where}: unknown number '{path}': {hint}")
        was = Number.model_validate(levels[name][field])
        levels[name] = {**levels[name], field: what_if_number(value, was)}
    return tuple(levels.values())


def _machine_changes(cluster: Cluster, changes: Mapping[str, float], where: str) -> dict[str, Any]:
    """Numbers of the node that differ afterwards; those of a link that follow are among them."""
    numbers = {field.removeprefix(MACHINE): value for field, value in changes.items()}
    for field in numbers:
        if field not in NUMBER_FIELDS:
            hint = nearest(field, list(NUMBER_FIELDS))
            raise ProfileError(f"{where}: its node's machine has no number '{field}': {hint}")
    before = machine_of(cluster)
    after = override(before, numbers)
    pairs = {field: (getattr(before, field), getattr(after, field)) for field in NUMBER_FIELDS}
    return {field: new.model_dump() for field, (old, new) in pairs.items() if new != old}


def _scaled(curve: CollectiveCurve, faster: Mapping[str, float]) -> CollectiveCurve:
    """The curve of a link that is so many times as fast."""
    field = "node_bytes_per_s" if curve.within_a_node else "nic_bytes_per_s"
    if (times := faster.get(field, 1.0)) == 1.0:
        return curve
    lines = tuple((alpha, beta / times) for alpha, beta in curve.lines)
    start = min((ns for _, ns in curve.points), default=0.0)  # noise: not always the first
    points = tuple((size, start + (ns - start) / times) for size, ns in curve.points)
    source = f"what-if: {field} x {times:g}; {curve.source}"
    return curve.model_copy(
        update={"lines": lines, "points": points, "kind": "hypothetical", "source": source}
    )
