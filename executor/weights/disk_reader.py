"""Direct reads of files: aligned, several in flight, past the page cache where that can be.

What is asked for begins and ends anywhere; blocks around it are read into aligned buffers, one for
each thread, and copied from there. A file that has another stamp than when a run began is refused.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from twinstream.executor.weights.errors import WeightsError
from twinstream.schedule.files import reason_of, stamp_of
from twinstream.schedule.sizes import brief

BLOCK_BYTES = 4096  # of every drive; some have smaller ones
REQUEST_BYTES = 2**22
THREADS = 4  # requests in flight
_SLOW = 0.7  # of the rate that a plan counts with
_ENOUGH_S = 2.0  # of reading, before that is said
_OVERSLEPT_S = 0.05  # by a thread that keeps to a rate, at the most

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class FileExtent:
    """Bytes of a tensor, from `at_bytes` on, that a file has from `start_bytes` on."""

    path: Path
    start_bytes: int
    size_bytes: int
    at_bytes: int

    def within(self, low: int, high: int) -> "FileExtent | None":
        """Return the part of it between two bytes of the tensor, counted from the first of these;
        None where there is none."""
        first, end = max(low, self.at_bytes), min(high, self.at_bytes + self.size_bytes)
        if first >= end:
            return None
        start = self.start_bytes + first - self.at_bytes
        return FileExtent(self.path, start, end - first, first - low)


def _say_nothing(line: str) -> None:
    """A default that can be sent to another process."""


@dataclass(frozen=True)
class DiskFiles:
    """The files of tensors that are at home on a disk, with their stamps when this was made.

    Attributes:
        extents: by tensor; what lies between them is zero.
        expected_bytes_per_s: the rate that a plan counts with.
        limited: whether a drive of the rates that a plan counts with is to be kept to.
        tell: takes a line where reads are not direct, or slow.
        place: the folder for a file of what a run itself keeps on the disk; None of what is only
            read.
        written_bytes_per_s: the rate of writes that a plan counts with.
        overlap: of what reads and writes reach alone, how much they do together, 1 to 2.
    """

    extents: dict[str, tuple[FileExtent, ...]]
    expected_bytes_per_s: float
    limited: bool = False
    tell: Callable[[str], None] = _say_nothing
    stamps: dict[Path, list[int]] = field(default_factory=dict)
    place: Path | None = None
    written_bytes_per_s: float = float("inf")
    overlap: float = 1.0

    def __post_init__(self) -> None:
        for path in sorted({one.path for found in self.extents.values() for one in found}):
            if path not in self.stamps:
                self.stamps[path] = stamp_of(path)


class DriveClock:
    """When a drive of limited rates is through with what was asked of it, both ways."""

    def __init__(self, overlap: float = 1.0) -> None:
        self._overlap, self._free_s = overlap, 0.0
        self._lock = threading.Lock()

    def reserve(self, from_s: float, alone_s: float) -> float:
        """Return when it is through with one more request, of so many seconds alone."""
        with self._lock:
            self._free_s = max(from_s, self._free_s) + alone_s / self._overlap
            return self._free_s


class DrivePace:
    """One way of a drive: keeps to its rate if that is limited, and says if the drive is slower.

    Attributes:
        num_bytes, busy_s: so far, and how long that took.
    """

    def __init__(self, verb: str, rate: float, files: DiskFiles, drive: DriveClock) -> None:
        self.num_bytes, self.busy_s = 0, 0.0
        self._verb, self._rate, self._files, self._drive = verb, rate, files, drive
        self._free_s = 0.0
        self._told = False

    def keep(self, begun_s: float, num_bytes: int) -> None:
        """Note what was done since a time, by `time.perf_counter`."""
        left = num_bytes if self._files.limited else 0
        while left:  # request by request, so that both ways take turns
            now = min(left, REQUEST_BYTES)
            # a sleep that was too long is made up for, a pause between requests is not
            since_s = begun_s - _OVERSLEPT_S
            self._free_s = max(since_s, self._free_s) + now / self._rate
            free_s = max(self._free_s, self._drive.reserve(since_s, now / self._rate))
            time.sleep(max(0.0, free_s - time.perf_counter()))
            left -= now
        self.num_bytes += num_bytes
        self.busy_s += time.perf_counter() - begun_s
        measured = self.num_bytes / max(self.busy_s, 1e-9)
        # while both ways are under way each is slower than alone, and a plan knows
        usual = self._rate * (0.5 if self._files.place is not None else 1.0)
        if self.busy_s > _ENOUGH_S and measured < _SLOW * usual and not self._told:
            self._told = True
            self._files.tell(
                f"note: the drive {self._verb} {brief(round(measured))} a second, and the plan "
                f"counts with {brief(round(self._rate))}: steps wait for the disk. `twinstream "
                "probe --disk PATH` measures it anew"
            )


class DiskReader:
    """Reads extents of files; one caller at a time, which waits until all is there.

    Args:
        own: by path, a handle of a file that may change, and whether its reads are direct.
        drive: that others use, too.
    """

    def __init__(
        self,
        files: DiskFiles,
        own: Mapping[Path, tuple[int, bool]] | None = None,
        drive: DriveClock | None = None,
    ) -> None:
        self._files, self._own = files, dict(own or {})
        self.pace = DrivePace("reads", files.expected_bytes_per_s, files, drive or DriveClock())
        self._handles: dict[Path, tuple[int, bool]] = {}
        self._buffers = threading.local()
        self._told: set[str] = set()
        self._pool = ThreadPoolExecutor(THREADS, "twinstream-disk")

    def close(self) -> None:
        """Close all files; nothing is being read."""
        self._pool.shutdown(cancel_futures=True)
        for handle, _ in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def read(self, extents: Sequence[FileExtent], destination: torch.Tensor) -> None:
        """Fill a destination, 1-D uint8 on the host; what no extent covers is zeroed.

        Args:
            extents: by where they belong in the destination, in order.

        Raises:
            WeightsError: a file cannot be read, ends too early, or has changed.
        """
        begun_s = time.perf_counter()
        into, end = destination.numpy(), 0
        for path in dict.fromkeys(one.path for one in extents):
            self._open(path)
        for one in extents:
            into[end : one.at_bytes] = 0
            end = one.at_bytes + one.size_bytes
        into[end:] = 0
        parts = [part for one in extents for part in requests(one)]
        for done in [self._pool.submit(self._request, part, into) for part in parts]:
            done.result()
        for path in dict.fromkeys(one.path for one in extents):
            self._require_same(path)
        self.pace.keep(begun_s, sum(one.size_bytes for one in extents))

    def _open(self, path: Path) -> tuple[int, bool]:
        """Return a handle, and whether its reads are direct."""
        if path in self._own:
            return self._own[path]
        if path not in self._handles:
            self._require_same(path)
            try:
                self._handles[path] = self._opened(path)
            except OSError as error:
                raise _cannot_read(path, error) from None
        return self._handles[path]

    def _opened(self, path: Path) -> tuple[int, bool]:
        if hasattr(os, "O_DIRECT"):
            with suppress(OSError):
                handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
                try:
                    os.preadv(handle, [mmap.mmap(-1, BLOCK_BYTES)], 0)
                except OSError:  # opened so, but not read so
                    os.close(handle)
                    raise
                return handle, True
        self._say(
            f"{path.parent} is on a file system without direct reads: files are read through the "
            "page cache, and dropped from it"
        )
        handle = os.open(path, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        return handle, False

    def _request(self, part: FileExtent, into: Bytes) -> None:
        """Read one part, in the thread of the pool that is called."""
        handle, is_direct = self._open(part.path)
        low = part.start_bytes // BLOCK_BYTES * BLOCK_BYTES
        end = part.start_bytes + part.size_bytes
        wanted = -(-end // BLOCK_BYTES) * BLOCK_BYTES - low
        buffer, got = self._buffer(), 0
        try:
            while low + got < end:
                count = os.preadv(handle, [buffer[got:wanted]], low + got)
                if not count:
                    break
                got += count
                if got % BLOCK_BYTES:  # only the end of a file comes in part
                    break
            if not is_direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, low, wanted, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise _cannot_read(part.path, error) from None
        if low + got < end:
            self._require_same(part.path)
            raise WeightsError(
                part.path,
                f"ends at byte {low + got}, and bytes to {end} were to be read: the run has "
                "stopped, and its checkpoints are as they were; put the file back",
            )
        first = part.start_bytes - low
        np.copyto(
            into[part.at_bytes : part.at_bytes + part.size_bytes],
            np.frombuffer(buffer, np.uint8, part.size_bytes, first),
        )

    def _buffer(self) -> memoryview:
        """Return this thread's, which begins at a page."""
        if not hasattr(self._buffers, "mine"):
            self._buffers.mine = aligned_buffer()
        found: memoryview = self._buffers.mine
        return found

    def _require_same(self, path: Path) -> None:
        if path in self._own:
            return
        try:
            now = stamp_of(path)
        except OSError as error:
            raise _cannot_read(path, error) from None
        if now != self._files.stamps[path]:
            raise WeightsError(
                path,
                "has changed since the run began, which reads frozen weights from it: the run has "
                "stopped, and its checkpoints are as they were. Put it back, and go on from the "
                "last one",
            )

    def _say(self, line: str, key: str = "cached") -> None:
        """Say a thing once."""
        if key not in self._told:
            self._told.add(key)
            self._files.tell(f"note: {line}")


def aligned_buffer() -> memoryview:
    """Return bytes for a request, wherever in a block it begins, that begin at a page."""
    return memoryview(mmap.mmap(-1, REQUEST_BYTES + BLOCK_BYTES))


def requests(extent: FileExtent) -> Iterator[FileExtent]:
    """Parts of an extent that are each one request; all but the first begin at a block."""
    start, end, at = extent.start_bytes, extent.start_bytes + extent.size_bytes, extent.at_bytes
    while start < end:
        stop = min(end, (start + REQUEST_BYTES) // BLOCK_BYTES * BLOCK_BYTES)
        yield FileExtent(extent.path, start, stop - start, at)
        at += stop - start
        start = stop


def _cannot_read(path: Path, error: OSError) -> WeightsError:
    return WeightsError(
        path,
        f"cannot be read: {reason_of(error)}. The run has stopped, and its checkpoints are as they "
        "were",
    )
