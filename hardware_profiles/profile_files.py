"""Profiles in TOML: found by name or path, read with what they inherit, and written."""

import json
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field

from twinstream.hardware_profiles.errors import ProfileError
from twinstream.schedule.errors import did_you_mean, require
from twinstream.schedule.files import parse_toml, read_text, real_path
from twinstream.schedule.node import Node

Text = Annotated[str, Field(pattern=r"\S")]
MACHINES_FOLDER = Path(__file__).parent / "data"


class Profile(Node):
    """A machine or a cluster: a name, and numbers with their sources."""

    name: Text
    description: str

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.description}>"

    __str__ = __repr__


ProfileT = TypeVar("ProfileT", bound=Profile)


def cache_folder() -> Path:
    """The folder of what was measured of this machine."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "twinstream" / "machines"


def shipped_names(folder: Path) -> tuple[str, ...]:
    """Names of the profiles in a folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def shipped_with(folder: Path, field: str) -> tuple[str, ...]:
    """Names of the profiles that state a field (`hbm_bytes_per_s`, `efficiency.matmul`)."""
    return tuple(name for name in shipped_names(folder) if _states(folder, name, field))


def _states(folder: Path, name: str, field: str) -> bool:
    document = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
    table, _, key = field.partition(".")
    if table in document and (not key or key in document[table]):
        return True
    return "base" in document and _states(folder, document["base"], field)


@dataclass(frozen=True)
class ProfileLoader(Generic[ProfileT]):
    """Reads profiles of one kind: shipped ones by name in any case, others by path.

    Args:
        word: what one is called.
        folder: where the shipped ones lie.
        make: the profile of a document without its `base`, which is given where there is one; then
            what error messages call the document, and where its relative paths start.
        otherwise: what else helps who finds none.
    """

    word: str
    schema: type[ProfileT]
    folder: Path
    make: Callable[[dict[str, Any], ProfileT | None, str, Path], ProfileT]
    otherwise: str = ""

    def load(self, given: str | Path | ProfileT) -> ProfileT:
        """The profile of this name or path; a profile is itself.

        Raises:
            ProfileError: there is none, or its content is wrong.
        """
        require(self.word, given, str, Path, self.schema)
        if isinstance(given, self.schema):
            return given
        assert isinstance(given, str | Path)
        path, names = self._shipped(given) or Path(given), shipped_names(self.folder)
        is_name = isinstance(given, str) and not path.suffix and len(path.parts) <= 1
        if is_name and not os.path.isfile(path):  # noqa: PTH113 - false of too long a name, too
            hint = did_you_mean(str(given), names)
            raise ProfileError(
                f"unknown {self.word} '{given}'{f': {hint}' if hint else '.'} "
                f"Shipped {self.word}s: {', '.join(names)}. To add one, write a TOML file with "
                f'base = "<a shipped name>" and the numbers that differ and give its path'
                f"{self.otherwise}"
            )
        return self._load_file(path, ())

    def load_text(
        self,
        text: str,
        source: str = "profile",
        directory: Path = Path(),
        loading: tuple[Path, ...] = (),
    ) -> ProfileT:
        """The profile of a TOML text.

        Args:
            source: what error messages call the text; one without `name` is called so too.
            directory: where a relative `base` path starts.
            loading: the files that are being read, of which this is the last.
        """
        document = _parsed(text, source)
        base, description = None, ""
        if "base" in document:
            base = self._load_base(document.pop("base"), source, directory, loading)
            description = f"{base.name} with other numbers: {source}"
        named = {"name": Path(source).stem, "description": description, **document}
        return self.make(named, base, source, directory)

    def _shipped(self, name: str | Path) -> Path | None:
        is_shipped = isinstance(name, str) and name.lower() in shipped_names(self.folder)
        return self.folder / f"{str(name).lower()}.toml" if is_shipped else None

    def _load_base(
        self, name: Any, source: str, directory: Path, loading: tuple[Path, ...]
    ) -> ProfileT:
        if not isinstance(name, str):
            raise ProfileError(f"{source}: base needs a name or a path in quotes, got {name!r}")
        path = self._shipped(name) or directory / name
        if not os.path.isfile(path):  # noqa: PTH113
            raise ProfileError(
                f"{source}: unknown base '{name}': neither a shipped {self.word} "
                f"({nearest(name, list(shipped_names(self.folder)))}) nor a file at {path}"
            )
        return self._load_file(path, loading)

    def _load_file(self, path: Path, loading: tuple[Path, ...]) -> ProfileT:
        text = _read(path, loading)
        return self.load_text(text, str(path), path.parent, (*loading, real_path(path)))


def _read(path: Path, loading: tuple[Path, ...]) -> str:
    """The text of a profile; `loading` are files of which each is the base of the one before."""
    if "\0" in str(path):
        raise ProfileError(f"cannot read profile {path}: no path holds a null byte")
    if real_path(path) in loading:
        names = [one.name for one in (*loading, path)]
        raise ProfileError(f"profiles inherit in a circle: {' -> '.join(names)}")
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path} is not UTF-8 text: byte {error.start}") from None
    except OSError as error:
        by = f" (the base of {loading[-1].name})" if loading else ""
        raise ProfileError(f"cannot read profile {path}{by}: {error.strerror}") from None


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        end = f"at line {len(text.splitlines())}, the end of the document"
        message = str(error).replace("at end of document", end)
    raise ProfileError(f"{source} is not valid TOML: {message}")


def nearest(name: str, known: list[str]) -> str:
    """A hint at the known name that was probably meant, or all known names."""
    return did_you_mean(name, known) or f"known: {', '.join(known)}"


def profile_toml(profile: Profile) -> str:
    """A profile as TOML that loads back equal: a table for each number, level and curve."""
    lines, tables = [], []
    for field, value in profile:
        if isinstance(value, str):
            lines.append(f"{field} = {toml_value(value)}")
        elif isinstance(value, Node):
            tables.append((f"[{field}]", value))
        elif isinstance(value, dict):
            quoted = {key: key if re.fullmatch(r"\w+", key) else f'"{key}"' for key in value}
            tables += [(f"[{field}.{quoted[key]}]", part) for key, part in value.items()]
        elif value is not None:
            tables += [(f"[[{field}]]", part) for part in value]
    for head, part in tables:
        values = part.model_dump(exclude_defaults=True)
        lines += ["", head, *(f"{key} = {toml_value(one)}" for key, one in values.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A text, a number, a list or a table of them as TOML.

    >>> toml_value((1.0, 2.5e9, {"name": "a"}))
    '[1, 2.5e+09, { name = "a" }]'
    """
    if isinstance(value, str):  # a JSON string is a TOML string, but for the raw DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_value(one) for one in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml_value(one)}' for key, one in value.items())} }}"
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and value < 1e6:
        return str(int(value))
    short = f"{value:g}"
    if float(short) == value:
        return short
    return str(int(value)) if value.is_integer() else repr(value)
