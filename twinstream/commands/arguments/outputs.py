"""Where commands write, refused before the work and not after it."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import typer

from twinstream.schedule.files import DocumentError, real_path

_OUTPUTS = {"output": "-o", "html": "--html"}


def check_output(path: Path | None) -> Path | None:
    """Refuse a place that cannot be written before the work, not after it."""
    if path is None:
        return None
    check_folder(path)
    try:
        path.exists()
    except OSError as error:
        raise DocumentError(f"cannot write {path}: {error.strerror}") from None
    if path.exists() and not path.is_file():
        raise DocumentError(f"cannot write {path}: it is not a file; name a file")
    if not path.parent.is_dir():
        raise DocumentError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise DocumentError(f"cannot write {path}: permission denied")
    return path


def check_folder(path: Path | None) -> Path | None:
    """Refuse `-`, which other programs take for standard output."""
    if path is not None and str(path) == "-":
        raise DocumentError(
            "cannot write -: standard output has the tables, or with --json the figures; name a "
            "place on the disk"
        )
    return path


def require_own_outputs(given: Mapping[str, object]) -> None:
    """Refuse to write over what a command reads, or twice to one file.

    Args:
        given: the command's parameters.

    Raises:
        DocumentError: says which file.
    """
    read = list(_flat(value for name, value in given.items() if name not in _OUTPUTS))
    written: list[Path] = []
    for name, flag in _OUTPUTS.items():
        path = given.get(name)
        if not isinstance(path, Path):
            continue
        if any(isinstance(one, str | Path) and _is_file_at(path, one) for one in read):
            raise DocumentError(
                f"cannot write {path}: the command reads it, and what is in it would be lost; name "
                f"another file with {flag}"
            )
        if any(real_path(one) == real_path(path) for one in written):
            raise DocumentError(f"cannot write {path} twice; name another file with {flag}")
        written.append(path)


def _is_file_at(path: Path, other: str | Path) -> bool:
    """Whether the other names the same file; most texts name none."""
    try:
        return path.samefile(other)
    except (OSError, ValueError):
        return False


def _flat(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def output_option(what: str) -> typer.models.OptionInfo:
    """`-o FILE`, checked before the command starts."""
    option: typer.models.OptionInfo = typer.Option(
        "--output", "-o", metavar="FILE", help=what, callback=check_output
    )
    return option
