"""A run's own file on a drive: any bytes are written and read again, and nothing is left of it."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import pytest
import torch

from twinstream.executor.weights import disk_reader
from twinstream.executor.weights.disk_reader import DiskFiles, DiskReader, DriveClock, FileExtent
from twinstream.executor.weights.state_file import StateFile

SIZE = 2 * disk_reader.REQUEST_BYTES + 3 * disk_reader.BLOCK_BYTES


@contextmanager
def opened(folder: Path) -> Iterator[tuple[StateFile, DiskReader]]:
    files = DiskFiles({}, 1e9, place=folder)
    own = StateFile(files, [(0, SIZE)], DriveClock())
    with closing(own), closing(DiskReader(files, {own.path: own.handle})) as reader:
        yield own, reader


@pytest.mark.parametrize("direct", [True, False])
def test_what_was_written_last_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """By stretches that begin and end anywhere, beside a bytearray that they are written to, too;
    many within one block, and over the ends of requests."""
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    random, expected = Random(1), bytearray(SIZE)
    with opened(tmp_path) as (own, reader):
        assert own.handle[1] <= direct
        assert not list(tmp_path.iterdir())
        stretches = [(0, SIZE), (4096, 4096), (100, 8), (4090, 12), (disk_reader.REQUEST_BYTES, 1)]
        stretches += [(disk_reader.REQUEST_BYTES - 7, 4_000_000), (SIZE - 1, 1)]
        for _ in range(20):
            start = random.randrange(SIZE)
            stretches.append((start, random.randint(1, min(SIZE - start, 20_000))))
        for start, size in stretches:
            content = random.randbytes(size)
            expected[start : start + size] = content
            own.write(start, torch.frombuffer(bytearray(content), dtype=torch.uint8))
        into = torch.zeros(SIZE, dtype=torch.uint8)
        reader.read([FileExtent(own.path, 0, SIZE, 0)], into)
        assert into.numpy().tobytes() == bytes(expected)
    assert not list(tmp_path.iterdir())


def test_writes_are_direct_where_reads_are(tmp_path: Path) -> None:
    with opened(tmp_path) as (own, _):
        flags = Path(f"/proc/self/fdinfo/{own.handle[0]}").read_text()
    octal = int(next(line for line in flags.splitlines() if line.startswith("flags:"))[6:], 8)
    assert bool(octal & os.O_DIRECT) == own.handle[1]


def test_its_room_is_taken_when_it_is_made(tmp_path: Path) -> None:
    with opened(tmp_path) as (own, _):
        assert os.fstat(own.handle[0]).st_blocks * 512 >= SIZE


def test_both_ways_take_turns_on_a_drive_of_a_rate() -> None:
    """By arithmetic: requests of 1 and 2 s one after the other, at overlap 1.5 in 2 s."""
    turns, both = DriveClock(), DriveClock(1.5)
    assert [turns.reserve(0.0, 1.0), turns.reserve(0.0, 2.0)] == [1.0, 3.0]
    assert [both.reserve(0.0, 1.0), both.reserve(0.0, 2.0)] == [
        pytest.approx(2 / 3), pytest.approx(2.0),
    ]  # fmt: skip
    assert turns.reserve(10.0, 1.0) == 11.0  # a pause is not made up for
