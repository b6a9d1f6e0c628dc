"""Names, sizes and parts of the tensors that every model's training step has."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod

from twinstream.models.decoders.hf_weights import HfWeight, hf_weights_of
from twinstream.models.decoders.sizes import ITEMSIZE_BYTES
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.scratch_sizes import (
    CODE_BLOCK_ELEMENTS,
    state_bytes,
    sum_shares,
)
from twinstream.models.layout import InnerTensor, dense_width
from twinstream.models.lowering.chain_builder import ChainBuilder
from twinstream.models.lowering.sharding import Sharding
from twinstream.models.providers.flops import ROUTE_BYTES
from twinstream.models.providers.model import Model
from twinstream.models.providers.trained import all_groups, layout_of, trained_groups
from twinstream.models.recipes.adapter_layout import (
    low_widths,
)
from twinstream.models.recipes.recipe import BEFORE_NEXT_USE, Recipe
from twinstream.models.recipes.update_rules import states_of_element
from twinstream.schedule.tensors import Role, Tensor, flat_shape
from twinstream.schedule.workload import Workload

STEP_STATE_BYTES = 64
GRADIENT_PIECES = "grad_pieces"  # of gradients that are made apart and then added up
_LARGEST_PART_BYTES = 2 << 30  # of parameters that one task updates


def log_probs_sink(chunk: int) -> str:
    """Where the log-probabilities of a chunk go, of the sequences of its pairs, round by round."""
    return f"log_probs.{chunk}"


@dataclass(frozen=True)
class OptimizerPart:
    """A stretch of a group's flat parameter tensor that one optimizer task updates."""

    suffix: str
    element_offset: int
    num_elements: int


def optimizer_parts(
    model: Model, group: str, recipe: Recipe | None = None
) -> tuple[OptimizerPart, ...]:
    """Embedding and head are updated in parts no larger than a layer, all in parts of about 2 GiB
    at most (the experts of a layer of mixtral-8x22b have 4.5); Muon takes a layer's matrices whole.

    A part begins at a whole block of 8-bit codes. The recipe says what adapters there are.
    """
    recipe = recipe or Recipe()
    layout = layout_of(model, recipe, group)
    total = layout.size_bytes // model.itemsize
    if model.decoder is not None and model.decoder.updated_apart(group):
        starts = [inner.offset_bytes // model.itemsize for inner in layout.tensors]
        return _cut_at(group, [*starts, total])
    most_bytes = _LARGEST_PART_BYTES
    if model.layer_of(group) is None:
        most_bytes = min(most_bytes, model.layer_bytes)
    num_parts = -(-total // (most_bytes // model.itemsize))
    if num_parts == 1 or muon_matrices(model, group, recipe):
        return (OptimizerPart(group, 0, total),)
    unit = CODE_BLOCK_ELEMENTS
    return _cut_at(
        group, [*(total * i // num_parts // unit * unit for i in range(num_parts)), total]
    )


def _cut_at(group: str, bounds: Sequence[int]) -> tuple[OptimizerPart, ...]:
    return tuple(
        OptimizerPart(
            suffix=f"{group}.part{i}",
            element_offset=low,
            num_elements=high - low,
        )
        for i, (low, high) in enumerate(pairwise(bounds))
    )


def undecayed_ranges(model: Model, group: str, part: OptimizerPart) -> tuple[int, ...]:
    """First and last + 1 of a part's elements that have no weight decay: norms and biases.

    Vectors with nothing but padding between them are one range.

    >>> from twinstream.models.presets import load_preset
    >>> tiny = load_preset("tiny")
    >>> undecayed_ranges(tiny, "0", optimizer_parts(tiny, "0")[0])
    (0, 128, 49280, 49408)
    """
    ranges: list[int] = []
    if group not in model.parameter_groups:  # adapters are matrices
        return ()
    tensors = model.group_layout(group).tensors
    for before, tensor in zip((None, *tensors), tensors, strict=False):
        if len(tensor.shape) > 1:
            continue
        start = tensor.offset_bytes // model.itemsize - part.element_offset
        end = start + tensor.size_bytes // model.itemsize
        start, end = max(0, start), min(part.num_elements, end)
        if start >= end:
            continue
        if ranges and before is not None and len(before.shape) == 1:
            ranges[-1] = end
        else:
            ranges += [start, end]
    return tuple(ranges)


def muon_matrices(model: Model, group: str, recipe: Recipe) -> tuple[tuple[int, int, int], ...]:
    """First element, rows and columns of each matrix that Muon updates: those of blocks, by the
    names that they have in files, so that Q, K and V are three; of experts one each."""
    if recipe.update != "muon" or model.layer_of(group) is None:
        return ()
    tensors: Sequence[InnerTensor | HfWeight] = layout_of(model, recipe, group).tensors
    if (decoder := model.decoder) is not None and group in model.parameter_groups:
        tensors = hf_weights_of(decoder, group)
    found = []
    for tensor in tensors:
        if len(tensor.shape) < 2:
            continue
        *before, rows, columns = tensor.shape
        start = tensor.offset_bytes // model.itemsize
        found += [(start + i * rows * columns, rows, columns) for i in range(prod(before))]
    return tuple(sorted(found))


def part_state_bytes(model: Model, group: str, part: OptimizerPart, recipe: Recipe) -> int:
    """Of the optimizer's state of a part; Muon has v beside the momentum outside of matrices."""
    state, count = recipe.state_of(model.dtype), part.num_elements
    size = state_bytes(state, model.dtype, count, states_of_element(recipe.update))
    if recipe.update == "muon":
        matrices = muon_matrices(model, group, recipe)
        size += (count - sum(r * c for _, r, c in matrices)) * model.itemsize
    return size


@dataclass(frozen=True)
class Shapes:
    """How the state of (model, recipe) is named, sized and cut into parts."""

    spec: Model
    workload: Workload
    recipe: Recipe = field(default_factory=Recipe)

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """All groups of parameters: the base's, then those of adapters."""
        return all_groups(self.spec, self.recipe)

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Those that have a gradient and an optimizer state."""
        return trained_groups(self.spec, self.recipe)

    @property
    def persistent(self) -> tuple[str, ...]:
        """The state, and what a step leaves for the updates that the next begins with."""
        trained = set(self.trained)
        state = tuple(
            f"{kind}.{group}"
            for group in self.groups
            for kind in (("param", "opt") if group in trained else ("param",))
        )
        if self.workload.forward_only:
            return (*state, *self.caches)
        if self.recipe.optimizer != BEFORE_NEXT_USE:
            return state
        norm = ("grad_norm",) if self.recipe.clips else ()
        return (*state, *(f"grad.{group}" for group in self.trained), *norm)

    @property
    def caches(self) -> tuple[str, ...]:
        """Return the caches of keys and values, of each layer and chunk."""
        return ()

    @property
    def norm_parts(self) -> tuple[tuple[str, int], ...]:
        """The parts of the sums of squares that the norm is taken of: one number for each group."""
        return tuple((group, 1) for group in self.trained)

    def sums_of_pieces(self, group: str) -> int:
        """Ranks of which each sums a share of the pieces of a group's gradient."""
        return 1

    def holders_of_squares(self, group: str) -> int:
        """Ranks of which each has the squares of some stretches of a group; 1 where it has all."""
        sharding = self.sharding(group)
        return 1 if sharding is None else sharding.num_shards

    def norm_part(self, group: str) -> str:
        """The part of them that a group's sum of squares is in."""
        return group

    def squares_tensor(self, group: str) -> str:
        """Where a group's sum of squares is written to."""
        return f"grad_squares.{group}"

    def sharding(self, group: str) -> Sharding | None:
        """What each replica keeps of a group; None where that is all."""
        return None

    def gradient_pieces(self, group: str) -> int:
        """How many gradients of a group a rank makes, one for each replica; else it is one."""
        return 1

    def ends(self, group: str) -> tuple[str, ...]:
        """Where the embedding, and the head on another stage, add up a gradient that both have."""
        return ()

    def parts(self, group: str) -> tuple[OptimizerPart, ...]:
        """Return the stretches of a group's flat tensor that have an optimizer task each."""
        sharding = self.sharding(group)
        if sharding is None:
            return optimizer_parts(self.spec, group, self.recipe)
        shard = sharding.shard_elements(self.num_elements(group), self.recipe)
        return (OptimizerPart(group, 0, shard),)

    def parameters(self, group: str) -> str:
        """Where a group's parameters are read."""
        return f"param.{group}"

    def group_bytes(self, group: str) -> int:
        return layout_of(self.spec, self.recipe, group).size_bytes

    @property
    def gradient_dtype(self) -> str:
        return self.recipe.gradient_dtype(self.spec.dtype)

    def num_elements(self, group: str) -> int:
        return self.group_bytes(group) // self.spec.itemsize

    def gradient_bytes(self, group: str) -> int:
        return self.num_elements(group) * ITEMSIZE_BYTES[self.gradient_dtype]


def declare_groups(builder: ChainBuilder, shapes: Shapes) -> None:
    """Parameters, gradients and optimizer state of all groups."""
    for group in shapes.groups:
        _declare_group(builder, shapes, group)


def declare_inputs(builder: ChainBuilder, shapes: Shapes, chunk: int) -> None:
    """Ids and labels of a chunk, where each of its packed sequences starts, and what else the loss
    is fed and makes."""
    workload = shapes.workload
    tokens_shape = (2, workload.chunk_tokens)
    builder.declare(dense_tensor(f"tokens.{chunk}", "input", "int32", tokens_shape))
    if (packing := workload.packing) is not None:
        size = packing.most_sequences + 1 + workload.chunk_tokens
        builder.declare(dense_tensor(f"sequences.{chunk}", "input", "int32", (size,)))
    loss = shapes.recipe.loss
    for name, shape in loss.fed(workload).items():
        builder.declare(dense_tensor(f"{name}.{chunk}", "input", "float32", shape))
    for name, shape in loss.results(workload).items():
        builder.declare(dense_tensor(f"{name}.{chunk}", "loss", "float32", shape))
    declare_rows(builder, shapes, chunk)


def declare_rows(builder: ChainBuilder, shapes: Shapes, chunk: int) -> None:
    """What a forward alone hands out of each token of a chunk, beside the loss."""
    result, tokens = shapes.workload.result, shapes.workload.chunk_tokens
    if result != "loss":
        shape = (tokens,) if result == "log_probs" else (tokens, shapes.spec.vocab_size)
        builder.declare(dense_tensor(f"{result}.{chunk}", "loss", "float32", shape))


def declare_results(builder: ChainBuilder, shapes: Shapes) -> None:
    """The step's state, its loss and, where gradients are clipped, their norm."""
    builder.declare_flat("step_state", STEP_STATE_BYTES, "input", "uint8")
    builder.declare(dense_tensor("loss", "loss", "float32", (1,)))
    if shapes.recipe.clips:
        _declare_norm(builder, shapes)


def _declare_group(builder: ChainBuilder, shapes: Shapes, group: str) -> None:
    """Declare parameters, gradients, and optimizer state: that of each part by itself.

    What is frozen has parameters only, in one part. Padding makes all shards equally large.
    """
    spec, sharding, dtype = shapes.spec, shapes.sharding(group), shapes.spec.dtype
    is_trained, is_gathered = group in shapes.trained, sharding is not None and sharding.zero == 3
    if not is_trained and not is_gathered:
        builder.declare_flat(f"param.{group}", shapes.group_bytes(group), "parameter", dtype)
        return
    parts = shapes.parts(group)
    held = [part.num_elements for part in parts]
    whole = held if sharding is None else [sharding.num_shards * held[0]]

    def declare(kind: str, role: Role, dtype: str, sizes: list[int]) -> None:
        builder.declare_flat(f"{kind}.{group}", sum(sizes), role, dtype)
        for number, part in enumerate(parts if len(parts) > 1 else ()):
            part_dtype, shape = flat_shape(sizes[number], dtype)
            builder.declare(
                Tensor(
                    tensor_id=f"{kind}.{part.suffix}", size_bytes=sizes[number], role=role,
                    dtype=part_dtype, shape=shape, parent=f"{kind}.{group}",
                    offset_bytes=sum(sizes[:number]),
                )
            )  # fmt: skip

    kept = held if is_gathered else whole
    declare("param", "parameter", dtype, [spec.itemsize * count for count in kept])
    if is_gathered:
        declare("gathered", "parameter", dtype, [spec.itemsize * count for count in whole])
    if not is_trained:
        return
    gradient_dtype = shapes.gradient_dtype
    itemsize = ITEMSIZE_BYTES[gradient_dtype]
    declare("grad", "gradient", gradient_dtype, [itemsize * count for count in whole])
    for tensor in shapes.ends(group)[1:]:
        builder.declare_flat(tensor, itemsize * sum(whole), "gradient", gradient_dtype)
    if (pieces := shapes.gradient_pieces(group)) > 1:
        size = pieces * itemsize * shapes.num_elements(group)
        builder.declare_flat(f"{GRADIENT_PIECES}.{group}", size, "gradient", gradient_dtype)
        if (shares := shapes.sums_of_pieces(group)) > 1:
            size //= pieces * shares
            builder.declare_flat(f"grad_shard.{group}", size, "gradient", gradient_dtype)
    if sharding is not None and sharding.zero > 1:
        declare("grad_shard", "gradient", gradient_dtype, [itemsize * held[0]])
    state = shapes.recipe.state_of(dtype)
    state_dtype = {"float32_master": "float32", "8bit": "uint8"}.get(state, dtype)
    sizes = [part_state_bytes(spec, group, part, shapes.recipe) for part in parts]
    declare("opt", "optimizer_state", state_dtype, sizes)
    if shapes.recipe.clips and (holders := shapes.holders_of_squares(group)) > 1:
        _declare_squares(builder, group, parts, holders)


def _declare_squares(
    builder: ChainBuilder, group: str, parts: Sequence[OptimizerPart], holders: int
) -> None:
    """Sums of squares of the stretches of what a rank has, part by part, and those of all."""
    every = [holders * sum_shares(part.num_elements) for part in parts]
    whole = dense_tensor(f"all_squares.{group}", "scratch", "float32", (sum(every),))
    builder.declare(whole)
    for number, part in enumerate(parts):
        own = (sum_shares(part.num_elements),)
        builder.declare(dense_tensor(f"shard_squares.{part.suffix}", "scratch", "float32", own))
        if len(parts) > 1:
            name = f"all_squares.{part.suffix}"
            one = dense_tensor(name, "scratch", "float32", (every[number],))
            builder.declare(part_of(whole.tensor_id, one, 4 * sum(every[:number])))


def _declare_norm(builder: ChainBuilder, shapes: Shapes) -> None:
    """A sum of squares for each group, and the norm over all of them."""
    total = sum(count for _, count in shapes.norm_parts)
    builder.declare(dense_tensor("grad_squares", "scratch", "float32", (total,)))
    offset_bytes = 0
    for name, count in shapes.norm_parts:
        part = dense_tensor(f"grad_squares.{name}", "scratch", "float32", (count,))
        builder.declare(part_of("grad_squares", part, offset_bytes))
        offset_bytes += part.size_bytes
    builder.declare(dense_tensor("grad_norm", "loss", "float32", (1,)))


def part_of(parent: str, tensor: Tensor, offset_bytes: int) -> Tensor:
    return tensor.model_copy(update={"parent": parent, "offset_bytes": offset_bytes})


def dense_tensor(tensor_id: str, role: Role, dtype: str, shape: tuple[int, ...]) -> Tensor:
    itemsize = {"bfloat16": 2, "float32": 4, "int32": 4}[dtype]
    return Tensor(
        tensor_id=tensor_id, size_bytes=itemsize * prod(shape), role=role, dtype=dtype, shape=shape
    )


@dataclass(frozen=True)
class DecoderShapes(Shapes):
    """How the tensors of a decoder's step are named and sized, beside those of its state."""

    spec: ModelSpec

    def low_width(self, layer: int) -> int:
        """Columns of what a block's adapters leave for its backward pass; 0 without any."""
        lora, d_ff = self.recipe.lora, dense_width(self.spec.layer(layer))
        return sum(low_widths(lora, d_ff).values()) if lora else 0

    def with_experts(self, layer: int) -> bool:
        """Whether a layer has some."""
        return self.spec.layer(layer).experts is not None

    @property
    def balances(self) -> bool:
        """Whether a step has a load-balancing loss."""
        experts = self.spec.experts
        return experts is not None and experts.aux_loss > 0 and not self.workload.forward_only

    def hidden(self, layer: int, chunk: int) -> str:
        return f"hidden.{layer}.{chunk}"

    @property
    def caches(self) -> tuple[str, ...]:
        if self.workload.cache is None:
            return ()
        chunks = range(self.workload.chunks_per_round)
        return tuple(self.cache(i, j) for i in range(self.spec.num_layers) for j in chunks)

    def cache(self, layer: int, chunk: int) -> str:
        return f"cache.{layer}.{chunk}"

    def context(self, layer: int, chunk: int) -> str:
        return f"kv.{layer}.{chunk // self.workload.chunks_per_sequence}"

    def kv(self, layer: int, chunk: int) -> str:
        """K and V of a chunk: a tensor of its own, or a part of its sequence's context."""
        if not self.workload.sliced:
            return f"kv.{layer}.{chunk}"
        return f"{self.context(layer, chunk)}.part{chunk % self.workload.chunks_per_sequence}"


def declare_step(builder: ChainBuilder, shapes: DecoderShapes) -> None:
    """All but the tensors of groups."""
    spec, workload = shapes.spec, shapes.workload
    for chunk in range(workload.chunks_per_round):
        declare_inputs(builder, shapes, chunk)
        for layer in range(spec.num_layers):
            _declare_saved(builder, shapes, layer, chunk)
        if workload.cache is not None:
            _declare_caches(builder, shapes, chunk)
        shape = (workload.chunk_tokens, spec.d_model)
        last = shapes.hidden(spec.num_layers, chunk)
        builder.declare(dense_tensor(last, "activation", spec.dtype, shape))
        builder.declare(dense_tensor(f"d_hidden.{chunk}", "activation", spec.dtype, shape))
    if workload.sliced:
        for sequence in range(workload.chunks_per_round // workload.chunks_per_sequence):
            for layer in range(spec.num_layers):
                declare_context(builder, shapes, f"kv.{layer}.{sequence}", spec.dtype)
            declare_context(builder, shapes, f"d_context.{sequence}", "float32")
    if shapes.balances and spec.experts:
        sums = (2, spec.experts.count)
        builder.declare(dense_tensor("balance", "activation", "float32", sums))
    declare_results(builder, shapes)


def _declare_caches(builder: ChainBuilder, shapes: DecoderShapes, chunk: int) -> None:
    """Those of a chunk's sequences, and the logits of their last tokens."""
    spec, workload = shapes.spec, shapes.workload
    assert workload.cache is not None
    sequences = workload.chunk_tokens // workload.seq_len
    row = (2, spec.num_kv_heads, spec.head_dim)
    for layer in range(spec.num_layers):
        shape = (sequences, workload.cache.room, *row)
        builder.declare(dense_tensor(shapes.cache(layer, chunk), "context", spec.dtype, shape))
    logits = (sequences, spec.vocab_size)
    builder.declare(dense_tensor(f"logits.{chunk}", "loss", "float32", logits))


def _declare_saved(builder: ChainBuilder, shapes: DecoderShapes, layer: int, chunk: int) -> None:
    """What backward needs of one block and chunk, grouped by recompute level."""
    spec, tokens = shapes.spec.layer(layer), shapes.workload.chunk_tokens
    hidden_bytes = tokens * spec.d_model * spec.itemsize
    low_bytes = tokens * shapes.low_width(layer) * spec.itemsize
    route_bytes = tokens * spec.experts.per_token * ROUTE_BYTES if spec.experts else 0
    parent, size = f"input.{layer}.{chunk}", hidden_bytes + low_bytes + 8 * tokens + route_bytes
    builder.declare_flat(parent, size, "activation", spec.dtype)
    hidden = dense_tensor(
        shapes.hidden(layer, chunk), "activation", spec.dtype, (tokens, spec.d_model)
    )
    norms = dense_tensor(f"norms.{layer}.{chunk}", "activation", "float32", (2, tokens))
    builder.declare(part_of(parent, hidden, 0))
    builder.declare(part_of(parent, norms, hidden_bytes))
    if low_bytes:
        low = dense_tensor(
            f"low.{layer}.{chunk}", "activation", spec.dtype, (tokens, shapes.low_width(layer))
        )
        builder.declare(part_of(parent, low, hidden_bytes + norms.size_bytes))
    if spec.experts:
        shape = (2, tokens, spec.experts.per_token)  # numbers, then weights
        routes = dense_tensor(f"routes.{layer}.{chunk}", "activation", "int32", shape)
        builder.declare(part_of(parent, routes, size - route_bytes))
        rows = tokens * spec.experts.per_token
        projected = (rows, 2 * spec.experts.d_ff)
        name = f"experts.{layer}.{chunk}"
        builder.declare(dense_tensor(name, "activation", spec.dtype, projected))
    if not shapes.workload.sliced:
        kv_shape = (tokens, 2, spec.num_kv_heads, spec.head_dim)
        builder.declare(dense_tensor(shapes.kv(layer, chunk), "context", spec.dtype, kv_shape))
    attention_bytes = tokens * (spec.d_q * spec.itemsize + 4 * spec.num_heads)
    builder.declare_flat(f"attention.{layer}.{chunk}", attention_bytes, "activation", spec.dtype)
    widths = spec.d_q + spec.d_model + 2 * dense_width(spec)
    builder.declare_flat(
        f"projections.{layer}.{chunk}", tokens * widths * spec.itemsize, "activation", spec.dtype
    )


def declare_context(builder: ChainBuilder, shapes: DecoderShapes, name: str, dtype: str) -> None:
    """Keys and values (or their gradients) of a whole sequence, in parts by chunk."""
    spec, workload = shapes.spec, shapes.workload
    row = (2, spec.num_kv_heads, spec.head_dim)
    builder.declare(dense_tensor(name, "context", dtype, (workload.seq_len, *row)))
    for index in range(workload.chunks_per_sequence):
        part = dense_tensor(f"{name}.part{index}", "context", dtype, (workload.chunk_tokens, *row))
        builder.declare(part_of(name, part, index * part.size_bytes))
