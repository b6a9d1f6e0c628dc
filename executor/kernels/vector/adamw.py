"""AdamW on one flat tensor, or on a part of it.

The eager update uses only operations that round each element by itself, so that any split into
parts and blocks gives the same bits (a fused multiply-add, as in lerp or addcmul, may be used for
some elements only).
"""

from dataclasses import dataclass

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.codes import decoded, encode
from twinstream.executor.kernels.operand import DTYPES, KernelOperand, Operands, shard_of
from twinstream.executor.kernels.step_state import StepState
from twinstream.executor.kernels.vector.gradients import gradient_dtype
from twinstream.executor.kernels.vector.rounding import (
    clip_scale,
    outside,
    random_16,
    rounded,
)
from twinstream.executor.kernels.vector.row_blocks import float32_copy
from twinstream.executor.kernels.vector.vector_ops import (
    AdamwConstants,
    AdamwState,
    Scales,
    VectorOps,
)
from twinstream.models.kernel_costs.attributes import (
    Attributes,
    may_skip,
    optimizer_state,
    typed_attribute,
    undecayed_ranges,
)
from twinstream.models.kernel_costs.scratch_sizes import CODE_BLOCK_ELEMENTS, code_blocks

# A temporary is 256 KiB, so that those of a block stay in the cache; no more than ten are alive,
# and four of what an update that may be skipped has found.
_BLOCK_ELEMENTS = 2**16


def adamw_step(operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls) -> None:
    """Update parameters, m and v; with stochastic rounding each is rounded by its own bits.

    Math is float32, as torch.optim.AdamW does it. Learning rate, decay, bias corrections, step and
    seed come from `step_state`, on the device; norms and biases have no decay. With a float32
    master, m and v are float32 too, the update is the master's, and the parameters are the master
    rounded to nearest. An 8-bit state is the codes of m, those of v, and their scales. With the
    norm of all gradients they are clipped first, as torch.nn.utils.clip_grad_norm_ does it, but
    without rounding what is scaled. An update that may be skipped is where `step_state` says so:
    everything keeps its bits, whatever the gradients are.
    """
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    num_elements = typed_attribute(attributes, "num_elements", int)
    moments = _moments(operands["state"], attributes, num_elements, dtype)
    rounding = typed_attribute(attributes, "stochastic_rounding", bool)
    stream = typed_attribute(attributes, "tensor_seed", int)
    step = StepState(operands["step_state"].bytes)
    calls.add(
        vector.adamw,
        AdamwState(
            parameter=shard_of("parameters", operands, attributes, dtype),
            gradient=shard_of("gradients", operands, attributes, gradient_dtype(attributes)),
            m=moments.m,
            v=moments.v,
            master=moments.master,
            scales=moments.scales,
            step=step,
            norm=operands["norm"].view(torch.float32, (1,)) if "norm" in operands else None,
            skips=step.skips if may_skip(attributes) else None,
        ),
        AdamwConstants(
            beta1=typed_attribute(attributes, "beta1", float),
            beta2=typed_attribute(attributes, "beta2", float),
            eps=typed_attribute(attributes, "eps", float),
            element_offset=typed_attribute(attributes, "element_offset", int),
            undecayed=undecayed_ranges(attributes),
            stream=stream if rounding else None,
        ),
    )


@dataclass(frozen=True)
class _Moments:
    m: torch.Tensor
    v: torch.Tensor
    master: torch.Tensor | None = None
    scales: Scales | None = None


def _moments(
    state: KernelOperand, attributes: Attributes, num_elements: int, dtype: torch.dtype
) -> _Moments:
    match optimizer_state(attributes):
        case "model":
            return _Moments(*state.view(dtype, (2, num_elements)))
        case "float32_master":
            return _Moments(*state.view(torch.float32, (3, num_elements)))
        case "8bit":
            scales = state.view(torch.float32, (2, code_blocks(num_elements)), 2 * num_elements)
            m, v = state.view(torch.uint8, (2, num_elements))
            return _Moments(m, v, scales=Scales(*scales))


def update_adamw(state: AdamwState, constants: AdamwConstants) -> None:
    """The eager update, a block of elements at a time; scalars of the step stay on the device."""
    lr, m_correction, v_correction, weight_decay = state.step.floats.unbind()
    v_correction_sqrt, decay = v_correction.sqrt(), 1.0 - lr * weight_decay
    rate, eps = lr * v_correction_sqrt / m_correction, constants.eps * v_correction_sqrt
    beta1, beta2, num_elements = constants.beta1, constants.beta2, state.parameter.numel()
    scale = None if state.norm is None else clip_scale(state.step.max_norm, state.norm)
    for start in range(0, num_elements, _BLOCK_ELEMENTS):
        block = slice(start, min(start + _BLOCK_ELEMENTS, num_elements))
        before = [] if state.skips is None else [kept.clone() for kept in _kept(state, block)]
        gradient = float32_copy(state.gradient[block])
        if scale is not None:
            gradient.mul_(scale)
        m, v = _loaded(state, block)
        m.mul_(beta1).add_(gradient * (1.0 - beta1))
        v.mul_(beta2)
        v.add_(gradient.mul_(gradient).mul_(1.0 - beta2))
        denominator = v.sqrt().add_(eps)
        change = (m * rate).div_(denominator)
        old = state.parameter if state.master is None else state.master
        parameter = float32_copy(old[block])
        for decayed in outside(constants.undecayed, block):
            parameter[decayed].mul_(decay)
        parameter.sub_(change)
        del gradient, denominator, change
        if state.master is not None:
            state.master[block].copy_(parameter)
        random = random_16(
            state.step, constants.stream, constants.element_offset + start, parameter
        )
        state.parameter[block].copy_(rounded(parameter, state.parameter.dtype, random[0]))
        if state.scales is None:
            state.m[block].copy_(rounded(m, state.m.dtype, random[1]))
            state.v[block].copy_(rounded(v, state.v.dtype, random[2]))
        else:
            blocks = _code_blocks(block)
            encode(m, state.m[block], state.scales.m[blocks], random[1], signed=True)
            encode(v, state.v[block], state.scales.v[blocks], random[2], signed=False)
        if state.skips is not None:
            for now, was in zip(_kept(state, block), before, strict=True):
                now.copy_(torch.where(state.skips != 0.0, was, now))


def _kept(state: AdamwState, block: slice) -> list[torch.Tensor]:
    """What a block's update writes."""
    found = [state.parameter[block], state.m[block], state.v[block]]
    if state.master is not None:
        found.append(state.master[block])
    if state.scales is not None:
        blocks = _code_blocks(block)
        found += [state.scales.m[blocks], state.scales.v[blocks]]
    return found


def _loaded(state: AdamwState, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
    if state.scales is None:
        return float32_copy(state.m[block]), float32_copy(state.v[block])
    blocks = _code_blocks(block)
    return (
        decoded(state.m[block], state.scales.m[blocks], signed=True),
        decoded(state.v[block], state.scales.v[blocks], signed=False),
    )


def _code_blocks(block: slice) -> slice:
    return slice(block.start // CODE_BLOCK_ELEMENTS, code_blocks(block.stop))
