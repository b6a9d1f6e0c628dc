"""Triton's kernels launched into nothing, and as which variant each would be compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

# Before anyone says that they are not interpreted.
import twinstream.executor.kernels.triton_kernels.vector  # noqa: F401

Variant = tuple[str, tuple[object, ...], tuple[tuple[str, object], ...]]


def launched_into_nothing(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """The variants that are launched from now on, one after the other."""
    found: list[Variant] = []

    def launcher(kernel: InterpretedFunction, grid: object) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            specialised = tuple(map(_specialised, arguments))
            found.append((kernel.fn.__name__, specialised, tuple(sorted(options.items()))))

        return launch

    monkeypatch.setattr(InterpretedFunction, "__getitem__", launcher)
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # arguments stay as they are
    return found


def _specialised(argument: object) -> object:
    """What Triton makes a variant of: dtype and alignment of a pointer; 1, multiples of 16."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0
    return type(argument)
