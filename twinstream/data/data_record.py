"""A record of the data that a run reads, so that it can go on where a file was mended meanwhile.

A run that met a row that it could not use goes on with the mended file, in the blocks and groups
that it began with, if nothing has changed of what it has read.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from twinstream.data.reading.blocks import DataBlock, FileRange
from twinstream.data.reading.files import DataFile
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import Size


class PartRecord(Node):
    """A part of a block, as `FileRange`, of file number `file` of its source."""

    file: Size
    first: Size
    end: Size
    size_bytes: Size
    row_group: Size
    rows_before: Size
    digest: str

    def part(self, file: DataFile, content_hash: str) -> FileRange:
        """Return the range of the file as it is now."""
        return FileRange(
            file.path, file.kind, self.first, self.end, self.size_bytes, file.size_bytes,
            file.mtime_ns, content_hash, self.row_group, self.rows_before, self.digest,
        )  # fmt: skip


class FileRecord(Node):
    """A data file by kind, size and hash, without its path."""

    kind: str
    size_bytes: Size
    content_hash: str


class SourceRecord(Node):
    """The files of one source of data, and the blocks that they are cut into."""

    files: tuple[FileRecord, ...]
    blocks: tuple[tuple[PartRecord, ...], ...]

    @classmethod
    def of(
        cls, files: Sequence[DataFile], hashes: Sequence[str], blocks: Sequence[DataBlock]
    ) -> "SourceRecord":
        """Record the files and blocks of a source as they are now."""
        numbers = {file.path: number for number, file in enumerate(files)}
        return cls(
            files=tuple(
                FileRecord(kind=file.kind, size_bytes=file.size_bytes, content_hash=content_hash)
                for file, content_hash in zip(files, hashes, strict=True)
            ),
            blocks=tuple(
                tuple(
                    PartRecord(
                        file=numbers[part.path], first=part.first, end=part.end,
                        size_bytes=part.size_bytes, row_group=part.row_group,
                        rows_before=part.rows_before, digest=part.digest,
                    )
                    for part in block.parts
                )
                for block in blocks
            ),
        )  # fmt: skip

    def blocks_of(
        self, files: Sequence[DataFile], hashes: Sequence[str]
    ) -> list[tuple[DataBlock, bool]] | None:
        """The same blocks of the files as they are now, and which have changed.

        None where there are other files, or one changed whose parts are not known again.
        """
        if [file.kind for file in files] != [one.kind for one in self.files]:
            return None
        by_file: dict[int, list[PartRecord]] = defaultdict(list)
        for part in (part for block in self.blocks for part in block):
            by_file[part.file].append(part)
        found: dict[int, list[tuple[FileRange, bool]]] = {}
        for number, (was, file, content_hash) in enumerate(
            zip(self.files, files, hashes, strict=True)
        ):
            parts = [one.part(file, content_hash) for one in by_file[number]]
            if was.content_hash == content_hash:
                found[number] = [(part, False) for part in parts]
            elif all(part.digest for part in parts):
                found[number] = _found_again(parts, file.size_bytes - was.size_bytes)
            if not found.get(number):
                return None
        taken = {number: iter(parts) for number, parts in found.items()}
        blocks = [[next(taken[part.file]) for part in block] for block in self.blocks]
        return [
            (DataBlock(tuple(part for part, _ in block)), any(changed for _, changed in block))
            for block in blocks
        ]


class DataRecord(Node):
    """All that is read by a run.

    Attributes:
        fingerprint: of the data that the run began with.
        settings: what else than contents decides the fingerprint.
    """

    schema_version: int = 1
    fingerprint: str
    settings: str
    sources: tuple[SourceRecord, ...]


def _found_again(parts: Sequence[FileRange], longer_bytes: int) -> list[tuple[FileRange, bool]]:
    """Parts of a file that was changed in one place, and whether they are in that place.

    Those before it begin where they did, those behind it so many bytes later; what is between is
    cut evenly into as many parts as there were. Empty if it has too few bytes for that.
    """

    def is_same(part: FileRange) -> bool:
        return part.with_digest().digest == part.digest

    most, before = len(parts) - 1, 0
    while before < most and is_same(parts[before]):
        before += 1
    moved = [replace(p, first=p.first + longer_bytes, end=p.end + longer_bytes) for p in parts]
    behind = len(parts)
    while behind > before + 1 and moved[behind - 1].first >= 0 and is_same(moved[behind - 1]):
        behind -= 1
    start, stop, count = parts[before].first, moved[behind - 1].end, behind - before
    if stop - start < count:
        return []
    edges = [start + (stop - start) * number // count for number in range(count + 1)]
    between = [
        replace(part, first=first, end=end).with_digest()
        for part, first, end in zip(parts[before:behind], edges[:-1], edges[1:], strict=True)
    ]
    return [
        *((part, False) for part in parts[:before]),
        *((part, True) for part in between),
        *((part, False) for part in moved[behind:]),
    ]
