"""Profiles as text: read from files, parsed, and written number by number."""

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinstream.hardware_profiles.errors import ProfileError
from twinstream.schedule.files import parse_toml, read_text
from twinstream.schedule.node import Node


def profile_path(name_or_path: str | Path, shipped: Mapping[str, Path]) -> Path | None:
    """Where a profile lies: a shipped one by its name in any case, another by its path.

    None where it looks like a name, and there is neither.
    """
    if isinstance(name_or_path, str) and name_or_path.lower() in shipped:
        return shipped[name_or_path.lower()]
    path = Path(name_or_path)
    is_name = isinstance(name_or_path, str) and not path.suffix and len(path.parts) <= 1
    if is_name and not os.path.isfile(path):  # noqa: PTH113 - false of too long a name, too
        return None
    return path


def read_profile(path: Path, loading: tuple[Path, ...]) -> str:
    """The text of a profile.

    Args:
        loading: the files that are being read, each the base of the one before; none twice.

    Raises:
        ProfileError: it cannot be read, or is among its own bases.
    """
    if "\0" in str(path):
        raise ProfileError(f"cannot read profile {path}: no path holds a null byte")
    if path.resolve() in loading:
        names = [one.name for one in (*loading, path)]
        raise ProfileError(f"profiles inherit in a circle: {' -> '.join(names)}")
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path} is not UTF-8 text: byte {error.start}") from None
    except OSError as error:
        by = f" (the base of {loading[-1].name})" if loading else ""
        raise ProfileError(f"cannot read profile {path}{by}: {error.strerror}") from None


def parsed_toml(text: str, source: str) -> dict[str, Any]:
    """The document of a TOML text.

    Raises:
        ProfileError: it is none; with the line.
    """
    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        end = f"at line {len(text.splitlines())}, the end of the document"
        message = str(error).replace("at end of document", end)
    raise ProfileError(f"{source} is not valid TOML: {message}")


def is_plain(value: Any) -> bool:
    """Whether a number stands where a table of value, kind and source could."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def toml_lines(node: Node) -> list[str]:
    """The fields of a node that are not at their defaults, one a line."""
    values = node.model_dump(exclude_defaults=True)
    return [f"{key} = {toml_value(value)}" for key, value in values.items()]


def toml_value(value: str | float | tuple[Any, ...] | list[Any]) -> str:
    """A text, a number or a list of them as TOML.

    >>> toml_value((1.0, 2.5e9, "a"))
    '[1, 2.5e+09, "a"]'
    """
    if isinstance(value, str):  # a JSON string is a TOML string, but for the raw DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_value(one) for one in value)}]"
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and value < 1e6:
        return str(int(value))
    short = f"{value:g}"
    if float(short) == value:
        return short
    return str(int(value)) if value.is_integer() else repr(value)
