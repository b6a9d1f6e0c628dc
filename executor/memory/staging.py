"""State on its way between ordinary host memory and the device: through two pinned pieces.

A copy from or to pageable memory holds the host up, tensor by tensor, at a fraction of the link's
rate. Here one piece is filled or emptied while the other travels.
"""

from collections.abc import Iterator
from itertools import cycle

import torch

PIECE_BYTES = 2**25


class Staging:
    """Copies flat tensors (1-D uint8) on the current stream, which must not change meanwhile."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._pieces: Iterator[_Piece] | None = None  # made when a device is first met

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """The source may be changed afterwards; on the host the destination is complete.

        What goes to the device is complete once the stream has come so far.
        """
        if destination.is_cuda and not source.is_cuda:
            self.to_device(destination, source)
        elif source.is_cuda and not destination.is_cuda:
            self.to_host(destination, source)
        else:
            destination.copy_(source)

    def to_device(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        for start, end in self._parts(source):
            piece = self._next()
            pinned = piece.bytes[: end - start]
            pinned.copy_(source[start:end])
            destination[start:end].copy_(pinned, non_blocking=True)
            piece.travels.record()

    def to_host(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        parts: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]] = []
        for start, end in self._parts(source):
            piece = self._next()
            pinned = piece.bytes[: end - start]
            pinned.copy_(source[start:end], non_blocking=True)
            piece.travels.record()
            parts.append((destination[start:end], pinned, piece.travels))
            if len(parts) > 1:
                _land(*parts.pop(0))
        for part in parts:
            _land(*part)

    def _parts(self, flat: torch.Tensor) -> Iterator[tuple[int, int]]:
        size = flat.numel()
        for start in range(0, size, self._piece_bytes):
            yield start, min(size, start + self._piece_bytes)

    def _next(self) -> "_Piece":
        """The piece that was used before the last one; its journey is over."""
        if self._pieces is None:
            self._pieces = cycle([_Piece(self._piece_bytes) for _ in range(2)])
        piece = next(self._pieces)
        piece.travels.synchronize()
        return piece


class _Piece:
    def __init__(self, size_bytes: int) -> None:
        self.bytes = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        self.travels = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _land(destination: torch.Tensor, pinned: torch.Tensor, travels: torch.cuda.Event) -> None:
    travels.synchronize()
    destination.copy_(pinned)
