"""The tasks of our own decoders: embedding, blocks with their recompute levels, head."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from twinstream.models.adapters.adapter_layout import adapter_group, low_widths
from twinstream.models.adapters.quantized_base import BaseFormat
from twinstream.models.flops import model_flops_per_step
from twinstream.models.kernel_costs.triton_work import TritonChunkWork
from twinstream.models.kernel_costs.work import ChunkWork
from twinstream.models.lowering.chain_builder import ChainBuilder
from twinstream.models.lowering.declarations import (
    Shapes,
    declare_groups,
    declare_inputs,
    declare_results,
    dense_tensor,
    part_of,
)
from twinstream.models.lowering.optimizer_tasks import gradient_attribute
from twinstream.models.lowering.step import StepLowering
from twinstream.models.recipe import Recipe
from twinstream.models.rope import ROPE_SCALING
from twinstream.models.spec import ModelSpec
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import Attribute, Label, TaskOperand
from twinstream.schedule.workload import Workload


@dataclass(frozen=True)
class DecoderShapes(Shapes):
    """How the tensors of a decoder's step are named and sized, beside those of its state."""

    spec: ModelSpec

    @property
    def low_width(self) -> int:
        """Columns of what a block's adapters leave for its backward pass; 0 without any."""
        return sum(low_widths(self.recipe.lora).values()) if self.recipe.lora else 0

    def hidden(self, layer: int, chunk: int) -> str:
        return f"hidden.{layer}.{chunk}"

    def context(self, layer: int, chunk: int) -> str:
        return f"kv.{layer}.{chunk // self.workload.chunks_per_sequence}"

    def kv(self, layer: int, chunk: int) -> str:
        """K and V of a chunk: a tensor of its own, or a part of its sequence's context."""
        if not self.workload.sliced:
            return f"kv.{layer}.{chunk}"
        return f"{self.context(layer, chunk)}.part{chunk % self.workload.chunks_per_sequence}"


class DecoderLowering(StepLowering):
    """Adds the tasks of a `ModelSpec`."""

    shapes: DecoderShapes

    def __init__(
        self, spec: ModelSpec, workload: Workload, recipe: Recipe,
        shapes: DecoderShapes | None = None,
    ) -> None:  # fmt: skip
        super().__init__(shapes or DecoderShapes(spec, workload, recipe), workload, recipe)
        self.spec = spec
        self.calls = KernelCalls(self.builder, spec, workload, recipe)

    def model_flops(self) -> int:
        return model_flops_per_step(self.spec, self.workload, self.recipe)

    def _declare(self) -> None:
        declare_groups(self.builder, self.shapes)
        declare_step(self.builder, self.shapes)

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
            call = self.calls.block("block_forward", chunk, base=self._base(layer))
            self._add("block_forward", call, operands, round_=round_, layer=layer, chunk=chunk)

    def _base(self, layer: int) -> BaseFormat:
        return self.recipe.base_of(str(layer))

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
            frozen, base = str(layer) not in self.trained, self._base(layer)
            call = self.calls.block("block_backward", chunk, frozen=frozen, base=base)
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
            call = self.calls.block(kernel, chunk, base=self._base(layer))
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


def declare_step(builder: ChainBuilder, shapes: DecoderShapes) -> None:
    """All but the tensors of groups."""
    spec, workload = shapes.spec, shapes.workload
    for chunk in range(workload.chunks_per_round):
        declare_inputs(builder, shapes, chunk)
        for layer in range(spec.num_layers):
            _declare_saved(builder, shapes, layer, chunk)
        shape = (workload.chunk_tokens, spec.d_model)
        last = shapes.hidden(spec.num_layers, chunk)
        builder.declare(dense_tensor(last, "activation", spec.dtype, shape))
        builder.declare(dense_tensor(f"d_hidden.{chunk}", "activation", spec.dtype, shape))
    if workload.sliced:
        for sequence in range(workload.chunks_per_round // workload.chunks_per_sequence):
            for layer in range(spec.num_layers):
                _declare_context(builder, shapes, f"kv.{layer}.{sequence}", spec.dtype)
            _declare_context(builder, shapes, f"d_context.{sequence}", "float32")
    declare_results(builder, shapes)


def _declare_saved(builder: ChainBuilder, shapes: DecoderShapes, layer: int, chunk: int) -> None:
    """What backward needs of one block and chunk, grouped by recompute level."""
    spec, tokens = shapes.spec, shapes.workload.chunk_tokens
    hidden_bytes = tokens * spec.d_model * spec.itemsize
    low_bytes = tokens * shapes.low_width * spec.itemsize
    parent = f"input.{layer}.{chunk}"
    builder.declare_flat(parent, hidden_bytes + low_bytes + 8 * tokens, "activation", spec.dtype)
    hidden = dense_tensor(
        shapes.hidden(layer, chunk), "activation", spec.dtype, (tokens, spec.d_model)
    )
    norms = dense_tensor(f"norms.{layer}.{chunk}", "activation", "float32", (2, tokens))
    builder.declare(part_of(parent, hidden, 0))
    builder.declare(part_of(parent, norms, hidden_bytes))
    if low_bytes:
        low = dense_tensor(
            f"low.{layer}.{chunk}", "activation", spec.dtype, (tokens, shapes.low_width)
        )
        builder.declare(part_of(parent, low, hidden_bytes + norms.size_bytes))
    if not shapes.workload.sliced:
        kv_shape = (tokens, 2, spec.num_kv_heads, spec.head_dim)
        builder.declare(dense_tensor(shapes.kv(layer, chunk), "context", spec.dtype, kv_shape))
    attention_bytes = tokens * (spec.d_q * spec.itemsize + 4 * spec.num_heads)
    builder.declare_flat(f"attention.{layer}.{chunk}", attention_bytes, "activation", spec.dtype)
    widths = spec.d_q + spec.d_model + 2 * spec.d_ff
    builder.declare_flat(
        f"projections.{layer}.{chunk}", tokens * widths * spec.itemsize, "activation", spec.dtype
    )


def _declare_context(builder: ChainBuilder, shapes: DecoderShapes, name: str, dtype: str) -> None:
    """Keys and values (or their gradients) of a whole sequence, in parts by chunk."""
    spec, workload = shapes.spec, shapes.workload
    row = (2, spec.num_kv_heads, spec.head_dim)
    builder.declare(dense_tensor(name, "context", dtype, (workload.seq_len, *row)))
    for index in range(workload.chunks_per_sequence):
        part = dense_tensor(f"{name}.part{index}", "context", dtype, (workload.chunk_tokens, *row))
        builder.declare(part_of(name, part, index * part.size_bytes))


@dataclass(frozen=True)
class KernelCalls:
    """Declares calls where they are first needed; each gives its name."""

    builder: ChainBuilder
    spec: ModelSpec
    workload: Workload
    recipe: Recipe

    def work(self, start: int = 0) -> ChunkWork:
        """Of a chunk that begins so far into its sequence."""
        kind = TritonChunkWork if self.recipe.implementations.vector == "triton" else ChunkWork
        return kind(self.spec, self.workload, start, self.recipe)

    def _start(self, chunk: int) -> int:
        return (chunk % self.workload.chunks_per_sequence) * self.workload.chunk_tokens

    def block(
        self, kernel: str, chunk: int, *, frozen: bool = False, base: BaseFormat = "model"
    ) -> str:
        """Of a block; chunks that begin alike share it."""
        spec, start = self.spec, self._start(chunk)
        call_id = f"{kernel}@{start}" + (".frozen" if frozen else "")
        call_id += "" if base == "model" else f".{base}"
        if call_id in self.builder.calls:
            return call_id
        work = self.work(start)
        costs: dict[str, Callable[[], tuple[Work, ...]]] = {
            "block_forward": work.block_forward,
            "block_recompute_attention": work.recompute_attention,
            "block_recompute_input": work.recompute_input,
            "block_backward": partial(work.block_backward, frozen=frozen),
        }
        attributes: dict[str, Attribute] = {
            "d_model": spec.d_model,
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "d_ff": spec.d_ff,
            "qk_norm": spec.qk_norm,
            "qkv_bias": spec.qkv_bias,
            "norm_eps": spec.norm_eps,
            "rope_theta": spec.rope_theta,
            "dtype": spec.dtype,
            "num_tokens": self.workload.chunk_tokens,
            "seq_len": self.workload.seq_len,
            "chunk_start": start,
            "attention": self.recipe.implementations.attention,
        }
        if spec.rope_scaling is not None:
            attributes |= {f"{ROPE_SCALING}{n}": v for n, v in spec.rope_scaling}
        if self.workload.packing is not None:
            attributes["most_sequences"] = self.workload.packing.most_sequences
        if kernel == "block_backward":
            attributes |= gradient_attribute(self.recipe, spec.dtype) | frozen_attribute(frozen)
        if self.recipe.lora is not None:
            attributes |= self.recipe.lora.attributes
        cost = costs[kernel]()
        if base != "model":
            attributes["base"] = base
            cost = (*cost, *work.dequantized(kernel, base))
        return self.builder.call(call_id, self._key(kernel), attributes, cost)

    def other(self, kernel: str, cost: tuple, **extra: Attribute) -> str:  # type: ignore[type-arg]
        """Of embedding or head, by the kernel's name."""
        attributes: dict[str, Attribute] = {
            "d_model": self.spec.d_model,
            "vocab_size": self.spec.vocab_size,
            "dtype": self.spec.dtype,
            "num_tokens": self.workload.chunk_tokens,
            **extra,
        }
        return self.builder.call(kernel, self._key(kernel), attributes, cost)

    def _key(self, kernel: str) -> str:
        return f"{kernel}/{self.recipe.implementations.vector}"


def frozen_attribute(frozen: bool) -> dict[str, Attribute]:
    """What a call is told of weights that have no gradient: nothing where they have one."""
    return {"frozen": True} if frozen else {}
