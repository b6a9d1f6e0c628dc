"""A stage's blocks as parts, of ranks whose keys and values go around a ring beside attention.

In each step a rank attends to the block of keys that has come while that goes on to the next rank
(Liu et al., arXiv:2310.01889); what it has made of several blocks is merged by their log-sum-exps.
In backward the blocks go around once more, and their gradients one step behind them, to which each
rank adds its own; they end where the keys were made. Slices are those of `sequence_tasks`, so that
in every step all ranks see as many keys.
"""

from dataclasses import dataclass

from twinstream.models.layout import PART
from twinstream.models.lowering.chain_builder import CollectiveCall
from twinstream.models.lowering.decoder_calls import KeysSeen
from twinstream.models.lowering.parts.sequence_tasks import (
    HALVES,
    Half,
    SequenceShapes,
    SequenceTasks,
)
from twinstream.schedule.cluster.projecting import CP
from twinstream.schedule.ops import TaskOperand

_BLOCK, _D_BLOCK, _ADDED = "ring", "d_ring", "d_added"


@dataclass(frozen=True)
class RingShapes(SequenceShapes):
    """Of a rank that has keys of its own chunks, and of the blocks that come and go."""

    @property
    def is_gathered(self) -> bool:
        return False

    def d_keys(self, layer: int, sequence: int, number: int, half: Half) -> str:
        """The summed gradients that have come home."""
        return f"{self.of_step(_D_BLOCK, sequence, number, self.cut.layout.cp)}.{half}"

    def of_step(self, what: str, sequence: int, number: int, step: int) -> str:
        """A block, or its gradients, as a rank has it in a step."""
        return f"{what}.{sequence}{PART}{number}.{step}"

    def block_of_step(self, layer: int, sequence: int, number: int, step: int) -> str:
        """In step 0 it is the rank's own."""
        (own,) = self.keys(layer, sequence, number)
        return own if step == 0 else self.of_step(_BLOCK, sequence, number, step)

    def seen(self, chunk: int, step: int) -> KeysSeen:
        """How many keys a chunk of each rank sees of the block of a step."""
        ranks, rows = self.cut.layout.cp, self.half * self.workload.chunk_tokens
        if step == 0:
            own = (chunk % self.each + 1) * self.workload.chunk_tokens
            return KeysSeen(step, (own,) * ranks)
        comes_later = [(rank - step) % ranks > rank for rank in range(ranks)]
        if self.half_of(chunk) == "low":
            return KeysSeen(step, tuple(0 if later else rows for later in comes_later))
        return KeysSeen(step, tuple(2 * rows if later else rows for later in comes_later))


class RingTasks(SequenceTasks):
    """Adds the tasks of a stage of a training step, or of an evaluation, around a ring."""

    shapes: RingShapes
    shapes_kind = RingShapes

    def _declare_contexts(self) -> None:
        super()._declare_contexts()
        shapes, ranks = self.shapes, self.cut.layout.cp
        rows, dtype = shapes.half * self.workload.chunk_tokens, self.spec.dtype
        for sequence in shapes.sequences():
            for number in range(self.spec.parts_each):
                names = [
                    *((_BLOCK, step, dtype) for step in range(1, ranks)),
                    *((_D_BLOCK, step, "float32") for step in range(ranks + 1)),
                    (_ADDED, 0, "float32"),
                ]
                for what, step, of_type in names:
                    name = shapes.of_step(what, sequence, number, step)
                    self._declare_keys(name, of_type, rows, HALVES)
        for chunk in range(shapes.num_chunks):
            for number in range(self.spec.parts_each):
                self._declare_by_heads(f"d_attention.{chunk}{PART}{number}")

    # Forward

    def _forward_attention(self, layer: int) -> None:
        self._write_keys(layer)
        for step in range(self.cut.layout.cp):
            self._pass_on("kv", layer, step)
            for chunk in self._chunks():
                for number in range(self.spec.parts_each):
                    self._attend(layer, chunk, number, step)
        for chunk in self._chunks():
            for number in range(self.spec.parts_each):
                operands = [
                    *self._weights(layer, number),
                    self.builder.read("attention", f"attention.{layer}.{chunk}{PART}{number}"),
                    self._piece(chunk, number),
                ]
                call = self.calls.block("output_part_forward", chunk, layer)
                self._task("attention_output", chunk, layer, call, operands, number)
            self._exchange_pieces("attention", chunk, layer)

    def _attend(self, layer: int, chunk: int, number: int, step: int) -> None:
        """To the block of a step; Q is made before the first."""
        builder, where = self.builder, f"{layer}.{chunk}{PART}{number}"
        q, attention, seen = f"q.{where}", f"attention.{where}", self.shapes.seen(chunk, step)
        if step == 0:
            kernel = "context_part_recompute"
            operands = [
                *self._context_inputs(layer, chunk, number),
                builder.write("attention", attention),
                builder.write("projections", q),
            ]
        else:
            kernel = "ring_part_forward"
            operands = [
                *self._weights(layer, number),
                builder.read("projections", q),
                self._block(layer, chunk, number, step),
                builder.update("attention", attention),
            ]
        call = self.calls.block(kernel, chunk, layer, seen=seen)
        self._of_step("attention_forward", step, (chunk, layer, number), call, operands)

    def _of_step(
        self, kind: str, step: int, place: tuple[int, int, int], call: str,
        operands: list[TaskOperand],
    ) -> str:  # fmt: skip
        name, (chunk, layer, _) = self._named(f"{kind}.step{step}", *place), place
        self.builder.add(name, call, operands, self.builder.label(kind, layer, chunk, 0))
        return name

    def _block(self, layer: int, chunk: int, number: int, step: int) -> TaskOperand:
        """The keys of a step: of the rank's own those up to the chunk's."""
        if step == 0:
            return self._context(layer, chunk, number)
        sequence = chunk // self.shapes.each
        return self.builder.read("context", self.shapes.of_step(_BLOCK, sequence, number, step))

    def _pass_on(self, what: str, layer: int, step: int) -> None:
        """Send a step's block to the next rank, and get that of the next step; but of the last."""
        if step + 1 < self.cut.layout.cp:
            for sequence, number in self._sequences():
                blocks = [
                    self.shapes.block_of_step(layer, sequence, number, one)
                    for one in (step, step + 1)
                ]
                self._send_block(what, layer, (sequence, number, step), CP, blocks)

    def _send_block(
        self, what: str, layer: int, place: tuple[int, int, int], queue: str, blocks: list[str]
    ) -> None:
        sequence, number, step = place
        sent, come = self.builder.read("sent", blocks[0]), self.builder.write("come", blocks[1])
        name = f"r0.{CP}.{what}.{layer}.{sequence}{PART}{number}.{step}"
        label = self.builder.label(CP, layer, sequence * self.shapes.each)
        said = CollectiveCall("send_recv", (CP,), queue)
        self.builder.communicate(name, said, [sent, come], label)

    # Backward

    def _backward_attention(self, layer: int) -> None:
        for chunk in self._chunks_reversed():
            self._norm_backward("ffn_norm", chunk, layer, f"x_o.{layer}.{chunk}")
            for number in range(self.spec.parts_each):
                self._output_backward(layer, chunk, number)
        for step in range(self.cut.layout.cp):
            self._pass_on("kv_again", layer, step)
            for chunk in self._chunks_reversed():
                for number in range(self.spec.parts_each):
                    self._attend_backward(layer, chunk, number, step)
            self._pass_gradients_on(layer, step)
        for chunk in self._chunks_reversed():
            for number in range(self.spec.parts_each):
                self._qkv_backward(layer, chunk, number)
            self._exchange_pieces("attention_backward", chunk, layer)

    def _output_backward(self, layer: int, chunk: int, number: int) -> None:
        builder = self.builder
        operands = [
            *self._weights(layer, number),
            builder.read("attention", f"attention.{layer}.{chunk}{PART}{number}"),
            builder.read("d_hidden", f"d_hidden.{chunk}"),
            *self._part_gradients(layer, number, chunk),
            builder.write("d_attention", f"d_attention.{chunk}{PART}{number}"),
        ]
        call = self.calls.block("output_part_backward", chunk, layer, frozen=self._frozen(layer))
        self._task("output_backward", chunk, layer, call, operands, number)

    def _attend_backward(self, layer: int, chunk: int, number: int, step: int) -> None:
        """Gradients of rotated Q, and of the step's block: those of other ranks' by themselves."""
        builder, shapes, where = self.builder, self.shapes, f"{layer}.{chunk}{PART}{number}"
        sequence, index = divmod(chunk, shapes.each)
        if step == 0:
            again = self.calls.block("q_part_recompute", chunk, layer)
            hidden = builder.read("hidden", shapes.hidden(layer, chunk))
            q = builder.again("projections", f"q.{where}")
            made = [*self._weights(layer, number), hidden, q]
            self._recompute("attention", (chunk, layer, number), again, made)
        sums = shapes.of_step(_ADDED if step else _D_BLOCK, sequence, number, 0)
        make = builder.write if index == shapes.each - 1 else builder.update
        operands = [
            *self._weights(layer, number),
            self._block(layer, chunk, number, step),
            builder.read("attention", f"attention.{where}"),
            builder.read("projections", f"q.{where}"),
            builder.read("d_attention", f"d_attention.{chunk}{PART}{number}"),
            (builder.update if step else builder.write)("d_q", f"d_q.{chunk}{PART}{number}"),
            make("d_context", sums),
        ]
        seen, frozen = shapes.seen(chunk, step), self._frozen(layer)
        call = self.calls.block("ring_part_backward", chunk, layer, frozen=frozen, seen=seen)
        place = chunk, layer, number
        task = self._of_step("attention_backward", step, place, call, operands)
        if step == 0:
            builder.bind_recomputes(before=task)

    def _pass_gradients_on(self, layer: int, step: int) -> None:
        """Add what this rank has made to what has come with the block, and send the sum on."""
        for sequence, number in self._sequences():
            here, there = (
                self.shapes.of_step(_D_BLOCK, sequence, number, one) for one in (step, step + 1)
            )
            if step:
                added = self.shapes.of_step(_ADDED, sequence, number, 0)
                count = self.shapes.each * self.workload.chunk_tokens * 2 * self.spec.part.d_kv
                before = self.shapes.of_step(_D_BLOCK, sequence, number, step - 1)
                held = self.builder.read(f"held.{before}", before)  # while it is being sent
                self._add_pairwise(f"{here}.{layer}", [here, added], count, "float32", layer, held)
            self._send_block("d_kv", layer, (sequence, number, step), f"{CP}.sum", [here, there])
