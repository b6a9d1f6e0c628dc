"""A stage's blocks as parts, of ranks that have slices of every sequence (context parallelism).

A sequence is computed in parts, each a slice and its mirror image, so that all see as many keys. A
rank has some parts of each sequence, and its chunks are theirs. A layer's keys and values of all
ranks are gathered before attention, forward and once more backward. Their gradients are summed by
the rank that has made them. Each part adds up gradients of weights, and the loss, by itself; sums
of parts are added up in pairs, then those of ranks likewise.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from twinstream.models.decoders.sizes import ITEMSIZE_BYTES
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import PART
from twinstream.models.lowering.chain_builder import CollectiveCall
from twinstream.models.lowering.declarations import dense_tensor, part_of
from twinstream.models.lowering.decoder_calls import KernelCalls
from twinstream.models.lowering.parts.part_shapes import PartShapes
from twinstream.models.lowering.parts.part_sums import PartOptimizer
from twinstream.models.lowering.parts.part_tasks import PartTasks
from twinstream.models.lowering.stage_cut import StageCut
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.projecting import CP, slice_place
from twinstream.schedule.ops import TaskOperand
from twinstream.schedule.workload import Workload

Half = Literal["low", "high"]
HALVES: tuple[Half, Half] = ("low", "high")
_LATER = "later_loss"  # of all microbatches but the first


@dataclass(frozen=True)
class SequenceShapes(PartShapes):
    """Of a rank that has some chunks of every sequence: half of them low, of its first half."""

    @cached_property
    def each(self) -> int:
        """Chunks of a sequence that a rank has."""
        return self.workload.chunks_per_sequence // self.cut.layout.cp

    @property
    def half(self) -> int:
        return self.each // 2

    @property
    def num_chunks(self) -> int:
        return self.workload.chunks_per_round // self.cut.layout.cp

    @property
    def is_gathered(self) -> bool:
        """Whether other ranks have keys and values of a sequence, too."""
        return self.cut.layout.cp > 1

    @property
    def parts_of_sequence(self) -> int:
        """Parts of each sequence that a rank has."""
        layout = self.cut.layout
        return layout.num_slices // (2 * layout.cp)

    def half_of(self, chunk: int) -> Half:
        return "low" if chunk % self.each < self.half else "high"

    def part_of_sequence(self, chunk: int) -> int:
        """Which of the rank's parts of its sequence a chunk is in."""
        index = chunk % self.each
        return min(index, self.each - 1 - index) * self.parts_of_sequence // self.half

    def of_sequence_part(self, tensor: str, part: int) -> str:
        """A tensor that each part of a sequence has by itself until these are added up."""
        return tensor if part == 0 else f"{tensor}.cp{part}"

    def sum_of(self, tensor: str, chunk: int) -> str:
        return self.of_sequence_part(tensor, self.part_of_sequence(chunk))

    def sums(self, tensor: str) -> list[str]:
        return [self.of_sequence_part(tensor, part) for part in range(self.parts_of_sequence)]

    def sequences(self) -> range:
        """Of all microbatches."""
        return range(self.num_chunks // self.each)

    def keys(self, layer: int, sequence: int, number: int) -> tuple[str, ...]:
        """K and V of a rank's chunks of a sequence: of each half, or of all where it has all."""
        name = f"kv.{layer}.{sequence}{PART}{number}"
        return tuple(f"{name}.{half}" for half in HALVES) if self.is_gathered else (name,)

    def kv_of(self, layer: int, chunk: int, number: int) -> str:
        sequence, index = divmod(chunk, self.each)
        of_halves = self.keys(layer, sequence, number)
        half, index = divmod(index, self.half) if self.is_gathered else (0, index)
        return f"{of_halves[half]}.part{index}"

    def sums_of_keys(self, layer: int, sequence: int, number: int) -> list[str]:
        """What each of the rank's parts of a sequence adds to gradients of K and V."""
        return self.sums(f"d_context.{layer}.{sequence}{PART}{number}")

    def d_keys(self, layer: int, sequence: int, number: int, half: Half) -> str:
        """The summed gradients of K and V of a rank's half of a sequence's chunks."""
        if self.is_gathered:
            return f"d_kv.{sequence}{PART}{number}.{half}"
        return f"{self.sums_of_keys(layer, sequence, number)[0]}.{half}"


@dataclass(frozen=True)
class SliceCalls(KernelCalls):
    """Chunks begin where the slices of their rank do."""

    shapes: SequenceShapes = field(kw_only=True)

    def _starts(self, chunk: int) -> tuple[int, ...]:
        ranks, count = self.shapes.cut.layout.cp, self.workload.chunks_per_sequence
        index = chunk % self.shapes.each
        places = (slice_place(index, rank, ranks, count) for rank in range(ranks))
        return tuple(place * self.workload.chunk_tokens for place in places)


class SequenceOptimizer(PartOptimizer):
    """Sums of a rank's parts of sequences are added up in pairs, neighbours first."""

    shapes: SequenceShapes

    def add_up_own(self, group: str) -> None:
        super().add_up_own(group)
        self._add_up_parts_of_sequences(group, self.shapes.contributed_to(group))

    def _sum_over_ends(self, group: str) -> None:
        """Of each part of a sequence by itself, so that it does not matter which rank has it."""
        super()._sum_over_ends(group)
        self._add_up_parts_of_sequences(group, f"grad.{group}")

    def _add_up_parts_of_sequences(self, group: str, tensor: str) -> None:
        dtype = self.shapes.gradient_dtype
        count = self.builder.sizes_bytes[tensor] // ITEMSIZE_BYTES[dtype]
        sums = self.shapes.sums(tensor)
        self.add_pairwise(f"r0.add.grad.{group}", sums, count, dtype, self._layer(group))

    def add_pairwise(
        self, name: str, sums: list[str], count: int, dtype: str, layer: int | None,
        *held: TaskOperand,
    ) -> None:  # fmt: skip
        """Add up tensors of so many elements, neighbours first, into the first of them."""
        apart = 1
        while apart < len(sums):
            for place in range(0, len(sums) - apart, 2 * apart):
                both, tag = (sums[place], sums[place + apart]), f"{name}.{place}.{apart}"
                self.add_gradients(tag, *both, count, dtype, layer, *held)
            apart *= 2


class SequenceTasks(PartTasks):
    """Adds the tasks of a stage of a training step, or of an evaluation, of slices."""

    shapes: SequenceShapes
    groups: SequenceOptimizer
    shapes_kind = SequenceShapes
    groups_kind = SequenceOptimizer

    def __init__(self, spec: ModelSpec, workload: Workload, recipe: Recipe, cut: StageCut) -> None:
        super().__init__(spec, workload, recipe, cut)
        self._chunks_each //= cut.layout.cp
        told = self.builder, self.spec.part, self.workload, recipe, cut.layout
        self.calls: SliceCalls = SliceCalls(*told, shapes=self.shapes)

    def _declare(self) -> None:
        super()._declare()
        builder, shapes = self.builder, self.shapes
        gradients = {
            tensor: builder.sizes_bytes[tensor]
            for group in shapes.trained
            for tensor in (shapes.contributed_to(group), *shapes.ends(group))
        }
        for part in range(shapes.parts_of_sequence):
            for name in ("loss", _LATER):
                own = shapes.of_sequence_part(name, part)
                if own != "loss":
                    builder.declare(dense_tensor(own, "loss", "float32", (1,)))
            for tensor, size in gradients.items() if part else ():
                own = shapes.of_sequence_part(tensor, part)
                builder.declare_flat(own, size, "gradient", shapes.gradient_dtype)

    def _declare_contexts(self) -> None:
        """Keys and values of the rank's chunks, of all that a layer has gathered, and gradients."""
        shapes, dtype = self.shapes, self.spec.dtype
        tokens, count = self.workload.chunk_tokens, self.workload.chunks_per_sequence
        rows = tokens * shapes.half
        for sequence in shapes.sequences():
            for number in range(self.spec.parts_each):
                for layer in range(self.spec.num_layers):
                    held = shapes.keys(layer, sequence, number)
                    for name in held:
                        pieces = [f"part{i}" for i in range(shapes.each // len(held))]
                        self._declare_keys(name, dtype, tokens, pieces)
                    for name in shapes.sums_of_keys(layer, sequence, number):
                        self._declare_keys(name, "float32", tokens * count // 2, HALVES)
                where = f"{sequence}{PART}{number}"
                if shapes.is_gathered:
                    self._declare_keys(f"context.{where}", dtype, tokens * count // 2, HALVES)
                    for half in HALVES:
                        self._declare_keys(f"d_kv.{where}.{half}", "float32", rows, ())
        for chunk in range(shapes.num_chunks):
            for number in range(self.spec.parts_each):
                self._declare_by_heads(f"d_q.{chunk}{PART}{number}")

    def _declare_by_heads(self, name: str) -> None:
        shape = (self.workload.chunk_tokens, self.spec.part.d_q)
        self.builder.declare(dense_tensor(name, "activation", self.spec.dtype, shape))

    def _declare_keys(
        self, name: str, dtype: str, tokens: int, pieces: "list[str] | tuple[str, ...]"
    ) -> None:
        """K and V, or their gradients, of so many tokens; or of pieces of as many each."""
        part = self.spec.part
        row = (2, part.num_kv_heads, part.head_dim)
        whole = dense_tensor(name, "context", dtype, (max(1, len(pieces)) * tokens, *row))
        self.builder.declare(whole)
        for number, piece in enumerate(pieces):
            own = dense_tensor(f"{name}.{piece}", "context", dtype, (tokens, *row))
            self.builder.declare(part_of(name, own, number * own.size_bytes))

    # Forward

    def _write_keys(self, layer: int) -> None:
        builder, shapes = self.builder, self.shapes
        for half in HALVES:
            for chunk in self._of_half(half):
                for number in range(self.spec.parts_each):
                    operands = [
                        *self._weights(layer, number),
                        builder.read("hidden", shapes.hidden(layer, chunk)),
                        builder.write("kv", shapes.kv_of(layer, chunk, number)),
                    ]
                    call = self.calls.block("kv_part_forward", chunk, layer)
                    self._task("kv_forward", chunk, layer, call, operands, number)
            self._gather_keys("kv", half, layer)

    def _forward_attention(self, layer: int) -> None:
        builder = self.builder
        self._write_keys(layer)
        for chunk in self._chunks():
            for number in range(self.spec.parts_each):
                where = f"{layer}.{chunk}{PART}{number}"
                operands = [
                    *self._context_inputs(layer, chunk, number),
                    builder.write("attention", f"attention.{where}"),
                    builder.write("projections", f"q.{where}"),
                    self._piece(chunk, number),
                ]
                call = self.calls.block("context_part_forward", chunk, layer)
                self._task("attention_forward", chunk, layer, call, operands, number)
            self._exchange_pieces("attention", chunk, layer)

    def _gather_keys(self, what: str, half: Half, layer: int) -> None:
        """Keys and values of all ranks' chunks of a half of each sequence."""
        if not self.shapes.is_gathered:
            return
        said = CollectiveCall("all_gather", (CP,), CP, last_first=half == "high")
        for sequence, number in self._sequences():
            own = self.shapes.keys(layer, sequence, number)[HALVES.index(half)]
            operands = [
                self.builder.read("own", own),
                self.builder.write("all", f"context.{sequence}{PART}{number}.{half}"),
            ]
            name = f"r0.{CP}.{what}.{half}.{layer}.{sequence}{PART}{number}"
            label = self.builder.label(CP, layer, sequence * self.shapes.each)
            self.builder.communicate(name, said, operands, label)

    def _context_inputs(self, layer: int, chunk: int, number: int) -> list[TaskOperand]:
        hidden = self.builder.read("hidden", self.shapes.hidden(layer, chunk))
        return [*self._weights(layer, number), hidden, self._context(layer, chunk, number)]

    def _context(self, layer: int, chunk: int, number: int) -> TaskOperand:
        """Keys and values that a chunk sees on any of the ranks, its own among them."""
        sequence, index = divmod(chunk, self.shapes.each)
        if not self.shapes.is_gathered:
            (own,) = self.shapes.keys(layer, sequence, number)
            return self.builder.read("context", own, num_parts=index + 1)
        return self.builder.read(
            "context", f"context.{sequence}{PART}{number}", num_parts=self._halves_seen(chunk)
        )

    def _halves_seen(self, chunk: int) -> int:
        return 1 + HALVES.index(self.shapes.half_of(chunk))

    # Backward

    def _backward_layer(self, round_: int, layer: int) -> None:
        for half in HALVES[::-1]:
            self._gather_keys("kv_again", half, layer)
        super()._backward_layer(round_, layer)

    def _backward_attention(self, layer: int) -> None:
        for half in HALVES[::-1]:
            for chunk in self._of_half(half)[::-1]:
                self._norm_backward("ffn_norm", chunk, layer, f"x_o.{layer}.{chunk}")
                for number in range(self.spec.parts_each):
                    self._context_backward(layer, chunk, number)
            self._sum_d_keys(half, layer)
        for chunk in self._chunks_reversed():
            for number in range(self.spec.parts_each):
                self._qkv_backward(layer, chunk, number)
            self._exchange_pieces("attention_backward", chunk, layer)

    def _context_backward(self, layer: int, chunk: int, number: int) -> None:
        builder, shapes, where = self.builder, self.shapes, f"{layer}.{chunk}{PART}{number}"
        again = self.calls.block("context_part_recompute", chunk, layer)
        made = [
            *self._context_inputs(layer, chunk, number),
            builder.again("attention", f"attention.{where}"),
            builder.again("projections", f"q.{where}"),
        ]
        self._recompute("attention", (chunk, layer, number), again, made)
        part = shapes.part_of_sequence(chunk)
        last = shapes.each - 1 - part * shapes.half // shapes.parts_of_sequence
        sums = shapes.sums_of_keys(layer, chunk // shapes.each, number)[part]
        make = builder.write if chunk % shapes.each == last else builder.update
        operands = [
            *self._weights(layer, number),
            self._context(layer, chunk, number),
            builder.read("attention", f"attention.{where}"),
            builder.read("projections", f"q.{where}"),
            builder.read("d_hidden", f"d_hidden.{chunk}"),
            *self._part_gradients(layer, number, chunk),
            builder.write("d_q", f"d_q.{chunk}{PART}{number}"),
            make("d_context", sums, num_parts=self._halves_seen(chunk)),
        ]
        call = self.calls.block("context_part_backward", chunk, layer, frozen=self._frozen(layer))
        task = self._task("attention_backward", chunk, layer, call, operands, number)
        builder.bind_recomputes(before=task)

    def _sum_d_keys(self, half: Half, layer: int) -> None:
        """Add up gradients of keys and values, of the rank's parts and then of all ranks."""
        builder, shapes = self.builder, self.shapes
        said = CollectiveCall(
            "reduce_scatter", (CP,), f"{CP}.sum", reduction="pairwise", last_first=half == "high"
        )
        size = self.workload.seq_len // 2 * 2 * self.spec.part.d_kv
        for sequence, number in self._sequences():
            where = f"{sequence}{PART}{number}"
            sums = [f"{tensor}.{half}" for tensor in shapes.sums_of_keys(layer, sequence, number)]
            self._add_pairwise(f"d_kv.{half}.{layer}.{where}", sums, size, "float32", layer)
            if shapes.is_gathered:
                operands = [
                    builder.read("all", sums[0]),
                    builder.write("own", shapes.d_keys(layer, sequence, number, half)),
                ]
                label = builder.label(CP, layer, sequence * shapes.each)
                name = f"r0.{CP}.d_kv.{half}.{layer}.{where}"
                builder.communicate(name, said, operands, label)

    def _qkv_backward(self, layer: int, chunk: int, number: int) -> None:
        read, shapes = self.builder.read, self.shapes
        sequence, index = divmod(chunk, shapes.each)
        operands = [
            *self._weights(layer, number),
            read("hidden", shapes.hidden(layer, chunk)),
            read("projections", f"q.{layer}.{chunk}{PART}{number}"),
            read("d_q", f"d_q.{chunk}{PART}{number}"),
            read("d_kv", shapes.d_keys(layer, sequence, number, shapes.half_of(chunk))),
            *self._part_gradients(layer, number, chunk),
            self._piece(chunk, number),
        ]
        told = {"kv_start": index % shapes.half * self.workload.chunk_tokens}
        frozen = self._frozen(layer)
        call = self.calls.block("qkv_part_backward", chunk, layer, frozen=frozen, told=told)
        self._task("qkv_backward", chunk, layer, call, operands, number)

    # Sums over parts of sequences

    def _head(self, round_: int) -> None:
        super()._head(round_)
        self._complete_first_loss()

    def _head_alone(self, step_state: TaskOperand) -> None:
        super()._head_alone(step_state)
        self._complete_first_loss()

    def _add_tasks(self, step_state: TaskOperand) -> None:
        super()._add_tasks(step_state)
        if self.has_head and self.builder.latest(_LATER):
            self._complete_loss(_LATER)
            self._add_pairwise("losses", ["loss", _LATER], 1, "float32", None)

    def _loss_of(self, chunk: int) -> str:
        """That of the first microbatch is by itself, as an evaluation has it."""
        losses = "loss" if chunk < self._chunks_each else _LATER
        return self.shapes.sum_of(losses, chunk)

    def _complete_first_loss(self) -> None:
        if self._microbatch == 0:
            self._complete_loss("loss")

    def _complete_loss(self, name: str) -> None:
        """Add up what parts, and then what ranks, have of a loss."""
        self._add_pairwise(name, self.shapes.sums(name), 1, "float32", None)
        if self.cut.layout.cp > 1:
            said = CollectiveCall("all_reduce", (CP,), f"{CP}.loss", reduction="pairwise")
            loss = self.builder.update("loss", name)
            self.builder.communicate(f"reduce.{name}", said, [loss], self.builder.label(CP))

    def _add_pairwise(
        self, what: str, sums: list[str], count: int, dtype: str, layer: int | None,
        *held: TaskOperand,
    ) -> None:  # fmt: skip
        name = f"r0.add.{what}.{self._microbatch}"
        self.groups.add_pairwise(name, sums, count, dtype, layer, *held)

    def _sequences(self) -> Iterator[tuple[int, int]]:
        """Sequences of the microbatch, and numbers of the parts of blocks."""
        chunks, each = self._chunks(), self.shapes.each
        for sequence in range(chunks.start // each, chunks.stop // each):
            for number in range(self.spec.parts_each):
                yield sequence, number

    def _of_half(self, half: Half) -> list[int]:
        return [chunk for chunk in self._chunks() if self.shapes.half_of(chunk) == half]
