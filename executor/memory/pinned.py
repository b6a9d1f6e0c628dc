"""The pinned host arena: anonymous mappings, populated by several threads, registered in pieces.

Pages are populated once: of a piece that the driver refuses, smaller ones are tried as they are.

torch's own pinned allocator rounds to powers of two; at hundreds of GiB that is not affordable.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from twinstream.executor.memory.arenas import Piece, PieceMemory
from twinstream.executor.memory.host_limits import HostMemoryError, check_host_memory, host_limits
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
_PROBED_LIMIT_BYTES = 2**30
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
    A virtual machine whose memory grows as it is used has less available than it will give; only
    without `heeds_available` does it.
    """

    cudart: Cudart
    cpus: Set[int] = frozenset()
    max_piece_bytes: int = MAX_PIECE_BYTES
    on_progress: Progress | None = None
    heeds_available: bool = True
    clear_error: Callable[[], None] = clear_cuda_error
    min_piece_bytes: int = _MIN_PIECE_BYTES


@contextlib.contextmanager
def pinned_arena(
    size_bytes: int, ranges: Sequence[HostRange], pinning: Pinning
) -> Iterator[PieceMemory]:
    """Host memory of exactly the size asked for, page-locked for the device while open.

    Whichever way the block is left, Ctrl-C and a failed registration included, every piece that
    the driver has locked is unlocked.

    Raises:
        AvailableMemoryError: the system says that less is available; the driver was not asked.
        HostMemoryError: memory or a limit is short, or the driver refuses a piece.
        NoBoundaryError: the ranges cannot be cut into pieces.
    """
    limits = host_limits()
    heeded = limits.memlock_bytes
    if heeded is not None and size_bytes > heeded and not _driver_heeds(heeded, pinning):
        limits = replace(limits, memlock_bytes=None)
    if not pinning.heeds_available:
        limits = replace(limits, available_bytes=None)
    check_host_memory(size_bytes, limits, pinned=True)
    ends = piece_ends(size_bytes, ranges, pinning.max_piece_bytes) if size_bytes else []
    locks = _Locks(pinning)
    try:
        pieces, start = [], 0
        for end in ends:
            pieces.append(Piece(start, _mapped(end - start)))
            start = end
        pieces = _Pinner(size_bytes, sorted(ranges), pinning, locks).pinned(pieces)
        yield PieceMemory(pieces)
    except BaseException:
        locks.release()  # a device that has failed refuses this too; what is raised says why
        raise
    kept = locks.release()
    assert not kept, f"the driver keeps {kept} pieces of the host arena locked"


class _Locks:
    """What the driver has locked, or may have when an interrupt came."""

    def __init__(self, pinning: Pinning) -> None:
        self._cudart = pinning.cudart
        self._clear_error = pinning.clear_error
        self._granted: list[int] = []
        self._in_flight: int | None = None

    def lock(self, flat: torch.Tensor) -> int:
        """Lock a mapping; the driver's error, 0 if there is none."""
        pointer = flat.data_ptr()
        # Noted first: an interrupt may come between the driver's work and the next line.
        self._in_flight = pointer
        error = int(self._cudart.cudaHostRegister(pointer, flat.numel(), 0))
        if error == 0:
            self._granted.append(pointer)
        self._in_flight = None
        if error:
            self._clear_error()
        return error

    def release(self) -> int:
        """Unlock everything; how many pieces the driver keeps nevertheless."""
        kept = refused = 0
        if self._in_flight is not None and self._in_flight not in self._granted:
            refused += int(self._cudart.cudaHostUnregister(self._in_flight)) != 0
        self._in_flight = None
        while self._granted:
            kept += int(self._cudart.cudaHostUnregister(self._granted.pop())) != 0
        if kept or refused:
            self._clear_error()
        return kept


def _mapped(size_bytes: int) -> torch.Tensor:
    """An untouched private mapping, in huge pages where the system gives them."""
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them; it is as good, only slower
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


class _Pinner:
    """Populates mappings and locks them, whole or, where the driver refuses, in smaller pieces."""

    def __init__(
        self, size_bytes: int, ranges: Sequence[HostRange], pinning: Pinning, locks: "_Locks"
    ) -> None:
        self._size_bytes, self._ranges = size_bytes, ranges
        self._pinning, self._locks = pinning, locks
        self._done = 0
        self._error = 0
        self._max_bytes = pinning.max_piece_bytes

    def pinned(self, mapped: Sequence[Piece]) -> list[Piece]:
        """The pieces as they were locked: those given, or parts of them."""
        found: list[Piece] = []
        for piece in mapped:
            with contextlib.closing(_populated(piece.bytes, self._pinning.cpus)) as populated:
                for num_bytes in populated:
                    self._advance(num_bytes)
            found += self._locked(piece)
        return found

    def _locked(self, piece: Piece) -> list[Piece]:
        """The piece in parts of at most what the driver has taken so far, halved as it refuses.

        Its pages are there and stay: only the call that locks them is made again.

        Raises:
            HostMemoryError: it refuses the smallest that can be cut too.
        """
        found: list[Piece] = []
        left = piece
        while left.bytes.numel():
            part, rest = self._cut(left)
            if error := self._locks.lock(part.bytes):
                self._error = error
                self._halve(part)
            else:
                found.append(part)
                left = rest
                self._advance(part.bytes.numel())
        return found

    def _cut(self, piece: Piece) -> tuple[Piece, Piece]:
        """The largest first part that may be locked by itself, and the rest."""
        size = piece.bytes.numel()
        ranges = [
            HostRange(r.start - piece.start, r.end - piece.start, r.slot)
            for r in self._ranges
            if piece.start <= r.start < piece.start + size
        ]
        try:
            end = piece_ends(size, ranges, self._max_bytes, mmap.PAGESIZE)[0]
        except NoBoundaryError:
            raise self._refused(piece) from None
        first = Piece(piece.start, piece.bytes[:end])
        return first, Piece(piece.start + end, piece.bytes[end:])

    def _halve(self, refused: Piece) -> None:
        half = refused.bytes.numel() // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        if half < self._pinning.min_piece_bytes:
            raise self._refused(refused)
        self._max_bytes = half

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._pinning.on_progress is not None:
            self._pinning.on_progress(self._done // 2, self._size_bytes)

    def _refused(self, piece: Piece) -> HostMemoryError:
        return HostMemoryError(
            f"the driver cannot pin {gib(piece.bytes.numel())} of {gib(self._size_bytes)} of host "
            f"memory in one piece, nor more (cudaHostRegister: error {self._error}, with "
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


def _driver_heeds(limit_bytes: int, pinning: Pinning) -> bool:
    """Whether RLIMIT_MEMLOCK binds the driver, which pins pages by its own means.

    Found out by pinning just more than a small limit; a large one is left to the real attempt.
    """
    if limit_bytes > _PROBED_LIMIT_BYTES:
        return False
    locks = _Locks(pinning)
    try:
        return locks.lock(_mapped(limit_bytes + mmap.PAGESIZE)) != 0
    finally:
        locks.release()


def _limits_now() -> str:
    limits = host_limits()
    named = {
        "RLIMIT_MEMLOCK": limits.memlock_bytes,
        "left in the cgroup": limits.cgroup_left_bytes,
        "available": limits.available_bytes,
    }
    known = [f"{what} {gib(value)}" for what, value in named.items() if value is not None]
    return "now " + ", ".join(known) if known else "the system states no limit"
