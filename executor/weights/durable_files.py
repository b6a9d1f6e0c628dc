"""Files that are on the disk when a function returns, or an error that says what did not fit."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from twinstream.executor.weights.errors import WeightsError
from twinstream.schedule.files import DocumentError, neighbour, reason_of, write_bytes


@contextmanager
def writing(path: Path, needed_bytes: int) -> Iterator[None]:
    """Say of an OSError which file was being written, and how many bytes it needs."""
    try:
        yield
    except (OSError, DocumentError) as error:
        reason = reason_of(error).removeprefix(f"cannot write {path}: ")
        raise _cannot_write(path, reason, needed_bytes) from None


def write_file(path: Path, content: bytes) -> None:
    """Write a small file whole, and to the disk.

    Raises:
        WeightsError: it cannot be written.
    """
    with writing(path, len(content)):
        write_bytes(content, path)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write small files by their names, as `write_file`; a name may be that of one in a folder."""
    for name, content in files.items():
        path = folder / name
        if path.parent != folder:
            with writing(path.parent, 0):
                path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
        if path.parent != folder:
            sync(path.parent)


def make_room(folder: Path, needed_bytes: int) -> None:
    """Make a folder, and refuse it where that much does not fit.

    Raises:
        WeightsError: it cannot be made, or there is too little room.
    """
    with writing(folder, needed_bytes):
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < needed_bytes:
            raise _cannot_write(folder, "too little room", needed_bytes)


def free_bytes(path: Path) -> int | None:
    """Room on the disk on which something is, or will be; None where nobody tells."""
    with suppress(OSError):
        parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        return shutil.disk_usage(parent).free
    return None


@contextmanager
def whole_folder(destination: Path, *, replaces: bool = False) -> Iterator[Path]:
    """A folder beside the destination that takes its name once all is in it.

    Raises:
        WeightsError: the destination is there already, unless this replaces it; or it cannot be
            written.
    """
    if destination.exists() and not replaces:
        raise WeightsError(destination, "is there already; name another folder")
    incomplete = neighbour(destination, "incomplete")
    try:
        yield incomplete
        with writing(destination, 0):
            if replaces:
                shutil.rmtree(destination, ignore_errors=True)
            incomplete.replace(destination)
            sync(destination.parent)
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)


def sync(path: Path) -> None:
    """Have what was written of a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(path: Path, reason: str, needed_bytes: int) -> WeightsError:
    free = free_bytes(path)
    are_free = "" if free is None else f", and {free} are free"
    return WeightsError(
        path,
        f"cannot be written: {reason}; it needs {needed_bytes} bytes{are_free}. Make room, or "
        "choose another folder",
    )
