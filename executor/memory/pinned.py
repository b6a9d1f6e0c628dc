"""The pinned host arena: anonymous mappings, populated by several threads, registered in pieces.

torch's own pinned allocator rounds to powers of two; at hundreds of GiB that is not affordable.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from twinstream.executor.memory.arenas import Piece, PieceMemory
from twinstream.executor.memory.host_limits import HostMemoryError, host_limits
from twinstream.executor.memory.pinned_pieces import (
    MAX_PIECE_BYTES,
    HostRange,
    piece_ends,
)
from twinstream.executor.program.options import Progress
from twinstream.schedule.sizes import gib

_TOUCHED_AT_ONCE_BYTES = 2**28
_MAX_THREADS = 16


class Cudart(Protocol):
    """The part of `torch.cuda.cudart()` that is used; 0 is success."""

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
    """How memory is pinned: driver, CPUs near the GPU (empty: any), pieces, who is notified.

    `clear_error` is called whenever the driver has refused something.
    """

    cudart: Cudart
    cpus: Set[int] = frozenset()
    max_piece_bytes: int = MAX_PIECE_BYTES
    on_progress: Progress | None = None
    clear_error: Callable[[], None] = clear_cuda_error


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
    locked: list[int] = []
    try:
        yield PieceMemory(_pinned(ends, pinning, locked))
    except BaseException:
        _release(locked, pinning)  # a failed device refuses this too; what is raised says why
        raise
    kept = _release(locked, pinning)
    assert not kept, f"the driver keeps {kept} pieces of the host arena locked"


def _pinned(ends: Sequence[int], pinning: Pinning, locked: list[int]) -> list[Piece]:
    """Pieces that end there, populated and locked; `locked` has the address of each."""
    pieces = [Piece(start, _mapped(end - start)) for start, end in pairwise((0, *ends))]
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if pinning.on_progress is not None:
            pinning.on_progress(done // 2, ends[-1])

    for piece in pieces:
        size_bytes = piece.bytes.numel()
        with contextlib.closing(_populated(piece.bytes, pinning.cpus)) as populated:
            for num_bytes in populated:
                advance(num_bytes)
        # Noted first: an interrupt may come between the driver's work and the next line.
        locked.append(piece.bytes.data_ptr())
        if error := int(pinning.cudart.cudaHostRegister(locked[-1], size_bytes, 0)):
            locked.pop()
            pinning.clear_error()
            raise HostMemoryError(
                f"the driver cannot pin {gib(size_bytes)} of {gib(ends[-1])} of host memory "
                f"(cudaHostRegister: error {error}, with {gib(piece.start)} pinned before it); "
                f"{_limits_now()}. Raise `ulimit -l`, free memory, or plan with a smaller "
                "--host-mem."
            )
        advance(size_bytes)
    return pieces


def _release(locked: list[int], pinning: Pinning) -> int:
    """Unlock everything; how many pieces the driver keeps nevertheless."""
    kept = 0
    while locked:
        kept += int(pinning.cudart.cudaHostUnregister(locked.pop())) != 0
    if kept:
        pinning.clear_error()
    return kept


def _mapped(size_bytes: int) -> torch.Tensor:
    """An untouched private mapping, in huge pages where the system gives them."""
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them; it is as good, only slower
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


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
