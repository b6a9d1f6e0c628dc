"""Changing some fields of a profile: in a document with a base, or as a what-if."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.link import link_following
from twinstream.hardware_profiles.profile_files import ProfileT, nearest
from twinstream.hardware_profiles.schema import NUMBER_FIELDS, Efficiency, Machine, Number
from twinstream.schedule.node import Node
from twinstream.schedule.sizes import SizeError, parse_bytes

_WHAT_IF = "+what-if"


def override(machine: Machine, changes: Mapping[str, float]) -> Machine:
    """A hypothetical machine: this one with some numbers changed.

    Keys are number fields (`pcie_h2d_bytes_per_s`) or curves (`efficiency.matmul`: the curve's
    `max`). An infinite rate or capacity is unconstrained. The new number's source tells what it
    was; the name gets the suffix `+what-if`. Where a direction of the link changes, both together
    follow; where only both together do, no direction is faster and they are no more than their sum.

    >>> from twinstream.hardware_profiles.loader import load_machine
    >>> override(load_machine("h100"), {"hbm_bytes_per_s": 4.8e12}).number("hbm_bytes_per_s")
    4800000000000.0

    Raises:
        ProfileError: unknown field, curve that the machine lacks, or value out of range.
    """
    document: dict[str, Any] = {"name": what_if_name(machine.name)}
    for field, value in {**changes, **link_following(machine.link_rates(), changes)}.items():
        table, _, curve = field.partition(".")
        if table == "efficiency":
            document.setdefault(table, {})[curve] = value
        else:
            was = getattr(machine, field) if field in NUMBER_FIELDS else None
            document[field] = what_if_number(value, was)
    return changed(Machine, document, machine, f"override of machine '{machine.name}'", "what-if")


def what_if_name(name: str) -> str:
    """The name of a profile with other numbers.

    >>> what_if_name("h100") == what_if_name("h100+what-if") == "h100+what-if"
    True
    """
    return name.removesuffix(_WHAT_IF) + _WHAT_IF


def what_if_number(value: float, was: Number | None) -> dict[str, Any]:
    """The table of a number that replaces another; its source says what that was."""
    if was is None:
        before = "missing"
    else:
        before = was.kind if was.value is None else f"{was.value:g} ({was.kind})"
    return _plain_number(value, f"what-if; was {before}")


def changed(
    schema: type[ProfileT],
    document: Mapping[str, Any],
    base: ProfileT | None,
    where: str,
    source: str | None = None,
) -> ProfileT:
    """The profile of a document, with its base's fields where it has none of its own.

    A plain number stands for a table, of a curve for its `max`; a text like `48GiB` for so many
    bytes. Of named curves and numbers each is replaced alone.

    Args:
        where: what error messages call the document.
        source: the source of plain numbers; by default that of a file's.

    Raises:
        ProfileError: it has every fault of the document.
    """
    if source is None:
        source = f"{'override' if base else 'plain number'} in {Path(where).name}"
    fields = base.model_dump() if base else {}
    try:
        for field, value in _filled(schema, "", document, fields, source).items():
            is_named = get_origin(_inner(schema, field)) is dict and isinstance(value, dict)
            fields[field] = {**fields.get(field, {}), **value} if is_named else value
        return schema.model_validate(fields)
    except ValidationError as error:
        faults = [_fault(schema, fault) for fault in error.errors(include_url=False)]
    except ProfileError as error:
        faults = [str(error)]
    raise ProfileError(f"{where}: " + "; ".join(_each_list_once(faults)))


def _filled(kind: Any, field: str, value: Any, was: Any, source: str) -> Any:
    """A value as its kind has it: a table for a plain number, bytes for a size, tuples for arrays.

    Args:
        kind: the annotation of what belongs there.
        was: the base's value.
    """
    if isinstance(value, list | tuple):
        return tuple(_filled(kind, field, one, None, source) for one in value)
    if isinstance(value, Mapping):
        inside = was if isinstance(was, dict) else {}
        path = {key: field if key == "value" else f"{field}.{key}".lstrip(".") for key in value}
        return {
            key: _filled(_inner(kind, key), path[key], one, inside.get(key), source)
            for key, one in value.items()
        }
    if isinstance(value, str) and field.endswith("_bytes"):
        try:
            value = parse_bytes(value)
        except SizeError as error:
            raise ProfileError(f"{field}: {error}") from None
    node = None if get_origin(kind) is dict else _node(kind)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    if node is Number:
        return _plain_number(value, source)
    return _plain_curve(value, was, source, field) if node is Efficiency else value


def _plain_number(value: float, source: str) -> dict[str, Any]:
    """The table of a number that was given without one; infinity is unconstrained."""
    if value == math.inf:
        return {"kind": "unconstrained", "source": source}
    return {"value": value, "kind": "hypothetical", "source": source}


def _plain_curve(
    value: float, was: Mapping[str, Any] | None, source: str, field: str
) -> dict[str, Any]:
    """The table of a curve of which only `max` was given; the rest is the base's."""
    if was is None:
        raise ProfileError(
            f"{field}: a plain number changes the max of an existing curve, and there is none. "
            'Write a full table: { max = ..., half = 0, of = "flops" or "bytes", kind = ..., '
            "source = ... }"
        )
    source = f"{source}; max was {was['max']:g} ({was['kind']})"
    return {**was, "max": value, "kind": "hypothetical", "source": source}


def _node(kind: Any) -> type[Node] | None:
    """The node in an annotation: Level of tuple[Level, ...], Number of Number | None."""
    if isinstance(kind, type) and issubclass(kind, Node):
        return kind
    return next((node for one in get_args(kind) if (node := _node(one))), None)


def _inner(kind: Any, name: str | int) -> Any:
    """The annotation of what stands under a name, or at a place, in something of this kind."""
    if isinstance(name, int):
        return _node(kind)
    if get_origin(kind) is dict:
        return get_args(kind)[1]
    node = _node(kind)
    return node.model_fields[name].annotation if node and name in node.model_fields else None


def _fault(schema: type[Node], fault: Any) -> str:
    """Say what is wrong, and a hint at what was meant."""
    field, kind, around = ".".join(map(str, fault["loc"])), schema, schema
    for name in fault["loc"]:
        around, kind = kind, _inner(kind, name)
    got, node = f"{fault['input']!r:.60}", _node(kind)
    if fault["type"] == "extra_forbidden":
        beside = _node(around) or schema
        known = [*["base"] * (beside is schema), *beside.model_fields]
        return f"unknown field '{field}': {nearest(str(fault['loc'][-1]), known)}"
    if fault["type"] == "missing":
        return f"{field} is missing"
    if fault["type"] == "model_type":
        kinds = "a number or a table" if node in (Number, Efficiency) else "a table"
        return f"{field} needs {kinds}, got {got}"
    if fault["type"] == "dict_type":
        return f"{field} needs tables [{field}.<name>], got {got}"
    if fault["type"] == "tuple_type":
        return f"{field} needs {f'tables [[{field}]]' if node else 'an array'}, got {got}"
    got = "" if isinstance(fault["input"], dict | Node) else f", got {got}"
    return f"{field}: {fault['msg']}{got}" if field else str(fault["msg"])


def _each_list_once(faults: list[str]) -> list[str]:
    """Faults without repetition: the long list of known fields stands where it is first needed."""
    seen: set[str] = set()
    found = []
    for fault in dict.fromkeys(faults):
        text, _, known = fault.partition(": known: ")
        found.append(text if known in seen else fault)
        seen.add(known)
    return found
