"""A stage's blocks, embedding and head by our own kernels, as parts with sums between them.

A block is two sums: attention's, and the feed-forward network's. Each part makes its piece of one
by a task of its own, ranks exchange the pieces, and a task adds them up. Norms are computed on
every rank alike, or of its tokens (`token_tasks`). Pieces of a chunk are exchanged while the next
chunk's are made.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from twinstream.models.decoders.parted import PartedSpec
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.part_work import (
    add_parts,
    head_part_backward,
    head_part_sums,
    norm_parts_backward,
    parts_loss,
)
from twinstream.models.layout import EMBEDDING, HEAD, PART
from twinstream.models.lowering.chain_builder import CollectiveCall, by_rank
from twinstream.models.lowering.declarations import declare_groups
from twinstream.models.lowering.decoder_calls import KernelCalls, frozen_attribute
from twinstream.models.lowering.optimizer_tasks import gradient_attribute
from twinstream.models.lowering.parts.part_optimizer import PartOptimizer
from twinstream.models.lowering.parts.part_shapes import (
    LOSS_SUMS,
    PIECES,
    PartShapes,
    declare_contexts,
    declare_parts,
)
from twinstream.models.lowering.stage_cut import StageCut
from twinstream.models.lowering.task_blocks import TaskBlocks
from twinstream.models.providers.flops import model_flops_per_step
from twinstream.models.recipes.adapter_layout import adapter_group, lora_of_layer
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import Attribute, Label, TaskOperand
from twinstream.schedule.workload import Workload


class PartTasks(TaskBlocks):
    """Adds the tasks of a stage of a training step, or of an evaluation, in parts."""

    shapes: PartShapes
    groups: PartOptimizer
    spec: PartedSpec
    shapes_kind = PartShapes
    groups_kind = PartOptimizer
    updates_a_layer = 2

    def __init__(self, spec: ModelSpec, workload: Workload, recipe: Recipe, cut: StageCut) -> None:
        layout = cut.layout
        super().__init__(PartedSpec.of(spec, layout.tp, layout.num_parts), workload, recipe, cut)
        self.calls = KernelCalls(self.builder, self.spec.part, self.workload, recipe)

    def model_flops(self) -> int:
        return model_flops_per_step(self.spec.whole, self.workload, self.recipe)

    def _declare(self) -> None:
        declare_groups(self.builder, self.shapes)
        declare_parts(self.builder, self.shapes)
        if self.workload.sliced:
            self._declare_contexts()

    def _declare_contexts(self) -> None:
        declare_contexts(self.builder, self.shapes)

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
        write = self.builder.write
        for chunk in self._prepared(self._chunks(), partial(self._add_attention, layer)):
            for number in range(self.spec.parts_each):
                operands = [
                    *self._mlp_inputs(layer, chunk, number),
                    write("projections", f"gate_up.{layer}.{chunk}{PART}{number}"),
                    self._piece(chunk, number),
                ]
                call = self.calls.block("mlp_part_forward", chunk, layer)
                self._task("mlp_forward", chunk, layer, call, operands, number)
            self._exchange_pieces("mlp", chunk, layer)
        for chunk in self._chunks():
            x_o, output = f"x_o.{layer}.{chunk}", self.shapes.hidden(layer + 1, chunk)
            self._add_up("mlp_added", chunk, layer, x_o, output)

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
        for chunk in self._prepared(self._chunks_reversed(), partial(self._gather_x_o, layer)):
            for number in range(self.spec.parts_each):
                self._mlp_backward(layer, chunk, number)
            self._exchange_pieces("mlp_backward", chunk, layer)
        self._backward_attention(layer)
        for chunk in self._chunks_reversed():
            self._norm_backward("attention_norm", chunk, layer, self.shapes.hidden(layer, chunk))
        adapters = self.spec.adapter_parts(adapter_group(layer))
        for group in (*reversed(self.spec.layer_groups(layer)), *reversed(adapters)):
            self._after_group(group, round_)

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
        builder, gate_up = self.builder, f"gate_up.{layer}.{chunk}{PART}{number}"
        inputs = self._mlp_inputs(layer, chunk, number)
        again = self.calls.block("mlp_part_recompute", chunk, layer)
        made = [*inputs, builder.again("projections", gate_up)]
        self._recompute("mlp", (chunk, layer, number), again, made, ("ATTENTION", "INPUT"))
        operands = [
            *inputs,
            builder.read("projections", gate_up),
            self._d_hidden(chunk),
            *self._part_gradients(layer, number, chunk),
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
        x_o = self.builder.read("x_o", self.shapes.whole(f"x_o.{layer}.{chunk}", chunk))
        return [*self._weights(layer, number), x_o]

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
        """Those of a part's weights and adapters; and its piece of those of all parts' adapters."""
        group = adapter_group(layer)
        found = self._gradient_of(f"{layer}{PART}{number}", chunk)
        found += self._gradient_of(f"{group}{PART}{number}", chunk, "adapter_gradients")
        if group in self.trained:
            piece = self.shapes.piece_of_gradient(group, number, chunk)
            found.append(self.builder.accumulate("shared_adapter_gradients", piece))
        return found

    def _frozen(self, layer: int) -> frozenset[str]:
        """The layer, where its parts have no gradients."""
        is_frozen = f"{layer}{PART}0" not in self.trained
        return frozenset({str(layer)} if is_frozen else ())

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

    def _gradient_of(self, group: str, chunk: int, name: str = "gradients") -> list[TaskOperand]:
        """Where a chunk's contribution to a group's gradient is added to."""
        if group not in self.trained:
            return []
        return [self.builder.accumulate(name, self.shapes.sum_of(f"grad.{group}", chunk))]

    def _after_group(self, group: str, round_: int) -> None:
        if self._completes and group in self.trained:
            self._add_up_own(group)
        super()._after_group(group, round_)

    def _add_up_own(self, group: str) -> None:
        """Add up what parts have made of a group's gradient."""
        self.groups.add_up_shared(group)

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

    # Hidden states of all tokens, where ranks have slices of them (`token_tasks`)

    def _prepared(self, chunks: range, prepare: Callable[[int], None]) -> Iterator[int]:
        """Chunks, each when what its tasks read is made."""
        for chunk in chunks:
            prepare(chunk)
            yield chunk

    def _gather_rows(self, what: str, layer: int | None, tensor: str, chunk: int) -> None:
        """Each rank has the hidden states of all tokens."""

    def _gather_hidden(self, what: str, layer: int, chunk: int) -> None:
        self._gather_rows(what, layer, self.shapes.hidden(layer, chunk), chunk)

    def _gather_gradient(self, what: str, layer: int | None, chunk: int) -> None:
        self._gather_rows(f"d_{what}", layer, f"d_hidden.{chunk}", chunk)

    def _d_hidden(self, chunk: int) -> TaskOperand:
        return self.builder.read("d_hidden", self.shapes.whole(f"d_hidden.{chunk}", chunk))

    def _head_norm_gradients(self, layer: int, number: int, chunk: int) -> list[TaskOperand]:
        """Where a part adds its gradients of norms that heads share: here behind its piece."""
        return []

    # Sums over parts

    def _piece(self, chunk: int, number: int) -> TaskOperand:
        """Where a part leaves its piece of a sum."""
        return self.builder.write("output", self.shapes.of_part(f"{PIECES}.{chunk}", number))

    def _exchange_pieces(self, what: str, chunk: int, layer: int | None) -> None:
        """Each rank gets the pieces of all parts, or their sum by the transport."""
        tensor = f"{PIECES}.{chunk}"
        if self.shapes.gathers_pieces:
            self._gathered(what, tensor, chunk, layer)
        elif self.cut.layout.tp > 1:
            pieces = [self.builder.update("pieces", tensor)]
            self._communicate(what, "all_reduce", pieces, chunk, layer)

    def _pieces(self, chunk: int) -> TaskOperand:
        name = f"all_{PIECES}.{chunk}" if self.shapes.gathers_pieces else f"{PIECES}.{chunk}"
        return self.builder.read("pieces", name)

    def _gathered(self, what: str, tensor: str, chunk: int, layer: int | None) -> str:
        """Gather what all ranks' parts have made; return where it is."""
        own = self.builder.read("own", tensor)
        operands = [own, self.builder.write("all", f"all_{tensor}")]
        self._communicate(what, "all_gather", operands, chunk, layer)
        return f"all_{tensor}"

    def _communicate(
        self, what: str, collective: str, operands: list[TaskOperand], chunk: int, layer: int | None
    ) -> None:
        said = CollectiveCall(collective, ("tp",), "tp")
        label = self.builder.label("tp", layer, chunk)
        self.builder.communicate(self._named(f"tp.{what}", chunk, layer), said, operands, label)

    def _add_up(
        self, kind: str, chunk: int, layer: int | None, residual: str | None, output: str
    ) -> None:
        """Add up the pieces of all parts, and what they are added to."""
        builder, num_pieces = self.builder, self.shapes.num_pieces
        rows, has_residual = self.shapes.rows, residual is not None
        cost = add_parts(self.calls.work(), rows, num_pieces, residual=has_residual)
        call = self.calls.other("add_parts", cost, self._of_pieces, ".residual" * has_residual)
        added = [] if residual is None else [builder.read("hidden", residual)]
        operands = [self._pieces(chunk), *added, builder.write("output", output)]
        self._task(kind, chunk, layer, call, operands)

    def _norm_backward(self, norm: str, chunk: int, layer: int | None, x: str) -> None:
        """Add up the pieces of a norm's gradient and take them through it."""
        builder, group = self.builder, HEAD if layer is None else str(layer)
        told: dict[str, Attribute] = {
            **self._of_pieces, "norm": norm, "norm_eps": self.spec.norm_eps,
            **gradient_attribute(self.recipe, self.spec.dtype),
        }  # fmt: skip
        if layer is not None and self.spec.qk_norm:
            told["head_dim"] = self.spec.head_dim
        call = self.calls.other("norm_parts_backward", self._norm_cost, told, f".{norm}")
        make = builder.write if layer is None else builder.update
        operands = [
            self._pieces(chunk),
            builder.read("parameters", self.shapes.parameters(group)),
            builder.read("hidden", x),
            make("d_hidden", f"d_hidden.{chunk}"),
            *self._norm_gradient(group, chunk),
        ]
        self._task(f"{norm}_backward", chunk, layer, call, operands)

    def _norm_gradient(self, group: str, chunk: int) -> list[TaskOperand]:
        return self._gradient_of(group, chunk)

    @property
    def _norm_cost(self) -> tuple[Work, ...]:
        return norm_parts_backward(self.calls.work(), self.shapes.rows, self.shapes.num_pieces)

    @property
    def _of_pieces(self) -> dict[str, Attribute]:
        shapes = self.shapes
        return {"num_pieces": shapes.num_pieces, "piece_elements": shapes.pieces.num_elements}

    def _end_call(
        self, kernel: str, cost: tuple[Work, ...], number: int,
        told: dict[str, Attribute] | None = None,
    ) -> str:  # fmt: skip
        """Of a part of the vocabulary: a call of its own, since its rows begin elsewhere."""
        rows, each = self.spec.part.vocab_size, self.spec.parts_each
        first = [(rank * each + number) * rows for rank in range(self.spec.tp)]
        where = by_rank("tp", {"first_row": first})
        return self.calls.other(kernel, cost, {**(told or {}), **where}, f"{PART}{number}")

    def _named(self, kind: str, chunk: int, layer: int | None, number: int | None = None) -> str:
        place = f"{chunk}" if layer is None else f"{layer}.{chunk}"
        return f"r0.{kind}.{place}" + ("" if number is None else f"{PART}{number}")

    def _task(
        self, kind: str, chunk: int, layer: int | None, call: str,
        operands: Sequence[TaskOperand], number: int | None = None,
    ) -> str:  # fmt: skip
        name = self._named(kind, chunk, layer, number)
        self.builder.add(name, call, operands, self.builder.label(kind, layer, chunk, 0))
        return name
