"""Muon: matrices move by their momentum made orthogonal; what is no matrix is updated by AdamW."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.operand import DTYPES, Operands
from twinstream.executor.kernels.step_state import StepState
from twinstream.executor.kernels.vector.adamw import update_adamw
from twinstream.executor.kernels.vector.gradients import gradient_dtype
from twinstream.executor.kernels.vector.rounding import clip_scale, outside, random_16, rounded
from twinstream.executor.kernels.vector.row_blocks import float32_copy
from twinstream.executor.kernels.vector.vector_ops import AdamwConstants, AdamwState, VectorOps
from twinstream.models.kernel_costs.attributes import (
    Attributes,
    may_skip,
    typed_attribute,
    undecayed_ranges,
)
from twinstream.models.kernel_costs.update_work import MUON_ITERATIONS
from twinstream.schedule.errors import TwinstreamError

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
_RMS = 0.2  # of an AdamW update: learning rates and decay are those of AdamW


@dataclass(frozen=True)
class _Flat:
    """The flat tensors of a group; `v` has what is outside matrices, one after the other."""

    parameters: torch.Tensor
    gradients: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor


def muon_step(operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls) -> None:
    """Update a block's parameters by Muon, with Nesterov's momentum (`beta1`).

    The update of a matrix of R rows and C columns is scaled by 0.2 sqrt(max(R, C)), so that it is
    as large as AdamW's (arXiv:2502.16982). Newton and Schulz's iteration runs in bf16, as its
    source and torch.optim.Muon have it; the rest in float32, clipped, decayed and rounded as
    AdamW's is (`adamw_step`).
    """
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    count = typed_attribute(attributes, "num_elements", int)
    matrices = _matrices(attributes)
    others = count - sum(rows * columns for _, rows, columns in matrices)
    flat = _Flat(
        operands["parameters"].view(dtype, (count,)),
        operands["gradients"].view(gradient_dtype(attributes), (count,)),
        operands["state"].view(dtype, (count,)),
        operands["state"].view(dtype, (others,), count * dtype.itemsize),
    )
    step = StepState(operands["step_state"].bytes)
    norm = operands["norm"].view(torch.float32, (1,)) if "norm" in operands else None
    for start, rows, columns in matrices:
        calls.add(_update_matrix, flat, start, (rows, columns), step, norm, attributes)
    at = 0
    for start, stop in _between(matrices, count):
        constants = _constants(attributes, start, stop)
        part = slice(start, stop)
        calls.add(
            update_adamw,
            AdamwState(
                flat.parameters[part], flat.gradients[part], flat.m[part],
                flat.v[at : at + stop - start], None, step, norm,
                skips=step.skips if may_skip(attributes) else None,
            ),
            constants,
        )  # fmt: skip
        at += stop - start


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with singular values of about 1: [R, C] bf16 of [R, C] float32."""
    a, b, c = _COEFFICIENTS
    x = matrix.bfloat16()
    if x.shape[0] > x.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _update_matrix(
    flat: _Flat, start: int, shape: tuple[int, int], step: StepState, norm: torch.Tensor | None,
    attributes: Attributes,
) -> None:  # fmt: skip
    rows, columns = shape
    block = slice(start, start + rows * columns)
    beta = typed_attribute(attributes, "beta1", float)
    lr, _, _, weight_decay = step.floats.unbind()
    stored = [flat.parameters[block], flat.m[block]]
    before = [kept.clone() for kept in stored] if may_skip(attributes) else []
    gradient = float32_copy(flat.gradients[block])
    if norm is not None:
        gradient.mul_(clip_scale(step.max_norm, norm))
    m = float32_copy(flat.m[block]).mul_(beta).add_(gradient * (1.0 - beta))
    ahead = (m * beta).add_(gradient.mul_(1.0 - beta))
    direction = orthogonalised(ahead.view(shape))
    rate = lr * (_RMS * max(rows, columns) ** 0.5)
    parameter = float32_copy(stored[0])
    parameter.mul_(1.0 - lr * weight_decay).sub_(direction.reshape(-1).float() * rate)
    stream = typed_attribute(attributes, "tensor_seed", int)
    rounds = typed_attribute(attributes, "stochastic_rounding", bool)
    offset = typed_attribute(attributes, "element_offset", int) + start
    random = random_16(step, stream if rounds else None, offset, parameter)
    for place, now, bits in zip(stored, (parameter, m), random, strict=False):
        place.copy_(rounded(now, place.dtype, bits))
    for place, was in zip(stored, before, strict=bool(before)):
        place.copy_(torch.where(step.skips != 0.0, was, place))


def _matrices(attributes: Attributes) -> list[tuple[int, int, int]]:
    numbers = attributes.get("matrices", ())
    if not isinstance(numbers, tuple) or len(numbers) % 3:
        raise TwinstreamError(f"kernel attribute 'matrices' is {numbers!r}, expected threes")
    whole = [int(number) for number in numbers]
    return list(zip(whole[::3], whole[1::3], whole[2::3], strict=True))


def _between(matrices: list[tuple[int, int, int]], count: int) -> Iterator[tuple[int, int]]:
    """First and last + 1 of what lies outside the matrices, which are in order."""
    inside = [(start, start + rows * columns) for start, rows, columns in matrices]
    for piece in outside(inside, slice(0, count)):
        yield piece.start, piece.stop


def _constants(attributes: Attributes, start: int, stop: int) -> AdamwConstants:
    """Of a stretch of a call's elements."""
    undecayed = [
        (max(a, start) - start, min(b, stop) - start)
        for a, b in undecayed_ranges(attributes)
        if a < stop and b > start
    ]
    rounds = typed_attribute(attributes, "stochastic_rounding", bool)
    return AdamwConstants(
        beta1=typed_attribute(attributes, "beta1", float),
        beta2=typed_attribute(attributes, "beta2", float),
        eps=typed_attribute(attributes, "eps", float),
        element_offset=typed_attribute(attributes, "element_offset", int) + start,
        undecayed=tuple(undecayed),
        stream=typed_attribute(attributes, "tensor_seed", int) if rounds else None,
    )
