"""Rows that cannot be used, and files that change while a run trains or rests."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.data.samples import HERE, an_epoch, data_of, documents, lines_of
from twinstream.data.chunk_stream import ChunkStream
from twinstream.data.data_error import DataError
from twinstream.data.options import DataOptions
from twinstream.data.order import Position
from twinstream.data.packing import Chunk
from twinstream.data.training_data import TrainingData

SHAPE: dict[str, Any] = {"chunk_tokens": 256, "most_documents": 60, "seed": 0}
TEXTS = [f"row {number:03}, {'some words ' * (1 + number % 4)}" for number in range(200)]

pytestmark = pytest.mark.usefixtures("small_blocks")


def write(path: Path, texts: list[str]) -> Path:
    path.write_text(lines_of({"text": text} for text in texts))
    return path


def texts_in(chunks: list[Chunk]) -> Counter[str]:
    return Counter(bytes(ids).decode() for chunk in chunks for ids, _ in documents(chunk))


def first_group(stream: ChunkStream) -> list[Chunk]:
    """The chunks up to the end of the epoch's first group."""
    chunks = []
    while stream.position.group == 0:
        chunks.append(next(stream))
    assert stream.position == Position(0, 1, 0, stream.position.order)
    return chunks


def a_text_not_in(seen: Counter[str], *, is_in: bool = False) -> int:
    """A row in the midst of the file that has been read, or has not."""
    return next(n for n in range(60, 200) if (TEXTS[n] in seen) == is_in)


@pytest.mark.parametrize("mended", ["a much longer text than there was", "short"])
def test_a_file_that_is_mended_where_it_was_not_read_is_gone_on_with(
    mended: str, tmp_path: Path
) -> None:
    """Over both halves of the epoch each row of the mended file comes once."""
    path = write(tmp_path / "a.jsonl", TEXTS)
    before = data_of(path)
    with before.chunks(**SHAPE) as stream:
        first = first_group(stream)
        position = stream.position
    seen, texts = texts_in(first), list(TEXTS)
    texts[a_text_not_in(seen)] = mended
    write(path, texts)
    again = data_of(path)
    assert again.fingerprint != before.fingerprint
    data = again.gone_on_with(before.fingerprint, before.record)
    with data.chunks(**SHAPE, start=position) as stream:
        rest = an_epoch(stream)
    assert seen + texts_in(rest) == Counter(texts)
    once_more = data_of(path).gone_on_with(before.fingerprint, data.record)
    assert once_more.blocks == data.blocks and not once_more.changed


def test_a_file_that_is_the_same_is_read_in_the_same_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    before = data_of(path)
    os.utime(path)
    data = data_of(path).gone_on_with(before.fingerprint, before.record)
    assert not data.changed
    with before.chunks(**SHAPE) as old, pytest.raises(DataError, match="has changed"):
        next(old)
    with data.chunks(**SHAPE) as new:
        assert texts_in(an_epoch(new)) == Counter(TEXTS)


def test_what_was_read_cannot_change(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    before = data_of(path)
    with before.chunks(**SHAPE) as stream:
        seen = texts_in(first_group(stream))
        position = stream.position
    texts = list(TEXTS)
    texts[a_text_not_in(seen, is_in=True)] += "!"
    write(path, texts)
    data = data_of(path).gone_on_with(before.fingerprint, before.record)
    with pytest.raises(DataError, match="changed where this run has read it"):
        data.chunks(**SHAPE, start=position)


@pytest.mark.parametrize("cache", [None, "cache"])
@pytest.mark.parametrize("how", ["truncated", "rewritten", "removed"])
def test_data_that_changes_under_a_run_ends_it(how: str, cache: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    data = data_of(path, cache=None if cache is None else tmp_path / cache)
    with data.chunks(**SHAPE) as stream:
        first_group(stream)
        if how == "truncated":
            os.truncate(path, 2000)
        elif how == "rewritten":
            content = path.read_bytes()
            path.write_bytes(content.replace(b"words", b"names"))
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        else:
            path.unlink()
        with pytest.raises(DataError, match=r"a.jsonl has changed|cannot read .*a.jsonl"):
            an_epoch(stream)


def test_other_bytes_of_the_same_size_and_time_are_seen_by_their_hash(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    data, before = data_of(path, cache=tmp_path / "cache"), path.stat()
    path.write_bytes(path.read_bytes().replace(b"words", b"names"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with data.chunks(**SHAPE) as stream, pytest.raises(DataError, match="have changed since"):
        next(stream)


def with_bad_rows(folder: Path, *numbers: int) -> Path:
    lines = lines_of({"text": text} for text in TEXTS).splitlines(keepends=True)
    for number in numbers:
        lines[number] = '{"text": null}\n' if number % 2 else "{\n"
    path = folder / "a.jsonl"
    path.write_text("".join(lines))
    return path


def skipping(path: Path, most: int, cache: Path | None = None) -> TrainingData:
    return data_of(path, options=DataOptions(workers=0, skip_bad_rows=most), cache=cache)


def test_so_many_bad_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    path, cache = with_bad_rows(tmp_path, 5, 70, 131), tmp_path / "cache"
    for _ in range(2):  # the second time from the cache
        with skipping(path, 3, cache).chunks(**SHAPE) as stream:
            found = texts_in(an_epoch(stream))
            assert len(stream.skipped) == 3
            for line in (6, 71, 132):
                assert any(f"a.jsonl:{line}" in told for told in stream.skipped)
            an_epoch(stream)
            assert len(stream.skipped) == 3  # a row is counted once
    assert found == Counter(t for n, t in enumerate(TEXTS) if n not in (5, 70, 131))
    with pytest.raises(DataError, match=r"3 rows cannot be used, and 2 may be skipped"):
        an_epoch(skipping(path, 2, cache).chunks(**SHAPE))
    with pytest.raises(DataError, match=r"a.jsonl:\d+"):
        an_epoch(data_of(path, options=HERE, cache=cache).chunks(**SHAPE))


def test_a_run_that_met_a_bad_row_may_go_on_without_it(tmp_path: Path) -> None:
    path = with_bad_rows(tmp_path, 70)
    plain, skips = data_of(path), skipping(path, 1)
    assert plain.fingerprint == skips.fingerprint
    with plain.chunks(**SHAPE) as stream:
        position = stream.position
        with pytest.raises(DataError, match=r"a.jsonl:71"):
            while True:
                next(stream)
                position = stream.position
    with skips.chunks(**SHAPE, start=position) as stream:
        an_epoch(stream)
        assert len(stream.skipped) == 1
