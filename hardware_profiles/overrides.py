"""Changing some numbers of a machine: a profile with a base, or a what-if."""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.link import (
    D2H,
    DUPLEX,
    H2D,
    LINK_FIELDS,
    duplex_that_follows,
    link_fault,
    link_following,
)
from twinstream.hardware_profiles.schema import (
    NUMBER_FIELDS,
    AttentionChoice,
    ComputeCapability,
    Efficiency,
    ExpectedError,
    Machine,
    Number,
)
from twinstream.schedule.errors import did_you_mean
from twinstream.schedule.node import Node

_WHAT_IF = "+what-if"
_TABLES: Mapping[str, type[Node]] = {  # the fields that no plain number stands for
    "attention": AttentionChoice,
    "compute_capability": ComputeCapability,
    "expected_error": ExpectedError,
}


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
    where = f"override of machine '{machine.name}'"
    document: dict[str, Any] = {"name": machine.name.removesuffix(_WHAT_IF) + _WHAT_IF}
    for field, value in {**changes, **link_following(_link(machine), changes)}.items():
        if not field.startswith("efficiency."):
            document[field] = plain_number(value, f"what-if; was {_told(machine, field)}")
            continue
        key = field.removeprefix("efficiency.")
        curves = document.setdefault("efficiency", {})
        curves[key] = plain_curve(
            value, machine.efficiency.get(key), "what-if", f"{where}: {field}"
        )
    return merge(machine, document, where)


def require_duplex(machine: Machine, base: Machine, where: str) -> None:
    """Refuse a profile with another link than its base's and the base's rate of both together.

    Raises:
        ProfileError: it has the line to add.
    """
    now, before = _link(machine), _link(base)
    changed = [way for way in (H2D, D2H) if now.get(way) != before.get(way)]
    if not changed or before.get(DUPLEX) is None:
        return
    line = "the rate of both directions together"
    if len(before) == 3:
        line = f"{duplex_that_follows(before, now[H2D], now[D2H]):g}"
    raise ProfileError(
        f"{where}: {', '.join(changed)} changes, and {DUPLEX} would stay that of '{base.name}', "
        f"{before[DUPLEX]:g}: both directions together would be as fast as before. Add the line "
        f"{DUPLEX} = {line}"
    )


def _link(machine: Machine) -> dict[str, float]:
    """The rates of the link that a machine states; inf where unconstrained."""
    stated = [field for field in LINK_FIELDS if getattr(machine, field) is not None]
    return {field: machine.number(field) for field in stated}


def plain_number(value: float, source: str) -> dict[str, Any]:
    """The table of a number that was given without one; infinity is unconstrained."""
    if value == math.inf:
        return {"kind": "unconstrained", "source": source}
    return {"value": value, "kind": "hypothetical", "source": source}


def plain_curve(value: float, base: Efficiency | None, source: str, where: str) -> dict[str, Any]:
    """The table of a curve of which only `max` was given; the rest is the base's."""
    if base is None:
        raise ProfileError(
            f"{where}: a plain number changes the max of an existing curve, and there is none. "
            'Write a full table: { max = ..., half = 0, of = "flops" or "bytes", kind = ..., '
            "source = ... }"
        )
    source = f"{source}; max was {base.max:g} ({base.kind})"
    return {**base.model_dump(), "max": value, "kind": "hypothetical", "source": source}


def merge(base: Machine, document: Mapping[str, Any], where: str) -> Machine:
    """The base with the fields and curves of a document in place of its own."""
    merged = {**base.model_dump(), **document}
    merged["efficiency"] = {**base.model_dump()["efficiency"], **document.get("efficiency", {})}
    return validated(merged, where)


def validated(document: Mapping[str, Any], where: str) -> Machine:
    """The machine of a document; every fault of it in one `ProfileError`."""
    try:
        machine = Machine.model_validate(document)
        if (fault_of_link := link_fault(_link(machine))) is None:
            return machine
        faults = [fault_of_link]
    except ValidationError as error:
        faults = [_fault(fault["loc"], fault) for fault in error.errors(include_url=False)]
    raise ProfileError(f"{where}: " + "; ".join(_each_list_once(faults)))


def _each_list_once(faults: list[str]) -> list[str]:
    """The list of all known fields is long: it stands where it is first needed."""
    seen: set[str] = set()
    found = []
    for fault in faults:
        text, _, known = fault.partition(": known: ")
        found.append(text if known in seen else fault)
        seen.add(known)
    return found


def nearest(name: str, known: list[str]) -> str:
    """A hint at the known name that was probably meant, or all known names."""
    return did_you_mean(name, known) or f"known: {', '.join(known)}"


def _fault(loc: tuple[int | str, ...], fault: Any) -> str:
    """What is wrong, and a hint at what was meant."""
    names = [str(part) for part in loc]
    field = ".".join(names)
    if fault["type"] == "extra_forbidden":
        return f"unknown field '{field}': {nearest(names[-1], _known_beside(names))}"
    if fault["type"] == "missing":
        return f"{field} is missing"
    if fault["type"] in ("model_type", "dict_type"):
        kinds = "a table" if names[0] in _TABLES else "a number or a table"
        return f"{field} needs {kinds}, got {fault['input']!r}"
    got = "" if isinstance(fault["input"], dict | Number) else f", got {fault['input']!r}"
    return f"{field}: {fault['msg']}{got}"


def _known_beside(names: list[str]) -> list[str]:
    if len(names) == 1:
        return ["base", *Machine.model_fields]
    if names[0] == "efficiency":
        return list(Efficiency.model_fields)
    return list(_TABLES.get(names[0], Number).model_fields)


def _told(machine: Machine, field: str) -> str:
    number: Number | None = getattr(machine, field) if field in NUMBER_FIELDS else None
    if number is None:
        return "missing"
    return f"{number.value:g} ({number.kind})" if number.value is not None else number.kind
