"""Updates by rules that look at each element by itself: SGD, Lion, and those of a person's own."""

from collections.abc import Iterable, Sequence

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.operand import DTYPES, Operands
from twinstream.executor.kernels.vector.updates import Rule, StepValues, flat_update, update
from twinstream.executor.kernels.vector.vector_ops import VectorOps
from twinstream.models.kernel_costs.attributes import Attributes, typed_attribute
from twinstream.models.update_rules import OwnRule, UpdateRule, UpdateRuleError
from twinstream.schedule.ops import KernelCall
from twinstream.schedule.python_file import split_name

_CHECKED = 512  # elements on which a rule of a person's own is tried


def element_step(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Update parameters and state element by element, by the rule that the call names."""
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    count = typed_attribute(attributes, "num_elements", int)
    num_states = typed_attribute(attributes, "num_states", int)
    states = operands["state"].view(dtype, (num_states, count)).unbind()
    calls.add(update, flat_update(operands, attributes, states), rule_of(attributes))


def rule_of(attributes: Attributes) -> Rule:
    """Return the rule that a call names.

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
    """Return the rule of a person's own that a call names; None of others."""
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
    """Return those that any of a schedule's calls names, each once."""
    found = [own_rule(c.attributes) for c in calls if c.kernel.split("/")[0] == "element_step"]
    return list(dict.fromkeys(rule for rule in found if rule is not None))


def _own(rule: OwnRule) -> Rule:
    """Return the function, whose failures are told as the rule's."""
    function = rule.load()

    def rule_told(
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

    return rule_told


def _sgd(momentum: float) -> Rule:
    """torch.optim.SGD with momentum, without dampening."""

    def rule(
        parameter: torch.Tensor, gradient: torch.Tensor, state: Sequence[torch.Tensor],
        step: StepValues,
    ) -> None:  # fmt: skip
        state[0].mul_(momentum).add_(gradient)
        parameter.sub_(state[0] * step.learning_rate)

    return rule


def _lion(beta1: float, beta2: float) -> Rule:
    """Lion, as algorithm 2 of arXiv:2302.06675 has it."""

    def rule(
        parameter: torch.Tensor, gradient: torch.Tensor, state: Sequence[torch.Tensor],
        step: StepValues,
    ) -> None:  # fmt: skip
        direction = (state[0] * beta1).add_(gradient * (1.0 - beta1)).sign_()
        parameter.sub_(direction.mul_(step.learning_rate))
        state[0].mul_(beta2).add_(gradient * (1.0 - beta2))

    return rule


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
