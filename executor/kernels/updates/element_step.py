"""Updates by rules that look at each element by itself: SGD, Lion, and those of a person's own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.operand import DTYPES, Operands, shard_of
from twinstream.executor.kernels.step_state import StepState
from twinstream.executor.kernels.vector.gradients import gradient_dtype
from twinstream.executor.kernels.vector.rounding import clip_scale, outside, random_16, rounded
from twinstream.executor.kernels.vector.row_blocks import float32_copy
from twinstream.executor.kernels.vector.vector_ops import VectorOps
from twinstream.models.kernel_costs.attributes import (
    Attributes,
    may_skip,
    typed_attribute,
    undecayed_ranges,
)
from twinstream.models.update_rules import OwnRule, UpdateRule, UpdateRuleError
from twinstream.schedule.ops import KernelCall
from twinstream.schedule.python_file import split_name

_BLOCK_ELEMENTS = 2**18
_CHECKED = 512  # elements on which a rule of a person's own is tried


@dataclass(frozen=True)
class StepValues:
    """What a rule is told of the step: tensors of one element, on the device of the parameters."""

    learning_rate: torch.Tensor
    weight_decay: torch.Tensor
    number: torch.Tensor


Rule = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], StepValues], None]
"""Changes the parameter and the state in place, all float32 [n], by the gradient [n]; decay, which
is a factor of the parameter, has been applied."""


def element_step(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Update parameters and state element by element, by the rule that the call names.

    Math is float32; gradients are clipped, and results rounded, as AdamW's are (`adamw_step`).
    """
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    count = typed_attribute(attributes, "num_elements", int)
    shape = (typed_attribute(attributes, "num_states", int), count)
    calls.add(
        _update,
        shard_of("parameters", operands, attributes, dtype),
        shard_of("gradients", operands, attributes, gradient_dtype(attributes)),
        operands["state"].view(dtype, shape),
        StepState(operands["step_state"].bytes),
        operands["norm"].view(torch.float32, (1,)) if "norm" in operands else None,
        rule_of(attributes),
        attributes,
    )


def rule_of(attributes: Attributes) -> Rule:
    """The rule that a call names.

    Raises:
        TwinstreamError: its file is not what it was when the step was planned.
    """
    own = own_rule(attributes)
    if own is not None:
        return _own(own)
    name = typed_attribute(attributes, "rule", str)
    if name == "sgd":
        return _sgd(typed_attribute(attributes, "beta1", float))
    if name == "lion":
        betas = (typed_attribute(attributes, beta, float) for beta in ("beta1", "beta2"))
        return _lion(*betas)
    raise UpdateRuleError(f"a call names the optimizer '{name}', which there is not")


def own_rule(attributes: Attributes) -> OwnRule | None:
    """The rule of a person's own that a call names; None of others."""
    file = split_name(typed_attribute(attributes, "rule", str))
    if file is None:
        return None
    return OwnRule(
        path=str(file[0]),
        function=file[1],
        sha256=typed_attribute(attributes, "rule_sha256", str),
        num_states=typed_attribute(attributes, "num_states", int),
    )


def own_rules(calls: Iterable[KernelCall]) -> list[OwnRule]:
    """Those that any of a schedule's calls names, each once."""
    found = [own_rule(c.attributes) for c in calls if c.kernel.split("/")[0] == "element_step"]
    return list(dict.fromkeys(rule for rule in found if rule is not None))


def _own(rule: OwnRule) -> Rule:
    """The function, whose failures are told as the rule's."""
    function = rule.load()

    def update(
        parameter: torch.Tensor, gradient: torch.Tensor, state: Sequence[torch.Tensor],
        step: StepValues,
    ) -> None:  # fmt: skip
        try:
            function(parameter, gradient, state, step)
        except Exception as error:
            raise UpdateRuleError(
                f"{rule.function} of {rule.path} fails with {type(error).__name__}: {error}; it is "
                f"called as {rule.function}(parameter, gradient, state, step), with a state of "
                f"{rule.num_states} tensors"
            ) from error

    return update


def _sgd(momentum: float) -> Rule:
    """torch.optim.SGD with momentum, without dampening."""

    def update(
        parameter: torch.Tensor, gradient: torch.Tensor, state: Sequence[torch.Tensor],
        step: StepValues,
    ) -> None:  # fmt: skip
        state[0].mul_(momentum).add_(gradient)
        parameter.sub_(state[0] * step.learning_rate)

    return update


def _lion(beta1: float, beta2: float) -> Rule:
    """Lion, as algorithm 2 of arXiv:2302.06675 has it."""

    def update(
        parameter: torch.Tensor, gradient: torch.Tensor, state: Sequence[torch.Tensor],
        step: StepValues,
    ) -> None:  # fmt: skip
        direction = (state[0] * beta1).add_(gradient * (1.0 - beta1)).sign_()
        parameter.sub_(direction.mul_(step.learning_rate))
        state[0].mul_(beta2).add_(gradient * (1.0 - beta2))

    return update


def check_own_rule(rule: UpdateRule) -> None:
    """Try two updates of random elements by a rule of a person's own, together and in two halves:
    they may not be mixed.

    Raises:
        UpdateRuleError: it fails, mixes elements, gives other than finite numbers, or leaves its
            state or the parameters as they were.
    """
    if not isinstance(rule, OwnRule):
        return
    told = f"{rule.function} of {rule.path}"
    function = _own(rule)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, _CHECKED, generator=generator)
    step = StepValues(torch.tensor(1e-3), torch.tensor(0.0), torch.tensor(1))

    def run(block: slice) -> torch.Tensor:
        parameter, *gradients = values[:, block].clone()
        state = torch.zeros(rule.num_states, parameter.numel()).unbind()
        for gradient in gradients:
            function(parameter, gradient, state, step)
        return torch.stack([parameter, *state])

    whole, half = run(slice(None)), _CHECKED // 2
    if not torch.equal(whole, torch.cat([run(slice(0, half)), run(slice(half, None))], dim=1)):
        raise UpdateRuleError(
            f"{told} mixes elements: what it makes of one may not depend on others, because "
            "parameters are updated in blocks"
        )
    before = [values[0], *torch.zeros(rule.num_states, _CHECKED)]
    kept = [name for name, same in zip(
        ("the parameter", *(f"state[{i}]" for i in range(rule.num_states))),
        (torch.equal(now, was) for now, was in zip(whole, before, strict=True)), strict=True,
    ) if same]  # fmt: skip
    if kept or not bool(whole.isfinite().all()):
        what = f"leaves {kept[0]} as it was" if kept else "makes numbers that are not finite"
        raise UpdateRuleError(f"{told} {what}: it changes parameter and state in place")


def _update(  # noqa: PLR0913
    parameters: torch.Tensor, gradients: torch.Tensor, states: torch.Tensor, step: StepState,
    norm: torch.Tensor | None, rule: Rule, attributes: Attributes,
) -> None:  # fmt: skip
    stream = typed_attribute(attributes, "tensor_seed", int)
    rounds = typed_attribute(attributes, "stochastic_rounding", bool)
    offset = typed_attribute(attributes, "element_offset", int)
    undecayed, skips = undecayed_ranges(attributes), may_skip(attributes)
    lr, _, _, weight_decay = step.floats.unbind()
    values = StepValues(lr, weight_decay, step.integers[:1])
    decay, scale = (
        1.0 - lr * weight_decay,
        None if norm is None else clip_scale(step.max_norm, norm),
    )
    for start in range(0, parameters.numel(), _BLOCK_ELEMENTS):
        block = slice(start, min(start + _BLOCK_ELEMENTS, parameters.numel()))
        stored = [parameters[block], *states[:, block]]
        before = [kept.clone() for kept in stored] if skips else []
        gradient = float32_copy(gradients[block])
        if scale is not None:
            gradient.mul_(scale)
        parameter, *state = (float32_copy(kept) for kept in stored)
        for decayed in outside(undecayed, block):
            parameter[decayed].mul_(decay)
        rule(parameter, gradient, tuple(state), values)
        random = random_16(step, stream if rounds else None, offset + start, parameter, len(states))
        for place, now, bits in zip(stored, (parameter, *state), random, strict=False):
            place.copy_(rounded(now, place.dtype, bits))
        for place, was in zip(stored, before, strict=bool(before)):
            place.copy_(torch.where(step.skips != 0.0, was, place))
