"""The files of a source, and hashes that tell one content from another."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from twinstream.data.data_error import DataError, unreadable
from twinstream.data.options import Source
from twinstream.data.reading.arrays import begins_an_array
from twinstream.schedule.files import open_file

Kind = Literal["text", "lines", "array", "parquet", "csv", "bin"]
KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".jsonl": "lines",
    ".json": "lines",
    ".parquet": "parquet",
    ".csv": "csv",
    ".bin": "bin",
}
_READS = "twinstream reads .txt, .jsonl, .json, .parquet, .csv and .bin"
_PIECE_BYTES = 1 << 20
_HASHED_BYTES = 4 << 30  # of all files together, so that opening takes seconds


@dataclass(frozen=True)
class DataFile:
    """A data file that is not empty."""

    path: Path
    kind: Kind
    size_bytes: int
    mtime_ns: int = 0


@dataclass(frozen=True)
class SourceFiles:
    """Files of a source in the order of their paths, and a line on what was left out, if any."""

    files: tuple[DataFile, ...]
    left_out: str | None = None


def find_files(source: Source) -> SourceFiles:
    """Return the source's file, or all files of a known kind below its folder.

    Hidden and empty files are left out, and in a folder those of other kinds.

    Raises:
        DataError: there is no such file, or nothing in it that can be read.
    """
    try:
        if source.path.is_dir():
            return _in_folder(source.path)
        found, kind = source.path.stat(), _kind(source.path)
    except OSError as error:
        raise unreadable(source.path, error) from None
    if kind is None:
        raise DataError(
            f"{source.path} is of an unknown kind, '{source.path.suffix}': {_READS}; convert it, "
            "or give plain text the ending .txt"
        )
    if not found.st_size:
        raise DataError(f"{source.path} is empty (0 bytes): there is nothing to train on")
    return SourceFiles((DataFile(source.path, kind, found.st_size, found.st_mtime_ns),))


def _kind(path: Path) -> Kind | None:
    """Return the kind by the ending; a .json has lines of objects, or one array of them."""
    ending = path.suffix.lower()
    return "array" if ending == ".json" and begins_an_array(path) else KINDS.get(ending)


def _in_folder(folder: Path) -> SourceFiles:
    files, others = [], Counter[str]()
    for path in _visible_files(folder):
        kind, found = _kind(path), path.stat()
        if path.suffix == ".idx" and path.with_suffix(".bin").exists():
            continue
        if kind is None:
            others[path.suffix.lower() or path.name] += 1
        elif found.st_size:
            files.append(DataFile(path, kind, found.st_size, found.st_mtime_ns))
    shown = ", ".join(f"{name} ({count})" for name, count in others.most_common(5))
    if not files:
        raise DataError(
            f"{folder} has no file to train on{f', but others: {shown}' if shown else ''}. {_READS}"
        )
    left_out = f"{folder}: {others.total()} file(s) of other kinds are left out: {shown}"
    return SourceFiles(tuple(files), left_out if others else None)


def _visible_files(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error) from None

    found = []
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def content_hashes(files: Sequence[DataFile]) -> list[str]:
    """Return a hash of each file, of its size and bytes; its name and folder do not count.

    Up to 4 GiB of all files together are read. Of more, so many pieces of 1 MiB of each file,
    evenly spaced, its first and last among them.
    """
    every = -(-sum(file.size_bytes for file in files) // _HASHED_BYTES)
    return [_content_hash(file, max(1, every)) for file in files]


def are_hashed_whole(files: Sequence[DataFile]) -> bool:
    """Return whether all bytes of the files are read for their hashes."""
    return sum(file.size_bytes for file in files) <= _HASHED_BYTES


def _content_hash(file: DataFile, every: int) -> str:
    digest = blake2b(str(file.size_bytes).encode(), digest_size=16)
    last = (file.size_bytes - 1) // _PIECE_BYTES
    try:
        with open_file(file.path) as opened:
            for piece in sorted({*range(0, last + 1, every), last}):
                opened.seek(piece * _PIECE_BYTES)
                digest.update(opened.read(_PIECE_BYTES))
    except OSError as error:
        raise unreadable(file.path, error) from None
    return digest.hexdigest()


def combined_hash(parts: Iterable[object]) -> str:
    """Return one hash of several values, by what `repr` shows of each."""
    digest = blake2b(digest_size=16)
    for part in parts:
        shown = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(shown).to_bytes(8, "little") + shown)
    return digest.hexdigest()
