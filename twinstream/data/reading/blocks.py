"""Blocks of data: what one process tokenises at a time, and the cache keeps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from twinstream.data.data_error import DataError, unreadable
from twinstream.data.reading.arrays import rows_within
from twinstream.data.reading.bins import bin_layout
from twinstream.data.reading.csvs import csv_rows_within
from twinstream.data.reading.files import DataFile, Kind
from twinstream.data.reading.parquet import row_groups
from twinstream.data.reading.ranges import lines_in, text_bytes_in

_SLICES_OF_A_ROW_GROUP = 16  # each reads all of it


@dataclass(frozen=True)
class FileRange:
    """A range of one file, from `first` to `end`.

    The unit depends on the kind. Text and rows of JSON are counted in bytes, and the range has the
    lines or rows that begin in it; .bin files are counted in tokens; parquet in rows of a row
    group, and there `size_bytes` is about the size without compression. `rows_before` (parquet,
    arrays and .csv) is how many rows of the file come before the range. `mtime_ns` is when the
    file was last changed before it was opened; `digest`, if known, is that of the range's content.
    """

    path: Path
    kind: Kind
    first: int
    end: int
    size_bytes: int
    file_bytes: int
    mtime_ns: int
    content_hash: str
    row_group: int = 0
    rows_before: int = 0
    digest: str = ""

    def content(self) -> tuple[bytes, int]:
        """Return the bytes of a range of text or lines, and where in the file they begin.

        Raises:
            DataError: the file cannot be read.
        """
        read = lines_in if self.kind == "lines" else text_bytes_in
        return read(self.path, self.first, self.end)

    def with_digest(self) -> "FileRange":
        """Return the range with its content's digest (text and lines only), to know it again."""
        if self.kind not in ("text", "lines"):
            return self
        return replace(self, digest=digest_of(self.content()[0]))

    def head(self, most_bytes: int, most_rows: int) -> "FileRange":
        """Return the beginning of the range, of at least one row."""
        units = self.end - self.first
        taken = units
        if self.size_bytes > most_bytes:
            taken = max(1, units * most_bytes // self.size_bytes)
        if self.kind == "parquet":
            taken = min(taken, most_rows)
        size_bytes = max(1, self.size_bytes * taken // units)
        digest = self.digest if taken == units else ""
        return replace(self, end=self.first + taken, size_bytes=size_bytes, digest=digest)


@dataclass(frozen=True)
class DataBlock:
    """Ranges of files of one kind; all blocks of a data set have about the same size."""

    parts: tuple[FileRange, ...]

    @cached_property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def with_digests(self) -> "DataBlock":
        """Return the block with the digests of its ranges."""
        return DataBlock(tuple(part.with_digest() for part in self.parts))

    @property
    def kind(self) -> Kind:
        return self.parts[0].kind

    @property
    def is_continuous(self) -> bool:
        """Return whether its documents are long texts that may be cut anywhere."""
        return self.kind in ("text", "bin")

    def head(self, most_bytes: int, most_rows: int) -> "DataBlock":
        """Return the beginning of the block: its first ranges, the last of them cut."""
        taken: list[FileRange] = []
        for part in self.parts:
            taken.append(part.head(most_bytes, most_rows))
            most_bytes -= taken[-1].size_bytes
            if most_bytes <= 0 or taken[-1] != part:
                break
        return DataBlock(tuple(taken))


@contextmanager
def unchanged(block: DataBlock) -> Iterator[None]:
    """Check, after all that is read of a block in this context, that its files have not changed.

    Raises:
        DataError: a file is not as it was when the data was opened.
    """
    try:
        yield
    except DataError:
        _require_unchanged(block)
        raise
    _require_unchanged(block)


def _require_unchanged(block: DataBlock) -> None:
    for part in block.parts:
        try:
            found = part.path.stat()
        except OSError as error:
            raise unreadable(part.path, error) from None
        if (found.st_size, found.st_mtime_ns) != (part.file_bytes, part.mtime_ns):
            raise DataError(
                f"{part.path} has changed since it was opened: it has {found.st_size} bytes, and "
                f"had {part.file_bytes}. Put it back as it was"
            )


def digest_of(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def split_into_blocks(
    files: Sequence[DataFile],
    hashes: Sequence[str],
    block_bytes: int,
    columns: Sequence[str] = (),
) -> list[DataBlock]:
    """Split the files of a source into blocks: large ones in ranges, small ones together.

    Args:
        columns: of tables that are read beside those of known names.
    """
    blocks: list[DataBlock] = []
    together: list[FileRange] = []
    held_bytes = 0
    for file, content_hash in zip(files, hashes, strict=True):
        for part in _parts(file, content_hash, block_bytes, columns):
            is_full = held_bytes + part.size_bytes > block_bytes
            if together and (is_full or together[-1].kind != part.kind):
                blocks.append(DataBlock(tuple(together)))
                together, held_bytes = [], 0
            together.append(part)
            held_bytes += part.size_bytes
    if together:
        blocks.append(DataBlock(tuple(together)))
    return blocks


def _parts(
    file: DataFile, content_hash: str, block_bytes: int, columns: Sequence[str]
) -> Iterator[FileRange]:
    whole = FileRange(file.path, file.kind, 0, 0, 0, file.size_bytes, file.mtime_ns, content_hash)
    if file.kind == "parquet":
        yield from _parts_of_parquet(whole, block_bytes, columns)
        return
    if file.kind in ("array", "csv"):
        within = rows_within if file.kind == "array" else csv_rows_within
        rows = within(whole.path, 0, whole.file_bytes + 1)
        yield from _parts_of_rows(whole, block_bytes, rows)
        return
    unit_bytes, units = 1, file.size_bytes
    if file.kind == "bin":
        layout = bin_layout(file.path)
        unit_bytes, units = np.dtype(layout.dtype).itemsize, layout.num_tokens
    for first, end in _even_ranges(units, max(1, -(-units * unit_bytes // block_bytes))):
        yield replace(whole, first=first, end=end, size_bytes=(end - first) * unit_bytes)


def _parts_of_parquet(
    whole: FileRange, block_bytes: int, columns: Sequence[str]
) -> Iterator[FileRange]:
    before = 0
    for index, (num_rows, size_bytes) in enumerate(row_groups(whole.path, columns)):
        slices = max(1, min(_SLICES_OF_A_ROW_GROUP, -(-size_bytes // block_bytes), num_rows))
        group = replace(whole, size_bytes=max(1, size_bytes // slices), row_group=index)
        for first, end in _even_ranges(num_rows, slices):
            yield replace(group, first=first, end=end, rows_before=before + first)
        before += num_rows


def _parts_of_rows(
    whole: FileRange, block_bytes: int, rows: Iterator[tuple[int, dict[str, Any]]]
) -> Iterator[FileRange]:
    """Cut a file where rows begin; finding that takes reading it from the start."""
    first = before = count = 0
    for byte, _ in rows:
        first = first or byte
        if byte - first >= block_bytes:
            yield replace(whole, first=first, end=byte, size_bytes=byte - first, rows_before=before)
            first, before = byte, count
        count += 1
    if count > before:
        size_bytes = whole.file_bytes - first
        yield replace(
            whole, first=first, end=whole.file_bytes, size_bytes=size_bytes, rows_before=before
        )


def _even_ranges(total: int, count: int) -> Iterator[tuple[int, int]]:
    edges = [total * index // count for index in range(count + 1)]
    yield from ((first, end) for first, end in pairwise(edges) if end > first)
