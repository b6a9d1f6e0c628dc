"""A stage's blocks, embedding and head by our own kernels, as parts with sums between them.

A block is two sums: attention's, and the feed-forward network's. Each part makes its piece of one
by a task of its own, ranks exchange the pieces, and a task adds them up. Norms are computed on
every rank alike, or of its tokens (`token_tasks`). Pieces of a chunk are exchanged while the next
chunk's are made.
"""

from collections.abc import Callable
from functools import partial

from twinstream.models.kernel_costs.part_work import (
    head_part_backward,
    head_part_sums,
    parts_loss,
)
from twinstream.models.layout import EMBEDDING, EXPERTS, HEAD, PART, dense_width
from twinstream.models.lowering.decoder_calls import frozen_attribute
from twinstream.models.lowering.optimizer_tasks import gradient_attribute
from twinstream.models.lowering.parts.part_shapes import (
    LOSS_SUMS,
)
from twinstream.models.lowering.parts.part_sums import PartSums
from twinstream.models.recipes.adapter_layout import adapter_group, lora_of_layer
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.ops import Attribute, Label, TaskOperand


class PartTasks(PartSums):
    """Adds the tasks of a stage of a training step, or of an evaluation, in parts."""

    # Embedding

    def _embed_forward(self, round_: int) -> None:
        read, work = self.builder.read, self.calls.work()
        for chunk in self._chunks():
            for number, group in enumerate(self.spec.parts_of(EMBEDDING)):
                call = self._end_call("embed_part_forward", work.embed_forward(), number)
                operands = [
                    read("parameters", self.shapes.parameters(group)),
                    read("tokens", f"tokens.{chunk}"),
                    self._piece(chunk, number),
                ]
                self._task("embed", chunk, None, call, operands, number)
            self._exchange_pieces("embed", chunk, None)
        for chunk in self._chunks():
            self._add_up("embedded", chunk, None, None, self.shapes.hidden(0, chunk))

    def _embed_backward(self, round_: int) -> None:
        work, told = self.calls.work(), gradient_attribute(self.recipe, self.spec.dtype)
        gather = partial(self._gather_gradient, "embed", None)
        for chunk in self._prepared(self._chunks_reversed(), gather):
            for number, group in enumerate(self.spec.parts_of(EMBEDDING)):
                call = self._end_call("embed_part_backward", work.embed_backward(), number, told)
                operands = [
                    self.builder.read("tokens", f"tokens.{chunk}"),
                    self._d_hidden(chunk),
                    *self._gradient_of(group, chunk),
                ]
                self._task("embed_backward", chunk, None, call, operands, number)
        for group in reversed(self.spec.parts_of(EMBEDDING)):
            self._after_group(group, round_)

    # Blocks

    def _forward_layer(self, round_: int, layer: int) -> None:
        self._forward_attention(layer)
        self._forward_mlp(layer)
        for chunk in self._chunks():
            x_o, output = f"x_o.{layer}.{chunk}", self.shapes.hidden(layer + 1, chunk)
            self._add_up("mlp_added", chunk, layer, x_o, output)

    def _forward_mlp(self, layer: int) -> None:
        """All chunks up to the pieces of the output."""
        for chunk in self._prepared(self._chunks(), partial(self._add_attention, layer)):
            for number in range(self.spec.parts_each):
                operands = [
                    *self._mlp_inputs(layer, chunk, number),
                    *self._routes(layer, chunk, chooses=number == 0),
                    *self._gate_up(self.builder.write, layer, chunk, number),
                    self._piece(chunk, number),
                ]
                call = self.calls.block("mlp_part_forward", chunk, layer)
                self._task("mlp_forward", chunk, layer, call, operands, number)
            self._exchange_pieces("mlp", chunk, layer)

    def _add_attention(self, layer: int, chunk: int) -> None:
        hidden, x_o = self.shapes.hidden(layer, chunk), f"x_o.{layer}.{chunk}"
        self._add_up("attention_added", chunk, layer, hidden, x_o)
        self._gather_rows("x_o", layer, x_o, chunk)

    def _forward_attention(self, layer: int) -> None:
        """All chunks up to the pieces of attention's output."""
        write, gather = self.builder.write, partial(self._gather_hidden, "hidden", layer)
        for chunk in self._prepared(self._chunks(), gather):
            for number in range(self.spec.parts_each):
                where = f"{layer}.{chunk}{PART}{number}"
                operands = [
                    *self._attention_inputs(layer, chunk, number),
                    write("kv", self.shapes.kv_of(layer, chunk, number)),
                    write("attention", f"attention.{where}"),
                    write("projections", f"q.{where}"),
                    self._piece(chunk, number),
                ]
                call = self.calls.block("attention_part_forward", chunk, layer)
                self._task("attention_forward", chunk, layer, call, operands, number)
            self._exchange_pieces("attention", chunk, layer)

    def _backward_layer(self, round_: int, layer: int) -> None:
        self._backward_mlp(layer)
        self._backward_attention(layer)
        for chunk in self._chunks_reversed():
            self._norm_backward("attention_norm", chunk, layer, self.shapes.hidden(layer, chunk))
        adapters = self.spec.adapter_parts(adapter_group(layer))
        for group in (*reversed(self.spec.layer_groups(layer)), *reversed(adapters)):
            self._after_group(group, round_)

    def _backward_mlp(self, layer: int) -> None:
        for chunk in self._prepared(self._chunks_reversed(), partial(self._gather_x_o, layer)):
            for number in range(self.spec.parts_each):
                self._mlp_backward(layer, chunk, number)
            self._exchange_pieces("mlp_backward", chunk, layer)

    def _gather_x_o(self, layer: int, chunk: int) -> None:
        self._gather_rows("x_o_again", layer, f"x_o.{layer}.{chunk}", chunk)
        self._gather_gradient("mlp", layer, chunk)

    def _back_to_attention(self, layer: int, chunk: int) -> None:
        """Through the norm before the feed-forward network."""
        self._norm_backward("ffn_norm", chunk, layer, f"x_o.{layer}.{chunk}")
        self._gather_hidden("hidden_again", layer, chunk)
        self._gather_gradient("attention", layer, chunk)

    def _backward_attention(self, layer: int) -> None:
        """All chunks back through the norm before the feed-forward network, and attention."""
        back = partial(self._back_to_attention, layer)
        for chunk in self._prepared(self._chunks_reversed(), back):
            for number in range(self.spec.parts_each):
                self._attention_backward(layer, chunk, number)
            self._exchange_pieces("attention_backward", chunk, layer)

    def _mlp_backward(self, layer: int, chunk: int, number: int) -> None:
        builder = self.builder
        inputs = [*self._mlp_inputs(layer, chunk, number), *self._routes(layer, chunk)]
        made = [*inputs, *self._gate_up(builder.again, layer, chunk, number)]
        place = (chunk, layer, number)
        if self._keeps_experts(layer):
            experts = [one for one in made if one.name != "projections"]
            again = self.calls.block("experts_part_recompute", chunk, layer)
            self._recompute("mlp", place, again, experts, ("EXPERTS",))
        if len(made) > len(inputs):  # or there is nothing to make again
            again = self.calls.block("mlp_part_recompute", chunk, layer)
            self._recompute("mlp", place, again, made, ("ATTENTION", "INPUT"))
        operands = [
            *inputs,
            *self._gate_up(builder.read, layer, chunk, number),
            *self._expert_projections(layer, chunk),
            self._d_hidden(chunk),
            *self._mlp_gradients(layer, number, chunk),
            self._piece(chunk, number),
        ]
        call = self.calls.block("mlp_part_backward", chunk, layer, frozen=self._frozen(layer))
        task = self._task("mlp_backward", chunk, layer, call, operands, number)
        builder.bind_recomputes(before=task)

    def _attention_backward(self, layer: int, chunk: int, number: int) -> None:
        builder, where = self.builder, f"{layer}.{chunk}{PART}{number}"
        inputs = [
            *self._attention_inputs(layer, chunk, number),
            builder.read("kv", self.shapes.kv_of(layer, chunk, number)),
        ]
        again = self.calls.block("attention_part_recompute", chunk, layer)
        made = [
            *inputs,
            builder.again("attention", f"attention.{where}"),
            builder.again("projections", f"q.{where}"),
        ]
        self._recompute("attention", (chunk, layer, number), again, made)
        operands = [
            *inputs,
            builder.read("attention", f"attention.{where}"),
            builder.read("projections", f"q.{where}"),
            self._d_hidden(chunk),
            *self._part_gradients(layer, number, chunk),
            *self._head_norm_gradients(layer, number, chunk),
            self._piece(chunk, number),
        ]
        if self.workload.sliced:
            sequence, position = divmod(chunk, self.workload.chunks_per_sequence)
            last = position == self.workload.chunks_per_sequence - 1
            make = builder.write if last else builder.update
            context = f"d_context.{sequence}{PART}{number}"
            operands.append(make("d_context", context, num_parts=position + 1))
        call = self.calls.block("attention_part_backward", chunk, layer, frozen=self._frozen(layer))
        task = self._task("attention_backward", chunk, layer, call, operands, number)
        builder.bind_recomputes(before=task)

    def _attention_inputs(self, layer: int, chunk: int, number: int) -> list[TaskOperand]:
        read = self.builder.read
        operands = [
            *self._weights(layer, number),
            read("hidden", self.shapes.whole(self.shapes.hidden(layer, chunk), chunk)),
        ]
        if self.workload.packing is not None:
            operands.append(read("sequences", f"sequences.{chunk}"))
        if before := chunk % self.workload.chunks_per_sequence:
            context = self.shapes.context_of(layer, chunk, number)
            operands.append(read("context", context, num_parts=before))
        return operands

    def _mlp_inputs(self, layer: int, chunk: int, number: int) -> list[TaskOperand]:
        read, parameters = self.builder.read, self.shapes.parameters
        found = self._weights(layer, number)
        if self._keeps_experts(layer):
            found.append(read("experts", parameters(f"{layer}{EXPERTS}{PART}{number}")))
        if not self._has_dense(layer):
            found = [one for one in found if one.name != "parameters"]
        return [*found, read("x_o", self.shapes.whole(f"x_o.{layer}.{chunk}", chunk))]

    def _expert_projections(self, layer: int, chunk: int) -> list[TaskOperand]:
        """What comes back of rows that were sent: here none are."""
        return []

    def _has_dense(self, layer: int) -> bool:
        """Whether a layer has a network that all tokens go through."""
        return dense_width(self.spec.layer(layer)) > 0

    def _routes(self, layer: int, chunk: int, *, chooses: bool = False) -> list[TaskOperand]:
        """Which experts tokens go to: a rank's first part chooses for all of them."""
        if not self.shapes.with_experts(layer):
            return []
        if chooses:
            return self._choice(layer, chunk)
        return [self.builder.read("routes", f"routes.{layer}.{chunk}")]

    def _gate_up(
        self, use: Callable[[str, str], TaskOperand], layer: int, chunk: int, number: int
    ) -> list[TaskOperand]:
        """Gate and up of the network of all tokens, and those of experts."""
        where = f"{layer}.{chunk}{PART}{number}"
        found = [use("projections", f"gate_up.{where}")] if self._has_dense(layer) else []
        if self._keeps_experts(layer):
            found.append(use("expert_projections", f"experts.{where}"))
        return found

    def _mlp_gradients(self, layer: int, number: int, chunk: int) -> list[TaskOperand]:
        group, keeps = f"{layer}{EXPERTS}{PART}{number}", self._keeps_experts(layer)
        has_dense = self._has_dense(layer)
        return [
            *(self._gradient_of(f"{layer}{PART}{number}", chunk) if has_dense else []),
            *(self._gradient_of(group, chunk, "expert_gradients") if keeps else []),
            *self._adapter_gradients(layer, number, chunk),
        ]

    def _weights(self, layer: int, number: int) -> list[TaskOperand]:
        """Those of all parts, and a part's own; of adapters likewise."""
        parameters, read = self.shapes.parameters, self.builder.read
        found = [
            read("shared", parameters(str(layer))),
            read("parameters", parameters(f"{layer}{PART}{number}")),
        ]
        if lora_of_layer(self.spec, self.recipe.lora, layer) is not None:
            group = adapter_group(layer)
            found.append(read("shared_adapters", parameters(group)))
            found.append(read("adapters", parameters(f"{group}{PART}{number}")))
        return found

    def _part_gradients(self, layer: int, number: int, chunk: int) -> list[TaskOperand]:
        """Those of a part's weights and adapters."""
        own = self._gradient_of(f"{layer}{PART}{number}", chunk)
        return [*own, *self._adapter_gradients(layer, number, chunk)]

    def _adapter_gradients(self, layer: int, number: int, chunk: int) -> list[TaskOperand]:
        """Those of a part's adapters, and its piece of those of all parts'."""
        group = adapter_group(layer)
        found = self._gradient_of(f"{group}{PART}{number}", chunk, "adapter_gradients")
        if group in self.trained:
            piece = self.shapes.piece_of_gradient(group, number, chunk)
            found.append(self.builder.accumulate("shared_adapter_gradients", piece))
        return found

    def _frozen(self, layer: int) -> frozenset[str]:
        """Those of a layer's groups whose parts have no gradients."""
        experts = [f"{layer}{EXPERTS}"] if self.shapes.with_experts(layer) else []
        groups = (str(layer), *experts)
        return frozenset(one for one in groups if f"{one}{PART}0" not in self.trained)

    def _recompute(
        self, what: str, place: tuple[int, int, int], call: str, made: list[TaskOperand],
        levels: tuple[str, ...] = ("INPUT",),
    ) -> None:  # fmt: skip
        chunk, layer, number = place
        group = self._named(what, chunk, layer, number)
        for level in levels:
            label = Label(kind="block_recompute", layer=layer, chunk=chunk, round=0, level=level)
            self.builder.add_recompute(group, f"{group}.recompute.{level}", call, made, label)

    # Head

    def _head(self, round_: int) -> None:
        """The loss from a few numbers of each part, and the gradients from the loss."""
        read, step_state = self.builder.read, self.groups.step_state
        scales = self.recipe.loss.passes > 1  # of each row one of its own
        for chunk in self._prepared(self._chunks_reversed(), self._gather_for_head):
            self._loss(chunk, step_state)
            for number, group in enumerate(self.shapes.head_parts):
                operands = [
                    *self._head_operands(chunk, group),
                    read("lse", f"lse.{chunk}"),
                    *([read("scales", f"row_scales.{chunk}")] if scales else []),
                    step_state,
                    *self._gradient_of(group, chunk),
                    self._piece(chunk, number),
                ]
                work = head_part_backward(self.calls.work(), self._row_slice)
                told = self._head_attributes | gradient_attribute(self.recipe, self.spec.dtype)
                told |= frozen_attribute(group not in self.trained)
                call = self._end_call("head_part_backward", work, number, told)
                self._task("head_backward", chunk, None, call, operands, number)
            self._exchange_pieces("head", chunk, None)
        for chunk in self._chunks_reversed():
            self._norm_backward("final_norm", chunk, None, self._top(chunk))
        untied = () if self.spec.tied_embeddings else self.shapes.head_parts
        for group in (*reversed(untied), HEAD):
            self._after_group(group, round_)

    def _head_alone(self, step_state: TaskOperand) -> None:
        """The loss of a round, and no gradients."""
        for chunk in self._prepared(self._chunks_reversed(), self._gather_for_head):
            self._loss(chunk, step_state)

    def _gather_for_head(self, chunk: int) -> None:
        self._gather_rows("head_hidden", None, self._top(chunk), chunk)

    def _top(self, chunk: int) -> str:
        """The hidden states of the last layer."""
        return self.shapes.hidden(self.spec.num_layers, chunk)

    def _loss(self, chunk: int, step_state: TaskOperand) -> None:
        builder, work = self.builder, self.calls.work()
        sums = f"{LOSS_SUMS}.{chunk}"
        for number, group in enumerate(self.shapes.head_parts):
            made = builder.write("output", self.shapes.of_part(sums, number))
            cost = head_part_sums(work, self._row_slice)
            call = self._end_call("head_part_sums", cost, number, self._head_attributes)
            operands = [*self._head_operands(chunk, group), made]
            self._task("head_sums", chunk, None, call, operands, number)
        if self.cut.layout.tp > 1:
            sums = self._gathered("loss_sums", sums, chunk, None)
        parts = self.spec.parts
        loss = self.recipe.loss
        assert loss.parts_kernel is not None, "others are refused"
        cost = (*parts_loss(work, parts), *loss.works(work.tokens, self.spec.dtype))
        told = {"num_pieces": parts, **loss.attributes(self.workload)}
        call = self.calls.other(loss.parts_kernel, cost, told)
        operands = [
            builder.read("pieces", sums),
            builder.read("tokens", f"tokens.{chunk}"),
            step_state,
            builder.write("lse", f"lse.{chunk}"),
            *self._loss_operands(chunk),
            *([builder.write("scales", f"row_scales.{chunk}")] if loss.passes > 1 else []),
            builder.accumulate("loss", self._loss_of(chunk)),
        ]
        self._task("head_loss", chunk, None, call, operands)

    def _loss_of(self, chunk: int) -> str:
        """Where a chunk's loss is added to."""
        return "loss"

    def _head_operands(self, chunk: int, group: str) -> list[TaskOperand]:
        read = self.builder.read
        return [
            read("shared", self.shapes.parameters(HEAD)),
            read("parameters", self.shapes.parameters(group)),
            read("hidden", self.shapes.whole(self._top(chunk), chunk)),
            read("tokens", f"tokens.{chunk}"),
        ]

    @property
    def _head_attributes(self) -> dict[str, Attribute]:
        return {"norm_eps": self.spec.norm_eps, "row_slice": self._row_slice}


def runs_parts(recipe: Recipe) -> bool:
    """Whether a recipe names kernels of ours, which compute parts of blocks."""
    kernels = recipe.kernels
    return kernels is not None and kernels.vector != "megatron"
