"""Lower (model, workload, recipe) to the task chain of one training step.

Order: in every round all chunks pass a layer before the first chunk starts on the next; the head
takes chunks in reverse; backward takes layers and chunks in reverse. In the last round a group's
optimizer task follows its last gradient at once, unless the recipe's `optimizer` says otherwise.
Tensors keep their names from round to round; versions tell rounds apart.
"""

import hashlib
import json

from pydantic import ValidationError

from twinstream.models.adapters.adapter_layout import adapter_group
from twinstream.models.flops import model_flops_per_step
from twinstream.models.kernel_costs.attention_library import library_bytes
from twinstream.models.lowering.chain_builder import ChainBuilder
from twinstream.models.lowering.declarations import Shapes, carried_or_used, declare_tensors
from twinstream.models.lowering.kernel_calls import KernelCalls, frozen_attribute
from twinstream.models.lowering.optimizer_tasks import OptimizerTasks, gradient_attribute
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.models.trained import first_backward_layer, trained_groups
from twinstream.schedule.chain import Chain, Input, Output
from twinstream.schedule.derived.flush import flush_chain
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Attribute, Label, TaskOperand
from twinstream.schedule.workload import ModelRef, Workload


def lower(spec: ModelSpec, workload: Workload, recipe: Recipe | None = None) -> Chain:
    """The chain of one training step of `spec` on `workload`, or of its forward alone.

    A recipe that clips has the optimizer on the device after the whole backward pass, unless it
    names the beginning of the next step. What is frozen has no gradient, and backward ends where
    nothing below is trained. The tasks of a forward alone are named as those of the step; the
    head's makes nothing but the loss. It has the optimizer's state, too, which it leaves as it is.

    Raises:
        TwinstreamError: the recipe clips, and has the optimizer on the host; or it leaves nothing
            to train.
    """
    lowering = StepLowering(spec, workload, settled(recipe or Recipe()))
    lowering.run()
    builder = lowering.builder
    return Chain(
        tensors=carried_or_used(builder, workload, lowering.shapes.persistent),
        calls=builder.calls,
        tasks=tuple(builder.tasks),
        recomputes=tuple(builder.recomputes),
        inputs=tuple(builder.inputs),
        outputs=tuple(builder.outputs),
        persistent=lowering.shapes.persistent,
        round_starts=tuple(lowering.round_starts),
        workload=workload,
        model=model_ref(spec),
        recipe=lowering.recipe.model_dump(mode="json"),
        model_flops=model_flops_per_step(spec, workload, lowering.recipe),
        library_bytes=max(map(library_bytes, builder.calls.values()), default=0),
    )


def settled(recipe: Recipe) -> Recipe:
    """With kernels, and with the optimizer where the recipe can have it."""
    changes: dict[str, object] = {"kernels": recipe.implementations}
    if not recipe.places_among((recipe.optimizer,)):
        if recipe.optimizer != "device":
            raise TwinstreamError(
                f"the optimizer '{recipe.optimizer}' cannot clip: the norm of all gradients is "
                'made on the device; lower with Recipe(optimizer="device_after_backward")'
            )
        changes["optimizer"] = "device_after_backward"
    return recipe.model_copy(update=changes)


def lower_again(schedule: Schedule) -> Chain:
    """The chain that a schedule was planned for, from what the schedule says of itself.

    One that consumes is the flush of a chain: its updates alone.

    Raises:
        TwinstreamError: the schedule's model or recipe is not one that this version knows.
    """
    try:
        spec = ModelSpec.model_validate_json(json.dumps(schedule.model.spec))
        recipe = Recipe.model_validate_json(json.dumps(schedule.recipe))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise TwinstreamError(
            f"the schedule's model or recipe is not valid at '{place}': {first['msg']}"
        ) from None
    chain = lower(spec, schedule.workload, recipe)
    return flush_chain(chain) if schedule.consumed else chain


def model_ref(spec: ModelSpec) -> ModelRef:
    usual = spec.usual_fields
    told = spec.model_dump_json(exclude_none=True, exclude=usual)
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    fields = spec.model_dump(mode="json", exclude_none=True, exclude=usual)
    return ModelRef(name=spec.name, content_hash=digest, spec=fields)


class StepLowering:
    """Adds a step's tasks to a chain; a stage of a pipeline adds them in another order."""

    def __init__(self, spec: ModelSpec, workload: Workload, recipe: Recipe) -> None:
        self.spec, self.workload, self.recipe = spec, workload, recipe
        self.builder = ChainBuilder()
        self.shapes = Shapes(spec, workload, recipe)
        self.calls = KernelCalls(self.builder, spec, workload, recipe)
        self.trained = frozenset(trained_groups(spec, recipe))
        self.round_starts: list[int] = []

    def run(self) -> None:
        declare_tensors(self.builder, self.shapes)
        self.builder.inputs.append(
            Input(tensor="step_state", version=1, source="step_state", index=0)
        )
        state = self.builder.write("step_state", "step_state")
        step_state = state.model_copy(update={"mode": "read"})
        if self.workload.forward_only:
            self._forward_alone(step_state)
        else:
            self._rounds(step_state)
        loss = self.builder.read("loss", "loss")
        self.builder.outputs.append(Output(tensor="loss", version=loss.version, sink="loss"))
        if self.recipe.clips and not self.workload.forward_only:
            norm = self.builder.read("norm", "grad_norm")
            output = Output(tensor="grad_norm", version=norm.version, sink="grad_norm")
            self.builder.outputs.append(output)

    def _rounds(self, step_state: TaskOperand) -> None:
        self.optimizer = OptimizerTasks(self.builder, self.shapes, self.recipe, step_state)
        for round_ in range(self.workload.rounds_per_step):
            self.round_starts.append(len(self.builder.tasks))
            self._forward(round_)
            self._head(round_)
            first = first_backward_layer(self.spec, self.recipe)
            for layer in reversed(range(first, self.spec.num_layers)):
                self._backward_layer(round_, layer)
            if "embedding" in self.trained:
                self._embed_backward(round_)

    def _forward_alone(self, step_state: TaskOperand) -> None:
        self.round_starts.append(0)
        self._forward(0)
        self._head_alone(step_state)

    def _head_alone(self, step_state: TaskOperand) -> None:
        """The loss of a round, and no gradients."""
        builder, work = self.builder, self.calls.work().head_evaluate
        call = self.calls.other("head_evaluate", work(self._row_slice), **self._head_attributes)
        for chunk in self._chunks_reversed():
            operands = [
                *self._head_inputs(chunk), builder.accumulate("loss", "loss"), step_state
            ]  # fmt: skip
            if self.spec.tied_embeddings:
                operands.append(builder.read("embedding", self.shapes.parameters("embedding")))
            self._add("head_loss", call, operands, round_=0, chunk=chunk)

    def _chunks(self) -> range:
        """The chunks of the round that is being lowered."""
        return range(self.workload.chunks_per_round)

    def _chunks_reversed(self) -> range:
        return self._chunks()[::-1]

    def _forward(self, round_: int) -> None:
        builder = self.builder
        for chunk in self._chunks():
            index = round_ * self.workload.chunks_per_round + chunk
            for source in ("tokens", "sequences") if self.workload.packing else ("tokens",):
                fed = builder.write(source, f"{source}.{chunk}")
                builder.inputs.append(
                    Input(tensor=fed.tensor, version=fed.version, source=source, index=index)
                )
        self._embed_forward(round_)
        for layer in range(self.spec.num_layers):
            self._forward_layer(round_, layer)

    def _embed_forward(self, round_: int) -> None:
        builder = self.builder
        self._begin_group("embedding", round_)
        for chunk in self._chunks():
            operands = [
                builder.read("parameters", self.shapes.parameters("embedding")),
                builder.read("tokens", f"tokens.{chunk}"),
                builder.write("output", self.shapes.hidden(0, chunk)),
            ]
            call = self.calls.other("embed_forward", self.calls.work().embed_forward())
            self._add("embed_forward", call, operands, round_=round_, chunk=chunk)

    def _forward_layer(self, round_: int, layer: int) -> None:
        builder = self.builder
        self._begin_group(str(layer), round_)
        self._begin_group(adapter_group(layer), round_)
        for chunk in self._chunks():
            operands = [
                *self._block_inputs(layer, chunk),
                builder.write("norms", f"norms.{layer}.{chunk}"),
                *([builder.write("low", f"low.{layer}.{chunk}")] if self.recipe.lora else []),
                builder.write("kv", self.shapes.kv(layer, chunk)),
                builder.write("attention", f"attention.{layer}.{chunk}"),
                builder.write("projections", f"projections.{layer}.{chunk}"),
                builder.write("output", self.shapes.hidden(layer + 1, chunk)),
            ]
            call = self.calls.block("block_forward", chunk)
            self._add("block_forward", call, operands, round_=round_, layer=layer, chunk=chunk)

    def _begin_group(self, group: str, round_: int) -> None:
        if group in self.trained and not self.workload.forward_only:
            self.optimizer.before_group(group, round_)

    def _block_inputs(self, layer: int, chunk: int) -> list[TaskOperand]:
        operands = [
            self.builder.read("parameters", self.shapes.parameters(str(layer))),
            self.builder.read("hidden", self.shapes.hidden(layer, chunk)),
        ]
        if self.recipe.lora is not None:
            adapters = self.shapes.parameters(adapter_group(layer))
            operands.append(self.builder.read("adapters", adapters))
        if self.workload.packing is not None:
            operands.append(self.builder.read("sequences", f"sequences.{chunk}"))
        if before := chunk % self.workload.chunks_per_sequence:
            context = self.shapes.context(layer, chunk)
            operands.append(self.builder.read("context", context, num_parts=before))
        return operands

    def _head(self, round_: int) -> None:
        builder, tied = self.builder, self.spec.tied_embeddings
        self._begin_group("head", round_)
        call = self.calls.other(
            "head_loss",
            self.calls.work().head_loss(self._row_slice),
            **self._head_attributes,
            **frozen_attribute("head" not in self.trained),
            **gradient_attribute(self.recipe, self.spec.dtype),
        )
        for chunk in self._chunks_reversed():
            operands = [
                *self._head_inputs(chunk),
                builder.write("d_hidden", f"d_hidden.{chunk}"),
                *self._gradient("gradients", "head", round_),
                builder.accumulate("loss", "loss"),
                self.optimizer.step_state,
            ]
            if tied:
                operands.append(builder.read("embedding", self.shapes.parameters("embedding")))
                operands += self._gradient("embedding_gradients", "embedding", round_)
            self._add("head_loss", call, operands, round_=round_, chunk=chunk)
        self._after_group("head", round_)

    def _gradient(self, name: str, group: str, round_: int) -> list[TaskOperand]:
        """The operand that takes a group's gradient, if the group is trained."""
        if group not in self.trained:
            return []
        return [self.optimizer.gradient(name, group, round_)]

    def _after_group(self, group: str, round_: int) -> None:
        if group in self.trained:
            self.optimizer.after_group(group, round_)

    @property
    def _row_slice(self) -> int:
        return self.recipe.row_slice(self.workload.chunk_tokens)

    @property
    def _head_attributes(self) -> dict[str, Attribute]:
        return {
            "norm_eps": self.spec.norm_eps,
            "tied": self.spec.tied_embeddings,
            "row_slice": self._row_slice,
        }

    def _head_inputs(self, chunk: int) -> list[TaskOperand]:
        return [
            self.builder.read("parameters", self.shapes.parameters("head")),
            self.builder.read("hidden", self.shapes.hidden(self.spec.num_layers, chunk)),
            self.builder.read("tokens", f"tokens.{chunk}"),
        ]

    def _backward_layer(self, round_: int, layer: int) -> None:
        builder = self.builder
        for chunk in self._chunks_reversed():
            self._recomputes(round_, layer, chunk)
            reads = [
                *self._block_inputs(layer, chunk),
                *self._block_scalars(layer, chunk),
                builder.read("kv", self.shapes.kv(layer, chunk)),
                builder.read("attention", f"attention.{layer}.{chunk}"),
                builder.read("projections", f"projections.{layer}.{chunk}"),
                builder.update("d_hidden", f"d_hidden.{chunk}"),
                *self._gradient("gradients", str(layer), round_),
                *self._gradient("adapter_gradients", adapter_group(layer), round_),
            ]
            if self.workload.sliced:
                reads.append(self._d_context(chunk))
            call = self.calls.block("block_backward", chunk, frozen=str(layer) not in self.trained)
            task_id = self._add(
                "block_backward", call, reads, round_=round_, layer=layer, chunk=chunk
            )
            builder.bind_recomputes(before=task_id)
        self._after_group(str(layer), round_)
        self._after_group(adapter_group(layer), round_)

    def _block_scalars(self, layer: int, chunk: int) -> list[TaskOperand]:
        """What forward leaves of each token in a few numbers, and no recompute makes again."""
        names = ("norms", "low") if self.recipe.lora else ("norms",)
        return [self.builder.read(name, f"{name}.{layer}.{chunk}") for name in names]

    def _recomputes(self, round_: int, layer: int, chunk: int) -> None:
        builder = self.builder
        group = f"r{round_}.block.{layer}.{chunk}"
        for kernel, level in (
            ("block_recompute_attention", "ATTENTION"),
            ("block_recompute_input", "INPUT"),
        ):
            operands = [
                *self._block_inputs(layer, chunk),
                *self._block_scalars(layer, chunk),
            ]
            if level == "ATTENTION":
                operands = [operand for operand in operands if operand.name != "context"]
                operands.append(builder.read("attention", f"attention.{layer}.{chunk}"))
            else:
                operands.append(builder.read("kv", self.shapes.kv(layer, chunk)))
                operands.append(builder.again("attention", f"attention.{layer}.{chunk}"))
            operands.append(builder.again("projections", f"projections.{layer}.{chunk}"))
            label = Label(kind="block_recompute", layer=layer, chunk=chunk, round=round_,
                          level=level)  # fmt: skip
            call = self.calls.block(kernel, chunk)
            builder.add_recompute(group, f"{group}.recompute.{level}", call, operands, label)

    def _d_context(self, chunk: int) -> TaskOperand:
        """Gradients of the K and V this chunk saw; the sequence's last chunk starts them."""
        per_sequence = self.workload.chunks_per_sequence
        sequence, position = divmod(chunk, per_sequence)
        make = self.builder.write if position == per_sequence - 1 else self.builder.update
        return make("d_context", f"d_context.{sequence}", num_parts=position + 1)

    def _embed_backward(self, round_: int) -> None:
        builder = self.builder
        gradient = gradient_attribute(self.recipe, self.spec.dtype)
        call = self.calls.other("embed_backward", self.calls.work().embed_backward(), **gradient)
        for chunk in self._chunks_reversed():
            operands = [
                builder.read("tokens", f"tokens.{chunk}"),
                builder.read("d_hidden", f"d_hidden.{chunk}"),
                self.optimizer.gradient("gradients", "embedding", round_),
            ]
            self._add("embed_backward", call, operands, round_=round_, chunk=chunk)
        self._after_group("embedding", round_)

    def _add(
        self, kind: str, call: str, operands: list[TaskOperand], *, round_: int, chunk: int,
        layer: int | None = None,
    ) -> str:  # fmt: skip
        place = f"{kind}.{layer}.{chunk}" if layer is not None else f"{kind}.{chunk}"
        task_id = f"r{round_}.{place}"
        label = Label(kind=kind, layer=layer, chunk=chunk, round=round_)
        self.builder.add(task_id, call, operands, label)
        return task_id
