"""A run's own file on a drive: what of its state has no room in memory is written there and read.

The file has no name, so that it is gone when the process is, however that ends; all of its room is
taken when it is made. Writes are direct and aligned: bytes around an unaligned end are read first.
"""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from twinstream.executor.weights.disk_reader import (
    BLOCK_BYTES,
    THREADS,
    DiskFiles,
    DriveClock,
    DrivePace,
    FileExtent,
    aligned_buffer,
    requests,
)
from twinstream.executor.weights.durable_files import free_bytes
from twinstream.executor.weights.errors import WeightsError
from twinstream.schedule.files import reason_of
from twinstream.schedule.sizes import brief

_NAME = "twinstream-state-"  # of a file that is about to lose it; empty where a kill came between


class StateFile:
    """Takes the room of some ranges of bytes in a folder; one caller writes at a time.

    Args:
        ranges: first byte, and the one past the last.

    Attributes:
        path: what errors call it.
        handle: of the file, and whether reads and writes of it are direct.

    Raises:
        WeightsError: it cannot be made, or there is too little room; nothing is left of it.
    """

    def __init__(
        self, files: DiskFiles, ranges: Sequence[tuple[int, int]], drive: DriveClock
    ) -> None:
        assert files.place is not None, "the user names a place"
        self.path = files.place / _NAME
        self._buffers = threading.local()
        self.pace = DrivePace("writes", files.written_bytes_per_s, files, drive)
        for path in files.place.glob(f"{_NAME}*"):
            with contextlib.suppress(OSError):
                if path.stat().st_size == 0:
                    path.unlink()
        size = sum(end - start for start, end in ranges)
        try:
            self.handle = _opened(files.place)
            try:
                for start, end in ranges:
                    os.posix_fallocate(self.handle[0], start, end - start)
            except OSError:
                os.close(self.handle[0])
                raise
        except OSError as error:
            free = free_bytes(files.place)
            raise WeightsError(
                files.place,
                f"has no room for a file of {brief(size)} that the plan keeps there: "
                f"{reason_of(error)}"
                + ("" if free is None else f"; {brief(free)} are free")
                + ". Make room, name another drive (--disk), or allow more host memory",
            ) from None
        self._pool = ThreadPoolExecutor(THREADS, "twinstream-state")

    def write(self, start: int, source: torch.Tensor) -> None:
        """Write a source, 1-D uint8 on the host, from a byte on, and wait until that is done.

        Raises:
            WeightsError: it cannot be written.
        """
        begun_s, content = time.perf_counter(), source.numpy()
        parts = requests(FileExtent(self.path, start, content.size, 0))
        for done in [self._pool.submit(self._request, part, content) for part in parts]:
            done.result()
        self.pace.keep(begun_s, content.size)

    def close(self) -> None:
        """Give its room back; nothing is being written."""
        self._pool.shutdown(cancel_futures=True)
        os.close(self.handle[0])

    def _request(self, part: FileExtent, content: NDArray[np.uint8]) -> None:
        """Write one part, in the thread of the pool that is called."""
        if not hasattr(self._buffers, "mine"):
            self._buffers.mine = aligned_buffer()
        buffer: memoryview = self._buffers.mine
        low = part.start_bytes // BLOCK_BYTES * BLOCK_BYTES
        end = part.start_bytes + part.size_bytes
        high = -(-end // BLOCK_BYTES) * BLOCK_BYTES
        first, size = part.start_bytes - low, high - low
        try:
            if first:
                os.preadv(self.handle[0], [buffer[:BLOCK_BYTES]], low)
            if end < high and (not first or size > BLOCK_BYTES):
                os.preadv(self.handle[0], [buffer[size - BLOCK_BYTES : size]], high - BLOCK_BYTES)
            mine = content[part.at_bytes : part.at_bytes + part.size_bytes]
            np.copyto(np.frombuffer(buffer, np.uint8, part.size_bytes, first), mine)
            done = 0
            while done < size:
                done += os.pwritev(self.handle[0], [buffer[done:size]], low + done)
            if not self.handle[1] and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.handle[0], low, size, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise WeightsError(
                self.path,
                f"cannot be written: {reason_of(error)}. The run has stopped, and its checkpoints "
                "are as they were: go on from the last one",
            ) from None


def _opened(folder: Path) -> tuple[int, bool]:
    """A handle of a new file without a name, and whether it is direct."""
    handle, name = tempfile.mkstemp(prefix=_NAME, dir=folder)
    Path(name).unlink(missing_ok=True)
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            direct = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_DIRECT)
            try:
                os.pwritev(direct, [aligned_buffer()[:BLOCK_BYTES]], 0)
            except OSError:  # opened so, but not written so
                os.close(direct)
                raise
            os.close(handle)
            return direct, True
    return handle, False
