"""The profiles that come with the package, as text."""

import tomllib
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "data"


def machine_names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.toml")))


def shipped_path(name: str) -> Path:
    """Where the shipped profile of this name lies."""
    return _DATA / f"{name}.toml"


def shipped_with(field: str) -> tuple[str, ...]:
    """Names of the shipped profiles that state a field (`hbm_bytes_per_s`, `efficiency.matmul`)."""
    return tuple(name for name in machine_names() if _states(name, field))


def _states(name: str, field: str) -> bool:
    document: dict[str, Any] = tomllib.loads(shipped_path(name).read_text(encoding="utf-8"))
    table, _, key = field.partition(".")
    if table in document and (not key or key in document[table]):
        return True
    return "base" in document and _states(document["base"], field)
