"""Profiles in TOML: reading them, by name or path, with inheritance; and writing them."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.link import DUPLEX
from twinstream.hardware_profiles.overrides import (
    merge,
    nearest,
    override,
    plain_curve,
    plain_number,
    require_duplex,
    validated,
)
from twinstream.hardware_profiles.schema import NUMBER_FIELDS, Machine
from twinstream.hardware_profiles.shipped import machine_names, shipped_path
from twinstream.hardware_profiles.toml_text import (
    is_plain,
    parsed_toml,
    profile_path,
    read_profile,
    toml_lines,
    toml_value,
)
from twinstream.schedule.errors import require
from twinstream.schedule.files import write_text
from twinstream.schedule.node import Node

__all__ = ["load_machine", "load_machine_text", "machine_names", "override", "save_machine"]


def load_machine(name_or_path: str | Path | Machine) -> Machine:
    """The machine of a shipped profile (`h100`) or of a TOML file; a machine is itself.

    Raises:
        ProfileError: there is no such profile, or its content is wrong.
    """
    require("machine", name_or_path, str, Path, Machine)
    if isinstance(name_or_path, Machine):
        return name_or_path
    path = profile_path(name_or_path, {name: shipped_path(name) for name in machine_names()})
    if path is None:
        raise ProfileError(
            f"unknown machine '{name_or_path}'; shipped profiles: {', '.join(machine_names())}. "
            'To add one, write a TOML file with base = "<a shipped name>" and the numbers that '
            "differ and give its path, or measure this machine with `twinstream probe`."
        )
    return _load_file(path, loading=())


def save_machine(machine: Machine, path: str | Path) -> None:
    """Write a profile that loads back equal; numbers it inherited are written out.

    Raises:
        DocumentError: the file cannot be written.
    """
    write_text(machine_toml(machine), path)


def machine_toml(machine: Machine) -> str:
    """The profile as TOML: one table for each number and each curve."""
    head = {"name": machine.name, "description": machine.description, "device": machine.device}
    lines = [f"{key} = {toml_value(value)}" for key, value in head.items()]
    for field in (*NUMBER_FIELDS, "compute_capability", "attention", "expected_error"):
        node: Node | None = getattr(machine, field)
        if node is not None:
            lines += ["", f"[{field}]", *toml_lines(node)]
    for key, curve in machine.efficiency.items():
        quoted = key if re.fullmatch(r"\w+", key) else f'"{key}"'
        lines += ["", f"[efficiency.{quoted}]", *toml_lines(curve)]
    return "\n".join(lines) + "\n"


def _load_file(path: Path, loading: tuple[Path, ...]) -> Machine:
    text = read_profile(path, loading)
    return load_machine_text(text, str(path), path.parent, (*loading, path.resolve()))


def load_machine_text(
    text: str, source: str = "profile", directory: Path = Path(), loading: tuple[Path, ...] = ()
) -> Machine:
    """The machine of a TOML text.

    Args:
        source: what error messages call the text; a machine without `name` is called so too.
        directory: where a relative `base` path starts.
        loading: the files that are being read, of which this is the last.
    """
    document = parsed_toml(text, source)
    document.setdefault("name", Path(source).stem)
    base_name = document.pop("base", None)
    if base_name is None:
        document.setdefault("description", "")
        return validated(_with_tables(document, None, source), source)
    base = _load_base(base_name, source, directory, loading)
    document.setdefault("description", f"{base.name} with other numbers: {source}")
    tables = _with_tables(document, base, source)
    machine = merge(base, tables, source)
    if DUPLEX not in tables:
        require_duplex(machine, base, source)
    return machine


def _load_base(base_name: Any, source: str, directory: Path, loading: tuple[Path, ...]) -> Machine:
    if not isinstance(base_name, str):
        raise ProfileError(f"{source}: base needs a name or a path in quotes, got {base_name!r}")
    if base_name in machine_names():
        return _load_file(shipped_path(base_name), loading)
    path = directory / base_name
    if not os.path.isfile(path):  # noqa: PTH113
        raise ProfileError(
            f"{source}: unknown base '{base_name}': neither a shipped profile "
            f"({nearest(base_name, list(machine_names()))}) nor a file at {path}"
        )
    return _load_file(path, loading)


def _with_tables(document: Mapping[str, Any], base: Machine | None, source: str) -> dict[str, Any]:
    """The document with a table in place of each plain number."""
    file = Path(source).name
    told = f"override in {file}" if base else f"plain number in {file}"
    tables = dict(document)
    for field in NUMBER_FIELDS:
        if is_plain(tables.get(field)):
            tables[field] = plain_number(tables[field], told)
    curves = tables.get("efficiency", {})
    if not isinstance(curves, dict):
        raise ProfileError(f"{source}: efficiency needs tables [efficiency.<unit>], got {curves!r}")
    stated = base.efficiency if base else {}
    tables["efficiency"] = {
        key: plain_curve(curve, stated.get(key), told, f"{source}: efficiency.{key}")
        if is_plain(curve)
        else curve
        for key, curve in curves.items()
    }
    return tables
