"""The two implementations of the vector operations, called on the same operands."""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace

import torch

from twinstream.executor.kernels.registry import vector_ops
from twinstream.executor.kernels.workspace import Workspace

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Largest error over largest value: float32 sums in another order; one bf16 rounding the other way.
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2.0**-8}


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on(device: str, operand):
    """A copy of a tensor, or of all tensors of a dataclass, on a device; strides are kept."""
    if isinstance(operand, torch.Tensor):
        moved = torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype)
        return moved.copy_(operand).to(device)
    if is_dataclass(operand) and not isinstance(operand, type):
        names = [field.name for field in fields(operand)]
        return replace(operand, **{name: on(device, getattr(operand, name)) for name in names})
    if isinstance(operand, tuple):
        return tuple(on(device, one) for one in operand)
    return copy.copy(operand)


def assert_twins_agree(
    device: str,
    call: Callable,
    *operands,
    results: Callable[..., dict[str, torch.Tensor]],
    tolerances=TOLERANCES,
    exact: tuple[str, ...] = (),
) -> None:
    """`call(ops, workspace, *operands)` by Triton on `device` and eagerly on the CPU.

    Results named in `exact` have the same bits.
    """
    twins = []
    for name, place in (("eager", "cpu"), ("triton", device)):
        moved = [on(place, operand) for operand in operands]
        scratch = torch.full((2**22,), 0xFF, dtype=torch.uint8, device=place)
        with torch.no_grad():
            call(vector_ops(name), Workspace(scratch), *moved)
        twins.append({what: value.cpu() for what, value in results(*moved).items()})
    expected, found = twins
    for what, value in expected.items():
        assert found[what].isfinite().all(), what
        assert what not in exact or torch.equal(found[what], value), what
        error = (found[what].double() - value.double()).abs().max()
        assert error <= tolerances[value.dtype] * value.double().abs().max() + 1e-30, what
