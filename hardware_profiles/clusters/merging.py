"""A cluster's document: plain numbers as tables, a base's numbers under its own, its faults."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from twinstream.hardware_profiles.clusters.curves import CollectiveCurve
from twinstream.hardware_profiles.clusters.schema import (
    CLUSTER_NUMBERS,
    NETWORK_FIELDS,
    NODE_FIELDS,
    Cluster,
    Level,
)
from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.overrides import nearest, plain_number
from twinstream.hardware_profiles.schema import Number
from twinstream.hardware_profiles.toml_text import is_plain
from twinstream.schedule.node import Node

_PARTS: Mapping[str, type[Node]] = {
    "levels": Level,
    "curves": CollectiveCurve,
    "machine_changes": Number,
}


def with_tables(document: Mapping[str, Any], told: str) -> dict[str, Any]:
    """The document with a table in place of each plain number, and tuples for arrays."""
    tables = {
        key: plain_number(value, told) if key in CLUSTER_NUMBERS and is_plain(value) else value
        for key, value in document.items()
    }
    for key in ("levels", "curves"):
        if isinstance(tables.get(key), list):
            tables[key] = tuple(_tupled(one) for one in tables[key])
    changes = tables.get("machine_changes")
    if isinstance(changes, dict):
        tables["machine_changes"] = {
            field: plain_number(value, told) if is_plain(value) else value
            for field, value in changes.items()
        }
    return tables


def merged(base: Cluster, document: Mapping[str, Any], where: str) -> Cluster:
    """The base with the fields of a document in place of its own.

    Curves are replaced one by one. Where the document changes a number of a tier, the base's curves
    of that tier are gone: they were measured on other links.
    """
    fields = {**base.model_dump(), **document}
    if "machine" not in document:
        fields["machine_changes"] = {
            **base.model_dump()["machine_changes"], **document.get("machine_changes", {})
        }  # fmt: skip
    stale_node = any(field in document for field in NODE_FIELDS)
    stale_network = stale_node or "levels" in document or any(f in document for f in NETWORK_FIELDS)
    own = document.get("curves", ())
    replaced = {curve.key for curve in validated({**fields, "curves": own}, where).curves}
    kept = tuple(
        curve.model_dump()
        for curve in base.curves
        if curve.key not in replaced and not (stale_node if curve.within_a_node else stale_network)
    )
    return validated({**fields, "curves": (*kept, *own)}, where)


def validated(document: Mapping[str, Any], where: str) -> Cluster:
    """The cluster of a document; every fault of it in one `ProfileError`."""
    try:
        return Cluster.model_validate(document)
    except ValidationError as error:
        faults = [_fault(one["loc"], one) for one in error.errors(include_url=False)]
    raise ProfileError(f"{where}: " + "; ".join(dict.fromkeys(faults)))


def _fault(loc: tuple[int | str, ...], fault: Any) -> str:
    names = [str(part) for part in loc]
    field = ".".join(names)
    if fault["type"] == "extra_forbidden":
        known = ["base", *Cluster.model_fields]
        if len(names) > 1:
            known = list(_PARTS.get(names[0], Number).model_fields)
        return f"unknown field '{field}': {nearest(names[-1], known)}"
    if fault["type"] == "missing":
        return f"{field} is missing"
    if fault["type"] in ("model_type", "dict_type", "tuple_type"):
        return f"{field} needs a number or a table, got {fault['input']!r:.60}"
    got = "" if isinstance(fault["input"], dict | Number) else f", got {fault['input']!r:.60}"
    return f"{field}: {fault['msg']}{got}" if field else str(fault["msg"])


def _tupled(value: Any) -> Any:
    """Arrays as tuples and their whole numbers as fractions, as curves hold them."""
    if isinstance(value, dict):
        return {key: _tupled(one) if isinstance(one, list) else one for key, one in value.items()}
    if isinstance(value, list):
        return tuple(
            _tupled(one) if isinstance(one, list) else float(one) if is_plain(one) else one
            for one in value
        )
    return value
