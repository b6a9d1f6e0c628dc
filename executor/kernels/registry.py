"""Kernels by key: name and implementation."""

from dataclasses import dataclass

from twinstream.executor.kernels.adamw import adamw_step
from twinstream.executor.kernels.block_backward import block_backward
from twinstream.executor.kernels.block_forward import block_forward
from twinstream.executor.kernels.block_recompute import (
    block_recompute_attention,
    block_recompute_input,
)
from twinstream.executor.kernels.embedding import embed_backward, embed_forward
from twinstream.executor.kernels.head_loss import head_loss
from twinstream.executor.kernels.operand import Kernel
from twinstream.schedule.errors import TwinstreamError


@dataclass(frozen=True)
class RegisteredKernel:
    """`deterministic`: same bits from run to run, provided its attention implementation is."""

    key: str
    function: Kernel
    deterministic: bool


_KERNELS = (
    RegisteredKernel("embed_forward/eager", embed_forward, deterministic=True),
    RegisteredKernel("block_forward/eager", block_forward, deterministic=True),
    RegisteredKernel(
        "block_recompute_attention/eager", block_recompute_attention, deterministic=True
    ),
    RegisteredKernel("block_recompute_input/eager", block_recompute_input, deterministic=True),
    RegisteredKernel("block_backward/eager", block_backward, deterministic=True),
    RegisteredKernel("head_loss/eager", head_loss, deterministic=True),
    RegisteredKernel("embed_backward/eager", embed_backward, deterministic=True),
    RegisteredKernel("adamw_step/eager", adamw_step, deterministic=True),
)


def kernel_keys() -> tuple[str, ...]:
    return tuple(kernel.key for kernel in _KERNELS)


def registered_kernel(key: str) -> RegisteredKernel:
    """Return the kernel that a Compute op names.

    Raises:
        TwinstreamError: there is none of that key; the message lists those there are.
    """
    for kernel in _KERNELS:
        if kernel.key == key:
            return kernel
    raise TwinstreamError(f"kernel '{key}' is unknown; known kernels: {', '.join(kernel_keys())}")
