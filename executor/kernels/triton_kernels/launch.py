"""Launch a Triton kernel on the current stream, or in Triton's interpreter on CPU tensors.

The interpreter is what `TRITON_INTERPRET=1`, set before Triton is imported, turns kernels into.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import triton

# CPU tensors are handed to the interpreter, which can do no other, as these.
_SAME_WIDTH = {torch.bfloat16: torch.int16}


def device_function(function: Callable[..., Any]) -> Any:
    """What kernels call; the interpreter takes it as it is, at a hundredth of the cost."""
    return function if triton.knobs.runtime.interpret else triton.jit(function)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run `kernel` on a grid of programs; nothing is launched where the grid is empty.

    Multiply-adds are fused unless asked otherwise: Triton's default is to change, and bits with it.
    """
    if not prod(grid):
        return
    options.setdefault("enable_fp_fusion", True)
    if triton.knobs.runtime.interpret:
        arguments = tuple(_alone(argument) for argument in arguments)
    kernel[grid](*arguments, **options)


def warps_for(elements: int, per_thread: int) -> int:
    """Warps that have so many elements a thread, between 1 and 16."""
    warps: int = triton.next_power_of_2(elements) // (32 * per_thread)
    return max(1, min(16, warps))


def _alone(argument: Any) -> Any:
    """A CPU tensor as the only one of its storage.

    The interpreter copies an argument's whole storage onto itself after a kernel, and a storage
    is an arena that other streams write to meanwhile.
    """
    if not isinstance(argument, torch.Tensor) or argument.is_cuda or not argument.numel():
        return argument
    as_numpy: Callable[[], Any] = argument.view(
        _SAME_WIDTH.get(argument.dtype, argument.dtype)
    ).numpy
    return torch.from_numpy(as_numpy()).view(argument.dtype)
