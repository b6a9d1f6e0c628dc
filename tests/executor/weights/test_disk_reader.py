"""Direct reads of files: any bytes of them, past the page cache, at a rate, and their errors."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import pytest
import torch

from twinstream.executor.weights import disk_reader
from twinstream.executor.weights.disk_reader import DiskFiles, DiskReader, FileExtent
from twinstream.executor.weights.errors import WeightsError

SIZE = 3 * disk_reader.REQUEST_BYTES + 12_345


@pytest.fixture(scope="module")
def content() -> bytes:
    return Random(0).randbytes(SIZE)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    found = tmp_path / "weights.bin"
    found.write_bytes(content)
    return found


@contextmanager
def reader_of(path: Path, **given: object) -> Iterator[DiskReader]:
    lines: list[str] = []
    files = DiskFiles({"": (FileExtent(path, 0, SIZE, 0),)}, 1e9, tell=lines.append, **given)
    with closing(DiskReader(files)) as reader:
        reader.lines = lines
        yield reader


def read(reader: DiskReader, extents: list[FileExtent], size: int) -> bytes:
    into = torch.full((size,), 7, dtype=torch.uint8)
    reader.read(extents, into)
    return into.numpy().tobytes()


def check_reads(reader: DiskReader, path: Path, content: bytes) -> None:
    """Of stretches that begin and end at blocks, beside them, and at the end of the file."""
    for start, size in (
        (0, 1), (4095, 2), (4096, 4096), (1, SIZE - 1), (SIZE - 5, 5), (8191, 5_000_000),
    ):  # fmt: skip
        assert read(reader, [FileExtent(path, start, size, 0)], size) == content[start:][:size]


def test_any_bytes_of_a_file_are_read(path: Path, content: bytes) -> None:
    with reader_of(path) as reader:
        check_reads(reader, path, content)
        extents = [FileExtent(path, 10, 300, 256), FileExtent(path, 5_000, 40, 1024)]
        between = bytes(256), bytes(1024 - 556), bytes(1100 - 1064)
        wanted = between[0] + content[10:310] + between[1] + content[5000:5040] + between[2]
        assert read(reader, extents, 1100) == wanted  # what no file has is zero


def test_a_part_of_a_tensor_is_that_part_of_its_files() -> None:
    extent = FileExtent(Path("f"), 1000, 100, 50)
    assert extent.within(60, 80) == FileExtent(Path("f"), 1010, 20, 0)
    assert extent.within(0, 60) == FileExtent(Path("f"), 1000, 10, 50)
    assert extent.within(140, 500) == FileExtent(Path("f"), 1090, 10, 0)
    assert extent.within(150, 500) is None and extent.within(0, 50) is None


def test_without_direct_reads_the_cache_is_used_and_that_is_said(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    dropped: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, how: dropped.append(how))
    with reader_of(path) as reader:
        check_reads(reader, path, content)
        (line,) = reader.lines
    assert "without direct reads" in line and str(path.parent) in line
    assert dropped.count(os.POSIX_FADV_DONTNEED) > 6


def test_direct_reads_are_direct(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda p, f, *a: flags.append(f) or real(p, f, *a))
    with reader_of(path) as reader:
        read(reader, [FileExtent(path, 5, 10, 0)], 10)
        if not reader.lines:  # the file system of temporary files has them
            assert flags[0] & os.O_DIRECT


@pytest.mark.parametrize("change", ["longer", "same size", "replaced", "gone"])
def test_a_file_that_changes_is_refused(path: Path, content: bytes, change: str) -> None:
    extents = [FileExtent(path, 4, 100, 0)]
    with reader_of(path) as reader:
        read(reader, extents, 100)
        if change == "longer":
            path.write_bytes(content + b"x")
        elif change == "same size":
            path.write_bytes(content)
        elif change == "replaced":
            (path.parent / "new").write_bytes(content)
            (path.parent / "new").replace(path)
        else:
            path.unlink()
        said = "cannot be read" if change == "gone" else "has changed since the run began"
        with pytest.raises(WeightsError, match=said) as refused:
            read(reader, extents, 100)
    assert "\n" not in str(refused.value) and "checkpoints are as they were" in str(refused.value)


def test_a_short_read_is_an_error(path: Path) -> None:
    """A file that says that it is longer than it is, as one whose drive gives up."""
    with reader_of(path) as reader, pytest.raises(WeightsError, match=f"ends at byte {SIZE}"):
        read(reader, [FileExtent(path, SIZE - 10, 20, 0)], 20)


def test_an_error_of_the_drive_is_one_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reader_of(path) as reader:
        read(reader, [FileExtent(path, 0, 10, 0)], 10)

        def fail(*given: object) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(WeightsError, match="cannot be read: Input/output error"):
            read(reader, [FileExtent(path, 0, 10, 0)], 10)


class Clock:
    """A clock that only sleeps move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.slept_s = 100.0, 0.0
        monkeypatch.setattr(disk_reader.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(disk_reader.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds


def test_reads_keep_to_a_rate(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 MB at 1 MB/s take 3 s, in one read or three; time between reads is not made up for."""
    files = DiskFiles({"": (FileExtent(path, 0, SIZE, 0),)}, 1e6, limited=True)
    with closing(DiskReader(files)) as reader:
        clock = Clock(monkeypatch)
        for start in (0, 1_000_000, 2_000_000):
            read(reader, [FileExtent(path, start, 1_000_000, 0)], 1_000_000)
        assert clock.slept_s == pytest.approx(3.0, abs=0.051)
        clock.now_s += 60
        read(reader, [FileExtent(path, 0, 1_000_000, 0)], 1_000_000)
        assert clock.slept_s == pytest.approx(4.0, abs=0.102)


def test_a_drive_slower_than_planned_is_told_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reader_of(path) as reader:
        clock = Clock(monkeypatch)
        real = DiskReader._request

        def slow(self: DiskReader, part: FileExtent, into: object) -> None:
            clock.now_s += 3.0
            real(self, part, into)

        monkeypatch.setattr(DiskReader, "_request", slow)
        for _ in range(2):
            read(reader, [FileExtent(path, 0, 1000, 0)], 1000)
        (line,) = [line for line in reader.lines if "wait for the disk" in line]
    assert "the plan counts with" in line
