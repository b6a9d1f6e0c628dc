"""A stage's blocks as parts, of ranks that have slices of each chunk's tokens between sums.

Sequence parallelism (Korthikanti et al., arXiv:2205.05198): hidden states, their gradients and the
norms' backward are of a rank's tokens alone. Sums are scattered over tokens; what parts read is
gathered, and once more for backward, so that no rank keeps it. With parts each rank gets its
tokens' rows of all pieces, and adds them up in the order of the parts. Each slice has a gradient of
norms by itself until these are added up, in the order of the slices.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from twinstream.models.kernel_costs.attributes import NUM_SLICES, PIECE_GROUPS
from twinstream.models.kernel_costs.part_work import norm_parts_backward
from twinstream.models.layout import PART
from twinstream.models.lowering.chain_builder import ChainBuilder
from twinstream.models.lowering.declarations import GRADIENT_PIECES, dense_tensor
from twinstream.models.lowering.parts.part_shapes import PIECES, PartShapes, Pieces, declare_sum
from twinstream.models.lowering.parts.part_tasks import PartTasks
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import Attribute, TaskOperand


@dataclass(frozen=True)
class TokenShapes(PartShapes):
    """Of a rank that has as many slices of a chunk's tokens as parts."""

    @property
    def rows(self) -> int:
        return self.workload.chunk_tokens // self.spec.tp

    @property
    def pieces(self) -> Pieces:
        """Hidden states of a chunk alone, whose rows are for several ranks."""
        return Pieces(self.spec.dtype, self.workload.chunk_tokens * self.spec.d_model)

    def is_summed(self, group: str) -> bool:
        """Of norms, too."""
        return PART not in group

    def whole(self, tensor: str, chunk: int) -> str:
        """Gathered into one tensor of a chunk, of hidden states or of their gradients."""
        if self.spec.tp == 1:
            return tensor
        return f"all_{'d_' if tensor.startswith('d_') else ''}hidden.{chunk}"

    def declare_pieces(self, builder: ChainBuilder, chunk: int) -> None:
        pieces, spec = f"{PIECES}.{chunk}", self.spec
        declare_sum(builder, self, pieces, self.pieces, False)
        if spec.tp == 1:
            return
        made = self.pieces if self.gathers_pieces else Pieces(spec.dtype, self.rows * spec.d_model)
        declare_sum(builder, self, f"all_{pieces}", made, False)
        shape = (self.workload.chunk_tokens, spec.d_model)
        for tensor in (f"hidden.{chunk}", f"d_hidden.{chunk}"):
            name = self.whole(tensor, chunk)
            builder.declare(dense_tensor(name, "activation", spec.dtype, shape))


class TokenTasks(PartTasks):
    """Adds the tasks of a stage of a training step, or of an evaluation, of slices of tokens."""

    shapes: TokenShapes
    shapes_kind = TokenShapes

    def _prepared(self, chunks: range, prepare: Callable[[int], None]) -> Iterator[int]:
        """What a chunk's tasks read is gathered beside those of the chunk before."""
        if self.spec.tp == 1:
            yield from super()._prepared(chunks, prepare)
            return
        for place, chunk in enumerate(chunks):
            for one in chunks[place + (place > 0) : place + 2]:
                prepare(one)
            yield chunk

    def _gather_rows(self, what: str, layer: int | None, tensor: str, chunk: int) -> None:
        if self.spec.tp == 1:
            return
        whole = self.shapes.whole(tensor, chunk)
        operands = [self.builder.read("own", tensor), self.builder.write("all", whole)]
        self._communicate(f"{what}.gather", "all_gather", operands, chunk, layer)

    def _exchange_pieces(self, what: str, chunk: int, layer: int | None) -> None:
        """Each rank gets its tokens' rows of the pieces of all parts, or their sum."""
        if self.spec.tp == 1:
            return
        builder, shapes = self.builder, self.shapes
        collective = "all_to_all" if shapes.gathers_pieces else "reduce_scatter"
        for number in range(self.spec.parts_each):
            operands = [
                builder.read("pieces", shapes.of_part(f"{PIECES}.{chunk}", number)),
                builder.write("rows", shapes.of_part(f"all_{PIECES}.{chunk}", number)),
            ]
            tag = shapes.of_part(what, number)
            self._communicate(tag, collective, operands, chunk, layer)

    def _pieces(self, chunk: int) -> TaskOperand:
        tensor = f"{PIECES}.{chunk}"
        return self.builder.read("pieces", tensor if self.spec.tp == 1 else f"all_{tensor}")

    def _head_norm_gradients(self, layer: int, number: int, chunk: int) -> list[TaskOperand]:
        group = str(layer)
        if not self.spec.qk_norm or group not in self.trained:
            return []
        piece = self.shapes.piece_of_gradient(group, number, chunk)
        return [self.builder.accumulate("shared_gradients", piece)]

    def _norm_gradient(self, group: str, chunk: int) -> list[TaskOperand]:
        """Those of all slices of the rank, one behind the other."""
        if group not in self.trained:
            return []
        pieces = f"{GRADIENT_PIECES}.{group}" if self.shapes.sums_in_order else f"grad.{group}"
        return [self.builder.accumulate("gradients", pieces)]

    @property
    def _norm_cost(self) -> tuple[Work, ...]:
        shapes = self.shapes
        told = shapes.rows, shapes.num_pieces, self.spec.parts_each
        return norm_parts_backward(self.calls.work(), *told)

    @property
    def _of_pieces(self) -> dict[str, Attribute]:
        shapes = self.shapes
        told: dict[str, Attribute] = {
            "num_pieces": shapes.num_pieces, "piece_elements": shapes.rows * self.spec.d_model,
            "num_tokens": shapes.rows, NUM_SLICES: self.spec.parts_each,
        }  # fmt: skip
        if self.spec.tp > 1 and self.spec.parts_each > 1:
            told[PIECE_GROUPS] = self.spec.parts_each
        return told
