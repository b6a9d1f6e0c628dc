"""The frame of an optimizer's update: all that is the same under any rule.

Only operations that round each element by itself are used, so that any split into parts and blocks
gives the same bits (a fused multiply-add, as in lerp or addcmul, may be used for some elements
only).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from twinstream.executor.kernels.codes import decoded, encode
from twinstream.executor.kernels.operand import DTYPES, Operands, shard_of
from twinstream.executor.kernels.step_state import StepState
from twinstream.executor.kernels.vector.rounding import (
    clip_scale,
    outside,
    random_16,
    rounded,
    stream_keys,
)
from twinstream.executor.kernels.vector.row_blocks import float32_copy
from twinstream.models.kernel_costs.attributes import (
    Attributes,
    gradient_dtype_name,
    may_skip,
    typed_attribute,
    undecayed_ranges,
)
from twinstream.models.kernel_costs.scratch_sizes import CODE_BLOCK_ELEMENTS, code_blocks

# A temporary is 256 KiB, so that those of a block stay in the cache; no more than ten are alive,
# and four of what an update that may be skipped has found.
_BLOCK_ELEMENTS = 2**16


@dataclass(frozen=True)
class StepValues:
    """What a rule is told of the step: tensors of one element, on the device of the parameters."""

    learning_rate: torch.Tensor
    weight_decay: torch.Tensor
    number: torch.Tensor


Rule = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], StepValues], None]
"""Changes parameter [n] and state in place by the gradient [n], which it may overwrite.

All are float32. The gradient has been clipped, and decay, which is a factor, has been applied.
"""


@dataclass(frozen=True)
class FlatUpdate:
    """The flat tensors of one update, and how they are clipped, decayed, rounded and skipped.

    Fields:
        states: an element's numbers of state, each flat; with `scales` (float32, one for every
            block) they are the 8-bit codes of m and v (`kernels.codes`).
        master: float32; with it the update is the master's, and the parameter the master, rounded.
        norm: [1] float32, of all gradients, which are scaled by min(1, max_norm / (norm + 1e-6)).
        skips: [1] float32; where it is not 0 everything keeps its bits, whatever gradients are.
        undecayed: ranges of elements without weight decay, in order.
        element_offset: the first element's place, from which its random bits follow.
        stream: of the random bits; None rounds to nearest.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    states: tuple[torch.Tensor, ...]
    step: StepState
    master: torch.Tensor | None = None
    scales: tuple[torch.Tensor, ...] | None = None
    norm: torch.Tensor | None = None
    skips: torch.Tensor | None = None
    undecayed: tuple[tuple[int, int], ...] = ()
    element_offset: int = 0
    stream: int | None = None

    def part(self, start: int, stop: int, states: tuple[torch.Tensor, ...]) -> Self:
        """Return the update of some elements, whose states are given."""
        inside = [(a, b) for a, b in self.undecayed if a < stop and b > start]
        return replace(
            self, parameter=self.parameter[start:stop], gradient=self.gradient[start:stop],
            states=states, element_offset=self.element_offset + start,
            undecayed=tuple((max(a, start) - start, min(b, stop) - start) for a, b in inside),
        )  # fmt: skip

    def written(self, block: slice) -> list[torch.Tensor]:
        """Return all that the update of a block writes."""
        found = [self.parameter[block], *(state[block] for state in self.states)]
        if self.master is not None:
            found.append(self.master[block])
        return found + [scales[_code_blocks(block)] for scales in self.scales or ()]

    def state(self, block: slice) -> list[torch.Tensor]:
        """Return the state of a block in float32."""
        if self.scales is None:
            return [float32_copy(state[block]) for state in self.states]
        coded = zip(self.states, self.scales, (True, False), strict=True)
        return [
            decoded(codes[block], scales[_code_blocks(block)], signed=signed)
            for codes, scales, signed in coded
        ]

    def store_state(
        self, block: slice, state: Sequence[torch.Tensor], random: Sequence[torch.Tensor | None]
    ) -> None:
        """Round the state of a block, each number by its own random bits."""
        if self.scales is None:
            for place, now, bits in zip(self.states, state, random, strict=False):
                place[block].copy_(rounded(now, place.dtype, bits))
            return
        for number, scales in enumerate(self.scales):
            encode(
                state[number], self.states[number][block], scales[_code_blocks(block)],
                random[number], signed=number == 0,
            )  # fmt: skip


def flat_update(
    operands: Operands, attributes: Attributes, states: tuple[torch.Tensor, ...],
    master: torch.Tensor | None = None, scales: tuple[torch.Tensor, ...] | None = None,
) -> FlatUpdate:  # fmt: skip
    """Return the update that a kernel's call is about."""
    step = StepState(operands["step_state"].bytes)
    rounds = typed_attribute(attributes, "stochastic_rounding", bool)
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    return FlatUpdate(
        parameter=shard_of("parameters", operands, attributes, dtype),
        gradient=shard_of(
            "gradients", operands, attributes, DTYPES[gradient_dtype_name(attributes)]
        ),
        states=states,
        step=step,
        master=master,
        scales=scales,
        norm=operands["norm"].view(torch.float32, (1,)) if "norm" in operands else None,
        skips=step.skips if may_skip(attributes) else None,
        undecayed=undecayed_ranges(attributes),
        element_offset=typed_attribute(attributes, "element_offset", int),
        stream=typed_attribute(attributes, "tensor_seed", int) if rounds else None,
    )


def update(flat: FlatUpdate, rule: Rule, block_elements: int = _BLOCK_ELEMENTS) -> None:
    """Update a block of elements at a time; scalars of the step stay on the device.

    Gradients are clipped as torch.nn.utils.clip_grad_norm_ does it, but without rounding what is
    scaled.
    """
    step, num_elements = flat.step, flat.parameter.numel()
    lr, _, _, weight_decay = step.floats.unbind()
    values, decay = StepValues(lr, weight_decay, step.integers[:1]), 1.0 - lr * weight_decay
    scale = None if flat.norm is None else clip_scale(step.max_norm, flat.norm)
    keys = stream_keys(step, flat.stream)
    exact = flat.parameter if flat.master is None else flat.master
    for start in range(0, num_elements, block_elements):
        block = slice(start, min(start + block_elements, num_elements))
        written = flat.written(block)
        before = [] if flat.skips is None else [kept.clone() for kept in written]
        gradient = float32_copy(flat.gradient[block])
        if scale is not None:
            gradient.mul_(scale)
        state, parameter = flat.state(block), float32_copy(exact[block])
        for decayed in outside(flat.undecayed, block):
            parameter[decayed].mul_(decay)
        rule(parameter, gradient, state, values)
        del gradient
        if flat.master is not None:
            flat.master[block].copy_(parameter)
        random = random_16(keys, flat.element_offset + start, parameter, len(state))
        flat.parameter[block].copy_(rounded(parameter, flat.parameter.dtype, random[0]))
        flat.store_state(block, state, random[1:])
        if flat.skips is not None:
            for now, was in zip(written, before, strict=True):
                now.copy_(torch.where(flat.skips != 0.0, was, now))


@dataclass(frozen=True)
class AdamwConstants:
    """Constants of AdamW, as its paper names them."""

    beta1: float
    beta2: float
    eps: float


def update_adamw(flat: FlatUpdate, constants: AdamwConstants) -> None:
    """Update in torch's operations.

    theta -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps), with both corrections taken
    out of the division, so that an element takes one.
    """
    beta1, beta2 = constants.beta1, constants.beta2
    lr, m_correction, v_correction, _ = flat.step.floats.unbind()
    v_correction_sqrt = v_correction.sqrt()
    rate, eps = lr * v_correction_sqrt / m_correction, constants.eps * v_correction_sqrt

    def rule(
        parameter: torch.Tensor, gradient: torch.Tensor, state: Sequence[torch.Tensor],
        step: StepValues,
    ) -> None:  # fmt: skip
        m, v = state
        m.mul_(beta1).add_(gradient * (1.0 - beta1))
        v.mul_(beta2).add_(gradient.mul_(gradient).mul_(1.0 - beta2))
        parameter.sub_((m * rate).div_(v.sqrt().add_(eps)))

    update(flat, rule)


def _code_blocks(block: slice) -> slice:
    return slice(block.start // CODE_BLOCK_ELEMENTS, code_blocks(block.stop))
