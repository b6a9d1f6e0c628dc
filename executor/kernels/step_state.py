"""The small tensor that tells kernels of the step: what changes from one to the next."""

import struct
from dataclasses import dataclass

import torch

from twinstream.models.lowering.declarations import STEP_STATE_BYTES

_FLOATS = struct.Struct("<ffff")  # learning rate, 1 - beta1**step, 1 - beta2**step, weight decay
_INTS = struct.Struct("<qq")  # step, seed
_LOSS = struct.Struct("<ff")  # what a target's loss counts; the gradients' largest norm
_SKIPS = struct.Struct("<f")  # not 0: there is nothing to update


@dataclass(frozen=True)
class StepState:
    """Views of it; each value is a tensor of one element, which the host need not wait for."""

    bytes: torch.Tensor  # [STEP_STATE_BYTES], uint8

    @property
    def floats(self) -> torch.Tensor:
        """[4], float32: learning rate, 1 - beta1**step, 1 - beta2**step, weight decay."""
        return self.bytes[: _FLOATS.size].view(torch.float32)

    @property
    def integers(self) -> torch.Tensor:
        """[2], int64: step and seed."""
        return self.bytes[_FLOATS.size : _FLOATS.size + _INTS.size].view(torch.int64)

    @property
    def loss_scale(self) -> torch.Tensor:
        """[1], float32: one over the number of valid targets of the step."""
        return self._loss_floats[:1]

    @property
    def max_norm(self) -> torch.Tensor:
        """[1], float32: the largest norm of all gradients; 0 or infinity is no clipping."""
        return self._loss_floats[1:]

    @property
    def skips(self) -> torch.Tensor:
        """[1], float32: not 0 where there is nothing to update, whatever the gradients hold."""
        start = _FLOATS.size + _INTS.size + _LOSS.size
        return self.bytes[start : start + _SKIPS.size].view(torch.float32)

    @property
    def _loss_floats(self) -> torch.Tensor:
        start = _FLOATS.size + _INTS.size
        return self.bytes[start : start + _LOSS.size].view(torch.float32)


def packed_step_state(  # noqa: PLR0913
    *,
    learning_rate: float,
    corrections: tuple[float, float],
    weight_decay: float,
    step: int,
    seed: int,
    loss_scale: float,
    max_norm: float = 0.0,
    skips: bool = False,
) -> bytes:
    """What `StepState` reads."""
    floats = _FLOATS.pack(learning_rate, *corrections, weight_decay)
    packed = floats + _INTS.pack(step, seed) + _LOSS.pack(loss_scale, max_norm)
    packed += _SKIPS.pack(skips)
    return packed.ljust(STEP_STATE_BYTES, b"\0")
