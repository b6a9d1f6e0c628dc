"""Temporaries of a kernel, bump-allocated from its scratch operand."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch

from twinstream.models.layout import ALIGNMENT_BYTES
from twinstream.schedule.errors import TwinstreamError


class WorkspaceExhaustedError(TwinstreamError):
    """A kernel takes more scratch than its operand has."""


class Workspace:
    """Hands out 256-byte aligned tensors with undefined content.

    What is taken inside a `frame` is given back at its end.
    """

    def __init__(self, scratch: torch.Tensor) -> None:
        self._scratch = scratch
        self._used_bytes = 0
        self.high_water_bytes = 0

    @property
    def device(self) -> torch.device:
        return self._scratch.device

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size_bytes = prod(shape) * dtype.itemsize
        start = self._used_bytes
        end = start - (-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if end > self._scratch.numel():
            raise WorkspaceExhaustedError(
                f"the kernel needs {end} bytes of scratch, its operand has {self._scratch.numel()}"
            )
        self._used_bytes = end
        self.high_water_bytes = max(self.high_water_bytes, end)
        return self._scratch[start : start + size_bytes].view(dtype).view(shape)

    def remaining(self) -> "Workspace":
        """Return the scratch that is not taken now, for a call that runs later, again and again."""
        rest = Workspace(self._scratch)
        rest._used_bytes = self._used_bytes
        return rest

    @contextmanager
    def frame(self) -> Iterator[None]:
        start = self._used_bytes
        try:
            yield
        finally:
            self._used_bytes = start
