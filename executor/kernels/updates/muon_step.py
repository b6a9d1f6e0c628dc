"""Muon: matrices move by their momentum made orthogonal; what is no matrix is updated by AdamW."""

from collections.abc import Sequence

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.operand import DTYPES, Operands
from twinstream.executor.kernels.updates.adamw_step import adamw_constants
from twinstream.executor.kernels.vector.rounding import outside
from twinstream.executor.kernels.vector.updates import (
    Rule,
    StepValues,
    flat_update,
    update,
    update_adamw,
)
from twinstream.executor.kernels.vector.vector_ops import VectorOps
from twinstream.models.kernel_costs.attributes import Attributes, typed_attribute
from twinstream.models.kernel_costs.update_work import MUON_ITERATIONS
from twinstream.schedule.errors import TwinstreamError

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
_RMS = 0.2  # of an AdamW update: learning rates and decay are those of AdamW


def muon_step(operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls) -> None:
    """Update a block's matrices by Muon, and what lies between them by AdamW.

    The state is the momentum of all elements, then v of those outside matrices, one after the
    other.
    """
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    count = typed_attribute(attributes, "num_elements", int)
    matrices = _matrices(attributes)
    inside = [(start, start + rows * columns) for start, rows, columns in matrices]
    others = count - sum(stop - start for start, stop in inside)
    m = operands["state"].view(dtype, (count,))
    v = operands["state"].view(dtype, (others,), count * dtype.itemsize)
    flat = flat_update(operands, attributes, (m,))
    beta1 = typed_attribute(attributes, "beta1", float)
    for (start, stop), (_, *shape) in zip(inside, matrices, strict=True):
        matrix = flat.part(start, stop, (m[start:stop],))
        calls.add(update, matrix, _muon(beta1, shape), stop - start)
    at = 0
    for part in outside(inside, slice(0, count)):
        here = v[at : at + part.stop - part.start]
        at += here.numel()
        between = flat.part(part.start, part.stop, (m[part], here))
        calls.add(update_adamw, between, adamw_constants(attributes))


def _muon(beta: float, shape: Sequence[int]) -> Rule:
    """Return Muon with Nesterov's momentum, of a matrix.

    The update of R rows and C columns is scaled by 0.2 sqrt(max(R, C)), so that it is as large as
    AdamW's (arXiv:2502.16982). Newton and Schulz's iteration runs in bf16, as its source and
    torch.optim.Muon have it.
    """

    def rule(
        parameter: torch.Tensor, gradient: torch.Tensor, state: Sequence[torch.Tensor],
        step: StepValues,
    ) -> None:  # fmt: skip
        (m,) = state
        m.mul_(beta).add_(gradient.mul_(1.0 - beta))
        ahead = gradient.add_(m * beta)
        direction = orthogonalised(ahead.view(*shape)).reshape(-1).float()
        parameter.sub_(direction * (step.learning_rate * (_RMS * max(shape) ** 0.5)))

    return rule


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Return the nearest matrix with singular values of about 1: [R, C] bf16 of [R, C] float32."""
    a, b, c = _COEFFICIENTS
    x = matrix.bfloat16()
    if x.shape[0] > x.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _matrices(attributes: Attributes) -> list[tuple[int, int, int]]:
    numbers = attributes.get("matrices", ())
    if not isinstance(numbers, tuple) or len(numbers) % 3:
        raise TwinstreamError(f"kernel attribute 'matrices' is {numbers!r}, expected threes")
    whole = [int(number) for number in numbers]
    return list(zip(whole[::3], whole[1::3], whole[2::3], strict=True))
