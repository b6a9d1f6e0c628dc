"""Measure reads of a drive as runs read it: direct, aligned, several in flight, by size."""

import os
import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
import torch

from twinstream.executor.probe.timing.fit import fit_line
from twinstream.executor.weights.disk_reader import DiskFiles, DiskReader, FileExtent
from twinstream.executor.weights.durable_files import free_bytes, write_file
from twinstream.executor.weights.errors import WeightsError
from twinstream.hardware_profiles.overrides import changed
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.files import neighbour

SIZES = (2**20, 2**22, 2**24, 2**26)
_REPEATS = 5
_OWN_BYTES = 2**28  # of a file that is written where none is large enough
_MOST_FILES = 10_000  # that are looked at


@dataclass(frozen=True)
class DriveReads:
    """What reads of a drive take: by size in bytes the median time in ns, and a line through that.

    `written_bytes_per_s` is of the file that was written for it, synced; None without one.
    """

    place: Path
    times_ns: dict[int, float]
    latency_ns: float
    bytes_per_s: float
    written_bytes_per_s: float | None = None

    def on(self, machine: Machine) -> Machine:
        """Return the machine with this drive."""
        source = f"read {datetime.now(UTC).date().isoformat()} in {self.place}"
        number = {"kind": "measured", "source": source}
        document = {
            "disk_read_bytes_per_s": {"value": self.bytes_per_s, **number},
            "disk_latency_ns": {"value": self.latency_ns, **number},
        }
        return changed(Machine, document, machine, source)


def probed_drive(place: Path) -> DriveReads:
    """Measure a drive by the largest file of a folder, or one of 256 MiB that is written there and
    removed; of a file's path by that file.

    Raises:
        WeightsError: nothing can be read or written there.
    """
    largest = place if place.is_file() else _largest(place)
    if largest is not None and largest.stat().st_size >= SIZES[-1]:
        return _reads(largest, place)
    if place.is_file():
        raise WeightsError(
            place, f"is too small to measure by: it needs {SIZES[-1]} bytes at least"
        )
    with _own_file(place) as (path, rate):
        return _reads(path, place, rate)


def _reads(path: Path, place: Path, written_bytes_per_s: float | None = None) -> DriveReads:
    end, chosen = path.stat().st_size, random.Random(0)
    times_ns: dict[int, float] = {}
    into = torch.empty(SIZES[-1], dtype=torch.uint8)
    into.fill_(0)  # so that its pages are there
    with closing(
        DiskReader(DiskFiles({"": (FileExtent(path, 0, end, 0),)}, float("inf")))
    ) as reader:
        for size in SIZES:
            taken = []
            for _ in range(_REPEATS):
                start = chosen.randrange(0, end - size + 1)
                before_ns = time.perf_counter_ns()
                reader.read([FileExtent(path, start, size, 0)], into[:size])
                taken.append(time.perf_counter_ns() - before_ns)
            times_ns[size] = median(taken)
    line = fit_line(list(times_ns), list(times_ns.values()))
    rate = 1e9 / line.ns_per_unit
    return DriveReads(place, times_ns, max(0.0, line.fixed_ns), rate, written_bytes_per_s)


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


@contextmanager
def _own_file(folder: Path) -> Iterator[tuple[Path, float]]:
    """A file of random bytes on the drive, and the rate at which it was written."""
    free = free_bytes(folder)
    path = neighbour(folder / "twinstream-probe", "tmp")
    if free is not None and free < 2 * _OWN_BYTES:
        raise WeightsError(
            path, f"is not written: {free} bytes are free, of {2 * _OWN_BYTES} it takes"
        )
    content = np.random.default_rng(0).bytes(_OWN_BYTES)
    try:
        begun_s = time.perf_counter()
        write_file(path, content)
        taken_s = time.perf_counter() - begun_s
        yield path, _OWN_BYTES / taken_s
    finally:
        path.unlink(missing_ok=True)
