"""The tensors of a stage whose blocks are parts: names, and what sums over parts add up."""

from dataclasses import dataclass
from typing import NamedTuple

from twinstream.models.decoders.parted import PartedSpec
from twinstream.models.decoders.sizes import ITEMSIZE_BYTES
from twinstream.models.layout import (
    ADAPTERS,
    EMBEDDING,
    HEAD,
    PART,
    aligned,
    dense_width,
    qk_norm_widths,
    whole_group,
)
from twinstream.models.lowering.chain_builder import ChainBuilder
from twinstream.models.lowering.declarations import (
    GRADIENT_PIECES,
    DecoderShapes,
    declare_context,
    declare_inputs,
    declare_results,
    dense_tensor,
    part_of,
)
from twinstream.models.lowering.stage_cut import StageShapes
from twinstream.schedule.tensors import Role, Tensor, flat_shape

ROW_SUMS = 3  # of a row of logits a part has the largest, the sum of exponentials, the label's
PIECES, LOSS_SUMS, SQUARES = "pieces", "loss_sums", "part_squares"


class Pieces(NamedTuple):
    """What each part makes of a sum: elements of a dtype."""

    dtype: str
    num_elements: int


@dataclass(frozen=True)
class PartShapes(StageShapes):
    """Of a rank that has some parts of every layer, of the embedding and of the head."""

    spec: PartedSpec

    @property
    def of_embedding(self) -> tuple[str, ...]:
        """The groups whose parameters the embedding's tasks read."""
        return self.spec.parts_of(EMBEDDING)

    @property
    def of_head(self) -> tuple[str, ...]:
        """The groups whose parameters the head's tasks read."""
        return (HEAD, *self.head_parts)

    @property
    def head_parts(self) -> tuple[str, ...]:
        """Groups of rows of the head's matrix."""
        return self.spec.parts_of(EMBEDDING if self.spec.tied_embeddings else HEAD)

    def norm_part(self, group: str) -> str:
        """One number for all parts of a group, and one for what is not in parts."""
        return whole_group(group) + (PART if PART in group else "")

    def squares_tensor(self, group: str) -> str:
        """Those of a part by themselves, until they are added up."""
        if PART not in group:
            return super().squares_tensor(group)
        return self.local(f"{SQUARES}.{whole_group(group)}", group)

    def local(self, tensor: str, group: str) -> str:
        """A part's own of a tensor that has something of each part of a rank."""
        number = group.partition(PART)[2]
        return tensor if self.spec.parts_each == 1 else f"{tensor}{PART}{number}"

    def of_part(self, tensor: str, number: int) -> str:
        """Likewise, of a part by its number."""
        return self.local(tensor, f"{PART}{number}")

    def piece_of_gradient(self, group: str, number: int, chunk: int) -> str:
        """Where a part adds its share of the gradient of adapters that all parts read."""
        if not self.sums_in_order:
            return self.sum_of(f"grad.{group}", chunk)
        return self.of_part(self.sum_of(f"{GRADIENT_PIECES}.{group}", chunk), number)

    def sum_of(self, tensor: str, chunk: int) -> str:
        """Where what a chunk adds to a tensor is added up at first."""
        return tensor

    @property
    def sums_in_order(self) -> bool:
        """Whether what several parts make is added up in their order, and not by the transport."""
        return self.cut.layout.parts is not None and self.spec.parts > 1

    @property
    def gathers_pieces(self) -> bool:
        """Whether pieces of all parts are gathered, and not summed by the transport."""
        return self.cut.layout.parts is not None and self.cut.layout.tp > 1

    def is_summed(self, group: str) -> bool:
        """Whether each part has a gradient of a group that all read: of adapters."""
        return group.startswith(ADAPTERS) and PART not in group

    @property
    def rows(self) -> int:
        """Tokens of a chunk whose hidden states a rank has between sums."""
        return self.workload.chunk_tokens

    def whole(self, tensor: str, chunk: int) -> str:
        """Where hidden states of all tokens are that parts read."""
        return tensor

    def block(self) -> DecoderShapes:
        """How tensors of a block of one part are sized."""
        return DecoderShapes(self.spec.part, self.workload, self.recipe)

    def kv_of(self, layer: int, chunk: int, number: int) -> str:
        """K and V of a chunk in a part."""
        each = self.workload.chunks_per_sequence
        if not self.workload.sliced:
            return f"kv.{layer}.{chunk}{PART}{number}"
        return f"{self.context_of(layer, chunk, number)}.part{chunk % each}"

    def context_of(self, layer: int, chunk: int, number: int) -> str:
        """Those of the chunk's whole sequence."""
        return f"kv.{layer}.{chunk // self.workload.chunks_per_sequence}{PART}{number}"

    @property
    def pieces(self) -> Pieces:
        """Hidden states of a chunk, the gradients of norms that heads share, and of what tokens'
        experts count."""
        spec, tokens = self.spec, self.workload.chunk_tokens
        behind = sum(qk_norm_widths(spec).values())
        if (experts := spec.experts) is not None:
            behind += tokens * (experts.per_token + experts.shared_gate)
        size = (tokens * spec.d_model + behind) * spec.itemsize
        return Pieces(spec.dtype, aligned(size) // spec.itemsize)

    def declare_pieces(self, builder: ChainBuilder, chunk: int) -> None:
        """Declare what parts make of a sum, and where whoever adds it up finds that."""
        declare_sum(builder, self, f"{PIECES}.{chunk}", self.pieces, self.gathers_pieces)

    @property
    def num_pieces(self) -> int:
        """How many pieces whoever adds them up has."""
        layout = self.cut.layout
        return 1 if layout.parts is None else layout.parts


def declare_parts(builder: ChainBuilder, shapes: PartShapes) -> None:
    """Declare all but the tensors of groups."""
    spec, workload = shapes.spec, shapes.workload
    tokens = workload.chunk_tokens
    rows = (shapes.rows, spec.d_model)
    for chunk in range(shapes.num_chunks):
        declare_inputs(builder, shapes, chunk)
        for layer in range(spec.num_layers + 1):
            builder.declare(dense_tensor(f"hidden.{layer}.{chunk}", "activation", spec.dtype, rows))
        for layer in range(spec.num_layers):
            builder.declare(dense_tensor(f"x_o.{layer}.{chunk}", "activation", spec.dtype, rows))
            if (experts := spec.layer(layer).experts) is not None:
                shape = (2, tokens, experts.per_token)  # numbers, then weights
                name = f"routes.{layer}.{chunk}"
                builder.declare(dense_tensor(name, "activation", "int32", shape))
            for number in range(spec.parts_each):
                _declare_saved(builder, shapes, layer, chunk, number)
        builder.declare(dense_tensor(f"d_hidden.{chunk}", "activation", spec.dtype, rows))
        for name in ("lse", *(("row_scales",) if shapes.recipe.loss.passes > 1 else ())):
            builder.declare(dense_tensor(f"{name}.{chunk}", "scratch", "float32", (tokens,)))
        shapes.declare_pieces(builder, chunk)
        sums = Pieces("float32", ROW_SUMS * tokens)
        declare_sum(builder, shapes, f"{LOSS_SUMS}.{chunk}", sums, shapes.cut.layout.tp > 1)
    if shapes.recipe.clips:
        for group in dict.fromkeys(whole_group(g) for g in shapes.trained if PART in g):
            is_gathered = shapes.cut.layout.tp > 1
            declare_sum(builder, shapes, f"{SQUARES}.{group}", Pieces("float32", 1), is_gathered)
    for group in shapes.trained:
        if shapes.is_summed(group) and shapes.sums_in_order:
            made = Pieces(shapes.gradient_dtype, shapes.num_elements(group))
            over_ranks = shapes.cut.layout.tp > 1
            for tensor in shapes.sums(f"{GRADIENT_PIECES}.{group}"):
                declare_sum(builder, shapes, tensor, made, over_ranks, "gradient")
    declare_results(builder, shapes)


def _declare_saved(
    builder: ChainBuilder, shapes: PartShapes, layer: int, chunk: int, number: int
) -> None:
    """What backward needs of one part of a block."""
    part, tokens = shapes.spec.part.layer(layer), shapes.workload.chunk_tokens
    where = f"{layer}.{chunk}{PART}{number}"
    attention_bytes = tokens * (part.d_q * part.itemsize + 4 * part.num_heads)
    builder.declare_flat(f"attention.{where}", attention_bytes, "activation", part.dtype)
    saved = {"q": (tokens, part.d_q), "gate_up": (tokens, 2 * dense_width(part))}
    if (experts := part.experts) is not None:
        saved["experts"] = (tokens * experts.per_token, 2 * experts.d_ff)
    for name, shape in saved.items():
        if shape[1]:
            builder.declare(dense_tensor(f"{name}.{where}", "activation", part.dtype, shape))
    if not shapes.workload.sliced:
        kv = (tokens, 2, part.num_kv_heads, part.head_dim)
        builder.declare(dense_tensor(shapes.kv_of(layer, chunk, number), "context", part.dtype, kv))


def declare_contexts(builder: ChainBuilder, shapes: PartShapes) -> None:
    """Keys and values of sequences in slices, and their gradients."""
    spec, workload, block = shapes.spec, shapes.workload, shapes.block()
    for chunk in range(0, workload.chunks_per_round, workload.chunks_per_sequence):
        for number in range(spec.parts_each):
            for layer in range(spec.num_layers):
                declare_context(builder, block, shapes.context_of(layer, chunk, number), spec.dtype)
            sequence = chunk // workload.chunks_per_sequence
            declare_context(builder, block, f"d_context.{sequence}{PART}{number}", "float32")


def declare_sum(
    builder: ChainBuilder, shapes: PartShapes, tensor: str, pieces: Pieces, is_gathered: bool,
    role: Role = "scratch",
) -> None:  # fmt: skip
    """What a rank's parts make, piece by piece; and where all pieces are gathered, those."""
    own, layout = shapes.spec.parts_each, shapes.cut.layout
    builder.declare(flat_pieces(tensor, pieces, own, role))
    for number in range(own if own > 1 else 0):
        piece = flat_pieces(shapes.of_part(tensor, number), pieces, 1, role)
        builder.declare(part_of(tensor, piece, number * piece.size_bytes))
    if is_gathered:
        builder.declare(flat_pieces(f"all_{tensor}", pieces, layout.num_parts, role))


def flat_pieces(tensor: str, pieces: Pieces, count: int, role: Role) -> Tensor:
    size_bytes = count * pieces.num_elements * ITEMSIZE_BYTES[pieces.dtype]
    dtype, shape = flat_shape(size_bytes, pieces.dtype)
    return Tensor(tensor_id=tensor, size_bytes=size_bytes, role=role, dtype=dtype, shape=shape)
