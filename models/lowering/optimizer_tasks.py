"""Optimizer tasks of a chain, and where they run; gradients that the host adds up."""

import zlib
from collections.abc import Sequence

from twinstream.models.decoders.sizes import ITEMSIZE_BYTES
from twinstream.models.kernel_costs.attributes import TEMPORARY_BYTES
from twinstream.models.kernel_costs.update_work import (
    element_update_work,
    host_accumulate_work,
    host_work,
    muon_temporary_bytes,
    muon_work,
    with_update_unit,
)
from twinstream.models.kernel_costs.work import (
    adamw_work,
    gradient_norm_work,
    gradient_squares_work,
)
from twinstream.models.layout import whole_group
from twinstream.models.lowering.chain_builder import ChainBuilder, UseMode
from twinstream.models.lowering.declarations import (
    STEP_STATE_BYTES,
    OptimizerPart,
    Shapes,
    muon_matrices,
    optimizer_parts,
    part_state_bytes,
    undecayed_ranges,
)
from twinstream.models.lowering.group_life import GroupLife
from twinstream.models.providers.model import Model
from twinstream.models.providers.trained import layout_of, trained_groups
from twinstream.models.recipes.recipe import BEFORE_NEXT_USE, Recipe
from twinstream.models.recipes.update_rules import OwnRule, states_of_element
from twinstream.schedule.chain import Input
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import Attribute, TaskOperand


class OptimizerTasks(GroupLife[TaskOperand]):
    """Adds the optimizer's tasks to a chain as the recipe's `optimizer` says.

    `step_state` is the operand with what changes from step to step. With
    `host_after_backward` every round's gradients are made afresh and the host adds them up: the
    first round's is where later ones are added.

    Where the recipe clips, a group's gradient is squared and summed up as soon as it is final; the
    norm of all comes before the first update.

    With `device_before_next_use` a step begins with the updates of the one before, whose gradients
    and norm it finds; `update_state` has what `step_state` was then, or says that there are none.
    """

    def __init__(
        self, builder: ChainBuilder, shapes: Shapes, recipe: Recipe, step_state: TaskOperand
    ) -> None:
        super().__init__()
        self.builder: ChainBuilder = builder
        self.shapes, self.recipe, self.clips = shapes, recipe, recipe.clips
        self.step_state = self._update_state = step_state
        self._begins_with_updates = recipe.optimizer == BEFORE_NEXT_USE
        if self._begins_with_updates:
            self._update_state = self._fed_update_state(step_state)
        self._host_adds = recipe.optimizer == "host_after_backward"
        self._begun: set[str] = set()
        if self._host_adds and shapes.workload.rounds_per_step > 1:
            for group in shapes.trained:
                size, dtype = shapes.gradient_bytes(group), shapes.gradient_dtype
                builder.declare_flat(f"round_grad.{group}", size, "gradient", dtype)

    def gradient(self, name: str, group: str, round_: int) -> TaskOperand:
        """The operand that a backward task adds its contribution to."""
        if not self._host_adds or round_ == 0:
            return self.builder.accumulate(name, f"grad.{group}")
        tensor = f"round_grad.{group}"
        if group in self._begun:
            return self.builder.update(name, tensor)
        self._begun.add(group)
        return self.builder.write(name, tensor)

    def before_group(self, group: str, round_: int) -> None:
        """What comes before a group's first use in a round."""
        if self._begins_with_updates and round_ == 0:
            self._update(group)

    def after_group(self, group: str, round_: int) -> None:
        """Follow a group's last contribution of a round; after that of the last group, all."""
        if self._host_adds and round_:
            self._add_on_host(group, round_)
        if round_ == self.shapes.workload.rounds_per_step - 1:
            self.after_backward(group, "", last=True)
            if group == self.shapes.trained[0]:
                self.finish()

    def _gradient(self, group: str, mode: UseMode) -> TaskOperand:
        return self.builder.operand("gradients", f"grad.{group}", mode)

    def _summed(self, group: str) -> str:
        """Of the tensors that hold a group's summed gradient."""
        return "grad"

    def _parameters(self, group: str) -> TaskOperand:
        return self.builder.update("parameters", f"param.{group}")

    def _layer(self, group: str) -> int | None:
        return self.shapes.spec.layer_of(group)

    def _follow(self, group: str) -> None:
        if self.recipe.clips:
            self._sum_squares(group)
        if self.recipe.optimizer in ("device", "host"):
            self._update_group(group)

    def _updated_last(self) -> Sequence[str]:
        """Matrices' layers last where the device updates them."""
        trained, place = self.shapes.trained, self.recipe.optimizer
        if place == "device_after_backward":
            return sorted(trained, key=lambda group: self._layer(group) is not None)
        return trained if place.endswith("_after_backward") else ()

    def _fed_update_state(self, step_state: TaskOperand) -> TaskOperand:
        self.builder.declare_flat("update_state", STEP_STATE_BYTES, "input", "uint8")
        fed = self.builder.write("step_state", "update_state")
        self.builder.inputs.append(
            Input(tensor=fed.tensor, version=fed.version, source=fed.tensor, index=0)
        )
        return step_state.model_copy(update={"tensor": fed.tensor})

    def _add_on_host(self, group: str, round_: int) -> None:
        self._begun.discard(group)
        num_elements, dtype = self.shapes.num_elements(group), self.shapes.gradient_dtype
        attributes: dict[str, Attribute] = {"dtype": dtype, "num_elements": num_elements}
        cost = host_accumulate_work(num_elements, dtype, ITEMSIZE_BYTES[dtype])
        call = self.builder.call(f"accumulate.{group}", "accumulate/host", attributes, cost, "host")
        operands = [
            self.builder.update("sum", f"grad.{group}"),
            self.builder.read("gradients", f"round_grad.{group}"),
        ]
        label = self.builder.label("accumulate", self._layer(group), round_=round_)
        self.builder.add(f"r{round_}.accumulate.{group}", call, operands, label)

    def _sum_squares(self, group: str) -> None:
        """Of a whole group at once, so that the sum's order does not depend on its parts."""
        num_elements, dtype = self.shapes.num_elements(group), self.shapes.gradient_dtype
        attributes: dict[str, Attribute] = {"dtype": dtype, "num_elements": num_elements}
        call = self.builder.call(
            f"gradient_squares.{num_elements}",
            f"gradient_squares/{self.recipe.implementations.vector}",
            attributes,
            gradient_squares_work(num_elements, dtype),
        )
        squares = self.builder.write("squares", self.shapes.squares_tensor(group))
        operands = [self._gradient(group, "read"), squares]
        label = self._label("gradient_squares", group)
        self.builder.add(f"gradient_squares.{group}", call, operands, label)

    def _take_norm(self) -> None:
        num_groups = sum(count for _, count in self.shapes.norm_parts)
        call = self.builder.call(
            "gradient_norm",
            f"gradient_norm/{self.recipe.implementations.vector}",
            {"num_groups": num_groups},
            gradient_norm_work(num_groups),
        )
        operands = [
            self.builder.read("squares", "grad_squares"),
            self.builder.write("norm", "grad_norm"),
        ]
        self.builder.add("gradient_norm", call, operands, self.builder.label("gradient_norm"))

    def _update(self, group: str) -> None:
        builder = self.builder
        for part in self.shapes.parts(group):
            operands = [
                builder.update("parameters", f"param.{part.suffix}"),
                builder.read("gradients", f"{self._summed(group)}.{part.suffix}"),
                builder.update("state", f"opt.{part.suffix}"),
                self._update_state,
            ]
            if self.recipe.clips:
                operands.append(builder.read("norm", "grad_norm"))
            label = self._label("optimizer_step", group)
            builder.add(f"optimizer.{part.suffix}", self._call(group, part), operands, label)

    def _call(self, group: str, part: OptimizerPart) -> str:
        spec, recipe = self.shapes.spec, self.recipe
        if recipe.update != "adamw":
            return self._call_of_rule(group, part)
        state = recipe.state_of(spec.dtype)
        attributes = self._of_every_rule(group, part)
        if state != "model":
            attributes["optimizer_state"] = state
        name, cost = (
            f"adamw.{part.suffix}",
            adamw_work(part.num_elements, spec.dtype, self.shapes.gradient_dtype, state),
        )
        return self._update_call(group, name, "adamw_step", attributes, cost)

    def _call_of_rule(self, group: str, part: OptimizerPart) -> str:
        """Of a rule that is not AdamW: on every element by itself, or on matrices."""
        spec, recipe, rule = self.shapes.spec, self.recipe, self.recipe.update
        attributes = self._of_every_rule(group, part)
        gradient_dtype = self.shapes.gradient_dtype
        state = part_state_bytes(spec, group, part, recipe)
        matrices = muon_matrices(spec, group, recipe)
        if rule == "muon" and not matrices:  # outside blocks it is AdamW
            name, kernel = f"adamw.{part.suffix}", "adamw_step"
            cost = adamw_work(part.num_elements, spec.dtype, gradient_dtype)
        elif rule == "muon":
            name, kernel = f"muon.{part.suffix}", "muon_step"
            attributes["matrices"] = tuple(number for matrix in matrices for number in matrix)
            attributes[TEMPORARY_BYTES] = muon_temporary_bytes(matrices)
            cost = muon_work(part.num_elements, spec.dtype, gradient_dtype, state, matrices)
        else:
            name, kernel = f"update.{part.suffix}", "element_step"
            attributes["num_states"] = states_of_element(rule)
            if isinstance(rule, OwnRule):
                attributes["rule"] = f"{rule.path}:{rule.function}"
                attributes["rule_sha256"] = rule.sha256
            else:
                attributes["rule"] = rule
            cost = element_update_work(part.num_elements, spec.dtype, gradient_dtype, state)
        return self._update_call(group, name, kernel, attributes, cost)

    def _update_call(
        self, group: str, name: str, kernel: str, attributes: dict[str, Attribute],
        cost: tuple[Work, ...],
    ) -> str:  # fmt: skip
        """The device's call, or the host's, which has the eager kernel of the same rule."""
        if self.recipe.updates_on_host(group):
            return self.builder.call(name, f"{kernel}/host", attributes, host_work(cost), "host")
        vector = self.recipe.implementations.vector
        if vector == "eager":
            cost = with_update_unit(cost, attributes)
        return self.builder.call(name, f"{kernel}/{vector}", attributes, cost)

    def _of_every_rule(self, group: str, part: OptimizerPart) -> dict[str, Attribute]:
        spec, recipe = self.shapes.spec, self.recipe
        found: dict[str, Attribute] = {
            "dtype": spec.dtype,
            "num_elements": part.num_elements,
            "element_offset": part.element_offset,
            "tensor_seed": zlib.crc32(f"param.{whole_group(group)}".encode()),
            "beta1": recipe.beta1,
            "beta2": recipe.beta2,
            "eps": recipe.eps,
            "stochastic_rounding": recipe.stochastic_rounding and self._rounds,
            **gradient_attribute(recipe, spec.dtype),
            **self._place(group, part),
        }
        return found | ({"may_skip": True} if self._begins_with_updates else {})

    @property
    def _rounds(self) -> bool:
        """Whether what is stored is rounded from float32."""
        state, dtype = self.recipe.state_of(self.shapes.spec.dtype), self.shapes.spec.dtype
        return state == "8bit" or (state == "model" and dtype == "bfloat16")

    def _place(self, group: str, part: OptimizerPart) -> dict[str, Attribute]:
        """What a call is told of where its part lies in the group."""
        ranges = undecayed_ranges(self.shapes.spec, group, part)
        return {"undecayed": ranges} if ranges else {}


def gradient_attribute(recipe: Recipe, dtype: str) -> dict[str, Attribute]:
    """What a call that uses gradients is told of their dtype: nothing where it is the model's."""
    gradient_dtype = recipe.gradient_dtype(dtype)
    return {} if gradient_dtype == dtype else {"gradient_dtype": gradient_dtype}


def state_parts(model: Model, recipe: Recipe, *, earlier: bool = False) -> dict[str, int]:
    """By group in how many parts its optimizer's state lies, where that is several.

    One state of each element lies alike in any number of parts.

    Args:
        earlier: in checkpoints that do not say it: layers were one part, of any size, and embedding
            and head in parts no larger than one.
    """
    alike = recipe.state_of(model.dtype) == "model" and states_of_element(recipe.update) == 1
    if alike and recipe.update != "muon":
        return {}
    counts = {}
    for group in trained_groups(model, recipe):
        counts[group] = len(optimizer_parts(model, group, recipe))
        if earlier:
            size_bytes = layout_of(model, recipe, group).size_bytes
            whole = model.layer_of(group) is not None
            counts[group] = 1 if whole else -(-size_bytes // model.layer_bytes)
    return {group: count for group, count in counts.items() if count > 1}
