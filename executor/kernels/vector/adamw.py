"""AdamW on one flat tensor, or on a part of it.

The eager update uses only operations that round each element by itself, so that any split into
parts and blocks gives the same bits (a fused multiply-add, as in lerp or addcmul, may be used for
some elements only).
"""

from collections.abc import Iterator, Sequence

import torch

from twinstream.executor.kernels.operand import DTYPES, Operands
from twinstream.executor.kernels.step_state import StepState
from twinstream.executor.kernels.vector.gradients import gradient_dtype
from twinstream.executor.kernels.vector.random_bits import random_words, stream_keys
from twinstream.executor.kernels.vector.row_blocks import float32_copy
from twinstream.executor.kernels.vector.vector_ops import AdamwConstants, AdamwState, VectorOps
from twinstream.models.demand.workspace import (
    Attributes,
    has_master,
    typed_attribute,
    undecayed_ranges,
)

# A float32 temporary is 1 MiB, one of random numbers 2 MiB; no more than ten are alive.
_BLOCK_ELEMENTS = 2**18
CLIP_EPS = 1e-6


def adamw_step(operands: Operands, attributes: Attributes, vector: VectorOps) -> None:
    """Update parameters, m and v; with stochastic rounding each is rounded by its own bits.

    Math is float32, as torch.optim.AdamW does it. Learning rate, decay, bias corrections, step and
    seed come from `step_state`, on the device; norms and biases have no decay. With a float32
    master, m and v are float32 too, the update is the master's, and the parameters are the master
    rounded to nearest. With the norm of all gradients they are clipped first, as
    torch.nn.utils.clip_grad_norm_ does it, but without rounding what is scaled.
    """
    dtype, master = DTYPES[typed_attribute(attributes, "dtype", str)], has_master(attributes)
    num_elements = typed_attribute(attributes, "num_elements", int)
    shape = (3 if master else 2, num_elements)
    state = operands["state"].view(torch.float32 if master else dtype, shape)
    rounding = typed_attribute(attributes, "stochastic_rounding", bool)
    first_stream = 2 * typed_attribute(attributes, "tensor_seed", int)
    vector.adamw(
        AdamwState(
            parameter=operands["parameters"].view(dtype, (num_elements,)),
            gradient=operands["gradients"].view(gradient_dtype(attributes), (num_elements,)),
            m=state[0],
            v=state[1],
            master=state[2] if master else None,
            step=StepState(operands["step_state"].bytes),
            norm=operands["norm"].view(torch.float32, (1,)) if "norm" in operands else None,
        ),
        AdamwConstants(
            beta1=typed_attribute(attributes, "beta1", float),
            beta2=typed_attribute(attributes, "beta2", float),
            eps=typed_attribute(attributes, "eps", float),
            element_offset=typed_attribute(attributes, "element_offset", int),
            undecayed=undecayed_ranges(attributes),
            first_stream=first_stream if rounding else None,
        ),
    )


def update_adamw(state: AdamwState, constants: AdamwConstants) -> None:
    """The eager update, a block of elements at a time; scalars of the step stay on the device."""
    lr, m_correction, v_correction, weight_decay = state.step.floats.unbind()
    v_correction_sqrt, decay = v_correction.sqrt(), 1.0 - lr * weight_decay
    beta1, beta2, num_elements = constants.beta1, constants.beta2, state.parameter.numel()
    scale = None if state.norm is None else _clip_scale(state.step.max_norm, state.norm)
    for start in range(0, num_elements, _BLOCK_ELEMENTS):
        block = slice(start, min(start + _BLOCK_ELEMENTS, num_elements))
        gradient = float32_copy(state.gradient[block])
        if scale is not None:
            gradient.mul_(scale)
        m = float32_copy(state.m[block]).mul_(beta1).add_(gradient * (1.0 - beta1))
        v = float32_copy(state.v[block]).mul_(beta2)
        v.add_(gradient.mul_(gradient).mul_(1.0 - beta2))
        denominator = v.sqrt().div_(v_correction_sqrt).add_(constants.eps)
        change = (m / m_correction).mul_(lr).div_(denominator)
        old = state.parameter if state.master is None else state.master
        parameter = float32_copy(old[block])
        for decayed in _outside(constants.undecayed, block):
            parameter[decayed].mul_(decay)
        parameter.sub_(change)
        del gradient, denominator, change
        if state.master is not None:
            state.master[block].copy_(parameter)
        if constants.first_stream is not None:
            parameter, m, v = _rounded(parameter, m, v, state.step, constants, start)
        for flat, value in ((state.parameter, parameter), (state.m, m), (state.v, v)):
            flat[block].copy_(value)


def _clip_scale(max_norm: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """What gradients are multiplied by; NaN where the norm is."""
    off = (max_norm == 0.0) | max_norm.isinf()
    return torch.where(off, 1.0, (max_norm / (norm + CLIP_EPS)).clamp(max=1.0))


def _outside(ranges: Sequence[tuple[int, int]], block: slice) -> Iterator[slice]:
    """What of a block lies in none of the ranges, which are in order; from the block's start on."""
    at = block.start
    for start, end in (*ranges, (block.stop, block.stop)):
        if at < (until := min(max(start, at), block.stop)):
            yield slice(at - block.start, until - block.start)
        at = max(at, end)


def _rounded(
    parameter: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step_state: StepState,
    constants: AdamwConstants, start: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Each by its own random bits, which follow from the place of the element."""
    step, seed = step_state.integers.unbind()
    first = constants.first_stream
    assert first is not None
    keys = [stream_keys(seed, step, stream) for stream in (first, first + 1)]
    start += constants.element_offset
    indices = torch.arange(start, start + m.numel(), device=m.device)
    words = random_words(keys[0], indices)
    parameter = _rounded_down_or_up(parameter, words & 0xFFFF)
    m = _rounded_down_or_up(m, words >> 16)
    words = random_words(keys[1], indices)
    return parameter, m, _rounded_down_or_up(v, words & 0xFFFF)


def _rounded_down_or_up(x: torch.Tensor, random_16: torch.Tensor) -> torch.Tensor:
    """Round float32 to a bf16 value, to either neighbour with a chance that keeps the mean.

    Values that are bf16 already stay. Infinities and NaN stay; what is finite stays so.
    """
    limit = torch.finfo(torch.bfloat16).max
    bits = x.clamp(-limit, limit).view(torch.int32)
    bits.add_(random_16.to(torch.int32)).bitwise_and_(-0x10000)
    return torch.where(x.isfinite(), bits.view(torch.float32), x)
