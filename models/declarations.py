"""Names, sizes and parts of a training step's tensors."""

from dataclasses import dataclass
from itertools import pairwise
from math import prod

from twinstream.models.chain_builder import ChainBuilder
from twinstream.models.layout import block_layout, embedding_layout, head_layout
from twinstream.models.spec import ModelSpec
from twinstream.schedule.tensors import Role, Tensor
from twinstream.schedule.workload import Workload

PART_ALIGNMENT_BYTES = 256
STEP_STATE_BYTES = 64


@dataclass(frozen=True)
class OptimizerPart:
    """A stretch of a group's flat parameter tensor that one optimizer task updates."""

    suffix: str
    element_offset: int
    num_elements: int


@dataclass(frozen=True)
class Shapes:
    """How the tensors of (model, workload) are named, sized and cut into parts."""

    spec: ModelSpec
    workload: Workload

    @property
    def groups(self) -> tuple[str, ...]:
        return ("embedding", *(str(i) for i in range(self.spec.num_layers)), "head")

    @property
    def persistent(self) -> tuple[str, ...]:
        return tuple(f"{kind}.{group}" for group in self.groups for kind in ("param", "opt"))

    def group_bytes(self, group: str) -> int:
        if group == "embedding":
            return embedding_layout(self.spec).size_bytes
        if group == "head":
            return head_layout(self.spec).size_bytes
        return block_layout(self.spec).size_bytes

    def optimizer_parts(self, group: str) -> tuple[OptimizerPart, ...]:
        """Embedding and head are updated in parts no larger than a layer; a layer is one."""
        total = self.group_bytes(group)
        num_parts = -(-total // block_layout(self.spec).size_bytes)
        if num_parts == 1:
            return (OptimizerPart(group, 0, total // self.spec.itemsize),)
        unit = PART_ALIGNMENT_BYTES
        bounds = [total * i // num_parts // unit * unit for i in range(num_parts)] + [total]
        return tuple(
            OptimizerPart(
                suffix=f"{group}.part{i}",
                element_offset=low // self.spec.itemsize,
                num_elements=(high - low) // self.spec.itemsize,
            )
            for i, (low, high) in enumerate(pairwise(bounds))
        )

    def hidden(self, layer: int, chunk: int) -> str:
        return f"hidden.{layer}.{chunk}"

    def context(self, layer: int, chunk: int) -> str:
        return f"kv.{layer}.{chunk // self.workload.chunks_per_sequence}"

    def kv(self, layer: int, chunk: int) -> str:
        """K and V of a chunk: a tensor of its own, or a part of its sequence's context."""
        if not self.workload.sliced:
            return f"kv.{layer}.{chunk}"
        return f"{self.context(layer, chunk)}.part{chunk % self.workload.chunks_per_sequence}"


def declare_tensors(builder: ChainBuilder, shapes: Shapes) -> None:
    spec, workload = shapes.spec, shapes.workload
    for group in shapes.groups:
        _declare_group(builder, shapes, group)
    for chunk in range(workload.chunks_per_round):
        tokens_shape = (2, workload.chunk_tokens)
        builder.declare(_tensor(f"tokens.{chunk}", "input", "int32", tokens_shape))
        for layer in range(spec.num_layers):
            _declare_saved(builder, shapes, layer, chunk)
        shape = (workload.chunk_tokens, spec.d_model)
        last = shapes.hidden(spec.num_layers, chunk)
        builder.declare(_tensor(last, "activation", spec.dtype, shape))
        builder.declare(_tensor(f"d_hidden.{chunk}", "activation", spec.dtype, shape))
    if workload.sliced:
        for sequence in range(workload.chunks_per_round // workload.chunks_per_sequence):
            for layer in range(spec.num_layers):
                _declare_context(builder, shapes, f"kv.{layer}.{sequence}", spec.dtype)
            _declare_context(builder, shapes, f"d_context.{sequence}", "float32")
    builder.declare_flat("step_state", STEP_STATE_BYTES, "input", "uint8")
    builder.declare(_tensor("loss", "loss", "float32", (1,)))


def _declare_group(builder: ChainBuilder, shapes: Shapes, group: str) -> None:
    """Parameters, gradients, and optimizer state (m then v of each part)."""
    dtype, itemsize = shapes.spec.dtype, shapes.spec.itemsize
    size = shapes.group_bytes(group)
    parts = shapes.optimizer_parts(group)
    roles: tuple[tuple[str, Role, int], ...] = (
        ("param", "parameter", 1), ("grad", "gradient", 1), ("opt", "optimizer_state", 2)
    )  # fmt: skip
    for kind, role, copies in roles:
        builder.declare_flat(f"{kind}.{group}", copies * size, role, dtype)
        for part in parts if len(parts) > 1 else ():
            bytes_ = copies * part.num_elements * itemsize
            builder.declare(
                Tensor(
                    tensor_id=f"{kind}.{part.suffix}",
                    size_bytes=bytes_,
                    role=role,
                    dtype=dtype,
                    shape=(bytes_,),
                    parent=f"{kind}.{group}",
                    offset_bytes=copies * part.element_offset * itemsize,
                )
            )


def _declare_saved(builder: ChainBuilder, shapes: Shapes, layer: int, chunk: int) -> None:
    """What backward needs of one block and chunk, grouped by recompute level."""
    spec, tokens = shapes.spec, shapes.workload.chunk_tokens
    hidden_bytes = tokens * spec.d_model * spec.itemsize
    parent = f"input.{layer}.{chunk}"
    builder.declare_flat(parent, hidden_bytes + 8 * tokens, "activation", spec.dtype)
    hidden = _tensor(shapes.hidden(layer, chunk), "activation", spec.dtype, (tokens, spec.d_model))
    norms = _tensor(f"norms.{layer}.{chunk}", "activation", "float32", (2, tokens))
    builder.declare(_part_of(parent, hidden, 0))
    builder.declare(_part_of(parent, norms, hidden_bytes))
    if not shapes.workload.sliced:
        kv_shape = (tokens, 2, spec.num_kv_heads, spec.head_dim)
        builder.declare(_tensor(shapes.kv(layer, chunk), "context", spec.dtype, kv_shape))
    attention_bytes = tokens * (spec.d_q * spec.itemsize + 4 * spec.num_heads)
    builder.declare_flat(f"attention.{layer}.{chunk}", attention_bytes, "activation", spec.dtype)
    widths = spec.d_q + spec.d_model + 2 * spec.d_ff
    builder.declare_flat(
        f"projections.{layer}.{chunk}", tokens * widths * spec.itemsize, "activation", spec.dtype
    )


def _declare_context(builder: ChainBuilder, shapes: Shapes, name: str, dtype: str) -> None:
    """Keys and values (or their gradients) of a whole sequence, in parts by chunk."""
    spec, workload = shapes.spec, shapes.workload
    row = (2, spec.num_kv_heads, spec.head_dim)
    builder.declare(_tensor(name, "context", dtype, (workload.seq_len, *row)))
    for index in range(workload.chunks_per_sequence):
        part = _tensor(f"{name}.part{index}", "context", dtype, (workload.chunk_tokens, *row))
        builder.declare(_part_of(name, part, index * part.size_bytes))


def _part_of(parent: str, tensor: Tensor, offset_bytes: int) -> Tensor:
    return tensor.model_copy(update={"parent": parent, "offset_bytes": offset_bytes})


def _tensor(tensor_id: str, role: Role, dtype: str, shape: tuple[int, ...]) -> Tensor:
    itemsize = {"bfloat16": 2, "float32": 4, "int32": 4}[dtype]
    return Tensor(
        tensor_id=tensor_id, size_bytes=itemsize * prod(shape), role=role, dtype=dtype, shape=shape
    )
