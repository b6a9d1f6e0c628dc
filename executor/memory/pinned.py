"""The pinned host arena: anonymous mappings, populated by several threads, registered in pieces.

Pages are populated once: of a piece that the driver refuses, smaller ones are tried as they are.

torch's own pinned allocator rounds to powers of two; at hundreds of GiB that is not affordable.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from twinstream.executor.memory.arenas import Piece, PieceMemory
from twinstream.executor.memory.host_limits import HostMemoryError, host_limits
from twinstream.executor.memory.pinned_pieces import (
    MAX_PIECE_BYTES,
    HostRange,
    NoBoundaryError,
    piece_ends,
)
from twinstream.executor.program.options import Progress
from twinstream.schedule.sizes import gib

_TOUCHED_AT_ONCE_BYTES = 2**28
_MAX_THREADS = 16
_MIN_PIECE_BYTES = 2**29  # 200 locks for 100 GiB; a driver that refuses so little has no more


class Cudart(Protocol):
    """What is used of `torch.cuda.cudart()`; 0 is success."""

    def cudaHostRegister(self, pointer: int, size_bytes: int, flags: int) -> Any:  # noqa: N802
        """Page-lock a range for the device."""

    def cudaHostUnregister(self, pointer: int) -> Any:  # noqa: N802
        """Undo it."""


def clear_cuda_error() -> None:
    """Take what a refused call left as the runtime's last error, which torch would raise later.

    torch has no call for that alone, but reads and clears it after every kernel it launches.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")


@dataclass(frozen=True)
class Pinning:
    """How to pin: the driver, CPUs near the GPU (empty: any), pieces, and who is told.

    What the driver refuses is tried again in halves, down to `min_piece_bytes`.
    `clear_error` is called whenever the driver has refused something.
    """

    cudart: Cudart
    cpus: Set[int] = frozenset()
    max_piece_bytes: int = MAX_PIECE_BYTES
    on_progress: Progress | None = None
    clear_error: Callable[[], None] = clear_cuda_error
    min_piece_bytes: int = _MIN_PIECE_BYTES


@contextlib.contextmanager
def pinned_arena(
    size_bytes: int, ranges: Sequence[HostRange], pinning: Pinning
) -> Iterator[PieceMemory]:
    """Host memory of exactly the size asked for, page-locked for the device while open.

    Whichever way the block is left, Ctrl-C and a failed registration included, every piece that
    the driver has locked is unlocked. That there is so much memory is the caller's to check.

    Raises:
        HostMemoryError: the driver refuses a piece.
        NoBoundaryError: the ranges cannot be cut into pieces.
    """
    ends = piece_ends(size_bytes, ranges, pinning.max_piece_bytes) if size_bytes else []
    pinner = _Pinner(size_bytes, sorted(ranges), pinning)
    try:
        starts = [0, *ends[:-1]]
        pieces = [Piece(a, _mapped(b - a)) for a, b in zip(starts, ends, strict=False)]
        yield PieceMemory(pinner.pinned(pieces))
    except BaseException:
        pinner.release()  # a device that has failed refuses this too; what is raised says why
        raise
    kept = pinner.release()
    assert not kept, f"the driver keeps {kept} pieces of the host arena locked"


def _mapped(size_bytes: int) -> torch.Tensor:
    """An untouched private mapping, in huge pages where the system gives them."""
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them; it is as good, only slower
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


class _Pinner:
    """Populates mappings and locks them, whole or, where the driver refuses, in smaller pieces."""

    def __init__(self, size_bytes: int, ranges: Sequence[HostRange], pinning: Pinning) -> None:
        self._size_bytes, self._ranges, self._pinning = size_bytes, ranges, pinning
        self._done = 0
        self._max_bytes = pinning.max_piece_bytes
        self._locked: list[int] = []

    def pinned(self, mapped: Sequence[Piece]) -> list[Piece]:
        """The pieces as they were locked: those given, or parts of them."""
        found: list[Piece] = []
        for piece in mapped:
            with contextlib.closing(_populated(piece.bytes, self._pinning.cpus)) as populated:
                for num_bytes in populated:
                    self._advance(num_bytes)
            found += self._lock_all(piece)
        return found

    def release(self) -> int:
        """Unlock everything; how many pieces the driver keeps nevertheless."""
        kept = 0
        while self._locked:
            kept += int(self._pinning.cudart.cudaHostUnregister(self._locked.pop())) != 0
        if kept:
            self._pinning.clear_error()
        return kept

    def _lock_all(self, piece: Piece) -> list[Piece]:
        """The piece in parts of at most what the driver has taken so far, halved as it refuses.

        Its pages are there and stay: only the call that locks them is made again.

        Raises:
            HostMemoryError: it refuses the smallest that can be cut too.
        """
        found: list[Piece] = []
        left, error = piece, 0
        while left.bytes.numel():
            try:
                end = self._end_of_part(left)
            except NoBoundaryError:
                raise self._refused(left, error) from None
            part = Piece(left.start, left.bytes[:end])
            if refused := self._lock(part.bytes):
                error = refused
                half = end // 2 // mmap.PAGESIZE * mmap.PAGESIZE
                if half < self._pinning.min_piece_bytes:
                    raise self._refused(part, error)
                self._max_bytes = half
                continue
            found.append(part)
            left = Piece(left.start + end, left.bytes[end:])
            self._advance(end)
        return found

    def _lock(self, flat: torch.Tensor) -> int:
        """Lock a mapping; the driver's error, 0 if there is none."""
        # Noted first: an interrupt may come between the driver's work and the next line.
        self._locked.append(flat.data_ptr())
        error = int(self._pinning.cudart.cudaHostRegister(flat.data_ptr(), flat.numel(), 0))
        if error:
            self._locked.pop()
            self._pinning.clear_error()
        return error

    def _end_of_part(self, piece: Piece) -> int:
        """Where the largest first part ends that may be locked by itself."""
        size = piece.bytes.numel()
        ranges = [
            HostRange(r.start - piece.start, r.end - piece.start, r.slot)
            for r in self._ranges
            if piece.start <= r.start < piece.start + size
        ]
        return piece_ends(size, ranges, self._max_bytes, mmap.PAGESIZE)[0]

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._pinning.on_progress is not None:
            self._pinning.on_progress(self._done // 2, self._size_bytes)

    def _refused(self, piece: Piece, error: int) -> HostMemoryError:
        return HostMemoryError(
            f"the driver cannot pin {gib(piece.bytes.numel())} of {gib(self._size_bytes)} of host "
            f"memory in one piece, nor more (cudaHostRegister: error {error}, with "
            f"{gib(piece.start)} pinned before it); {_limits_now()}. Raise `ulimit -l`, free "
            "memory, or plan with a smaller --host-mem."
        )


def _populated(flat: torch.Tensor, cpus: Set[int]) -> Generator[int]:
    """Touch every page once, from several threads; yields bytes as they are there."""
    allowed = os.sched_getaffinity(0)
    near = (allowed & cpus) or allowed

    whole = flat.numpy()  # torch would use threads of its own in each of ours

    def begin() -> None:
        os.sched_setaffinity(0, near)  # of this thread alone

    def touch(start: int) -> int:
        part = whole[start : start + _TOUCHED_AT_ONCE_BYTES]
        part[:: mmap.PAGESIZE] = 0
        return len(part)

    threads = min(_MAX_THREADS, len(near))
    with ThreadPoolExecutor(threads, "twinstream-touch", begin) as pool:
        parts = [pool.submit(touch, i) for i in range(0, flat.numel(), _TOUCHED_AT_ONCE_BYTES)]
        try:
            for part in as_completed(parts):
                yield part.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _limits_now() -> str:
    limits = host_limits()
    named = {
        "RLIMIT_MEMLOCK": limits.memlock_bytes,
        "left in the cgroup": limits.cgroup_left_bytes,
        "available": limits.available_bytes,
    }
    known = [f"{what} {gib(value)}" for what, value in named.items() if value is not None]
    return "now " + ", ".join(known) if known else "the system states no limit"
