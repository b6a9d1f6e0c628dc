"""Measure a drive as runs use it, by size: direct, aligned, several in flight, both ways."""

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path
from statistics import median

import numpy as np
import torch

from twinstream.executor.probe.timing.fit import fit_line
from twinstream.executor.weights.disk_reader import (
    BLOCK_BYTES,
    DiskFiles,
    DiskReader,
    DriveClock,
    FileExtent,
)
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.state_file import StateFile
from twinstream.hardware_profiles.overrides import changed
from twinstream.hardware_profiles.schema import Machine

SIZES = (2**20, 2**22, 2**24, 2**26)
_REPEATS = 5
_OWN_BYTES = 2**28  # of a file that is written
_MOST_FILES = 10_000  # that are looked at


@dataclass(frozen=True)
class DriveTimes:
    """What a drive takes, one way at a time: by size in bytes the median time in ns, and a line
    through that."""

    times_ns: dict[int, float]
    latency_ns: float
    bytes_per_s: float

    @staticmethod
    def of(times_ns: dict[int, float]) -> "DriveTimes":
        """Fit the line."""
        line = fit_line(list(times_ns), list(times_ns.values()))
        return DriveTimes(times_ns, max(0.0, line.fixed_ns), 1e9 / line.ns_per_unit)


@dataclass(frozen=True)
class ProbedDrive:
    """A drive's reads; its writes, and how much of both is reached at once, where a file could be
    written there."""

    place: Path
    reads: DriveTimes
    writes: DriveTimes | None = None
    overlap: float = 1.0

    def on(self, machine: Machine) -> Machine:
        """Return the machine with this drive."""
        source = f"measured {datetime.now(UTC).date().isoformat()} in {self.place}"
        values = {
            "disk_read_bytes_per_s": self.reads.bytes_per_s,
            "disk_latency_ns": self.reads.latency_ns,
        }
        if self.writes is not None:
            values |= {
                "disk_write_bytes_per_s": self.writes.bytes_per_s, "disk_overlap": self.overlap,
            }  # fmt: skip
        document = {
            name: {"value": value, "kind": "measured", "source": source}
            for name, value in values.items()
        }
        return changed(Machine, document, machine, source)


def probed_drive(place: Path) -> ProbedDrive:
    """Measure the drive of a folder: reads by its largest file, writes by one of 256 MiB that is
    gone afterwards, which is read, too, where no other is large enough; of a file's path its reads.

    Raises:
        WeightsError: nothing can be read there, or no file is large enough and none written.
    """
    largest = place if place.is_file() else _largest(place)
    is_enough = largest is not None and largest.stat().st_size >= SIZES[-1]
    if place.is_file():
        if not is_enough:
            raise WeightsError(
                place, f"is too small to measure by: it needs {SIZES[-1]} bytes at least"
            )
        return ProbedDrive(place, _reads_of(place))
    try:
        own = StateFile(DiskFiles({}, inf, place=place), [(0, _OWN_BYTES)], DriveClock())
    except WeightsError:
        if largest is None or not is_enough:
            raise
        return ProbedDrive(place, _reads_of(largest))
    content = torch.from_numpy(np.random.default_rng(0).integers(0, 255, _OWN_BYTES, np.uint8))
    with closing(own), closing(_reader({own.path: own.handle})) as reader:
        own.write(0, content)  # what was never written is quicker, or slower

        def write(start: int, size: int) -> None:
            own.write(start, content[:size])

        def read(start: int, size: int) -> None:
            reader.read([FileExtent(own.path, start, size, 0)], content[:size])

        writes = DriveTimes.of(_times(write, _OWN_BYTES))
        if largest is not None and is_enough:
            reads = _reads_of(largest)
        else:
            reads = DriveTimes.of(_times(read, _OWN_BYTES))
        return ProbedDrive(place, reads, writes, _overlap(own, reader, content))


def _overlap(own: StateFile, reader: DiskReader, content: torch.Tensor) -> float:
    """How much of what both ways reach alone is reached while both are under way."""
    half = _OWN_BYTES // 2
    taken_s: dict[bool, float] = {}

    def timed(*, writes: bool) -> None:
        begun_s = time.perf_counter()
        if writes:
            own.write(half, content[half:])
        else:
            reader.read([FileExtent(own.path, 0, half, 0)], content[:half])
        taken_s[writes] = time.perf_counter() - begun_s

    for writes in (True, False):
        timed(writes=writes)
    alone_s = sum(taken_s.values())
    thread = threading.Thread(target=partial(timed, writes=True))
    begun_s = time.perf_counter()
    thread.start()
    timed(writes=False)
    thread.join()
    return min(2.0, max(1.0, alone_s / (time.perf_counter() - begun_s)))


def _reads_of(path: Path) -> DriveTimes:
    """Of a file that is there."""
    end = path.stat().st_size
    into = torch.empty(SIZES[-1], dtype=torch.uint8)
    into.fill_(0)  # so that its pages are there
    files = DiskFiles({"": (FileExtent(path, 0, end, 0),)}, inf)
    with closing(DiskReader(files)) as reader:

        def read(start: int, size: int) -> None:
            reader.read([FileExtent(path, start, size, 0)], into[:size])

        return DriveTimes.of(_times(read, end))


def _reader(own: dict[Path, tuple[int, bool]]) -> DiskReader:
    return DiskReader(DiskFiles({}, inf), own)


def _times(move: Callable[[int, int], None], end: int) -> dict[int, float]:
    """By size: the median time of moving so many bytes of a file that ends there, in ns."""
    chosen, found = random.Random(0), dict[int, float]()
    for size in SIZES:
        taken = []
        for _ in range(_REPEATS):
            start = chosen.randrange(0, end - size + 1) // BLOCK_BYTES * BLOCK_BYTES
            before_ns = time.perf_counter_ns()
            move(start, size)
            taken.append(time.perf_counter_ns() - before_ns)
        found[size] = median(taken)
    return found


def _largest(folder: Path) -> Path | None:
    found: tuple[int, Path] | None = None
    for number, (parent, _, names) in enumerate(os.walk(folder)):
        for name in names:
            path = Path(parent, name)
            if path.is_file() and (found is None or path.stat().st_size > found[0]):
                found = path.stat().st_size, path
        if number > _MOST_FILES:
            break
    return None if found is None else found[1]
