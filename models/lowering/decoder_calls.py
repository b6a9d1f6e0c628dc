"""The kernel calls of a decoder's tasks: attributes and costs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.attributes import (
    IN_PARTS,
    NOT_CAUSAL,
    NUM_SEEN,
    SHARED,
    expert_attributes,
)
from twinstream.models.kernel_costs.part_work import (
    attention_part_backward,
    attention_part_forward,
    attention_part_recompute,
    context_part_backward,
    context_part_forward,
    kv_part_forward,
    mlp_part_backward,
    mlp_part_dispatch_forward,
    mlp_part_forward,
    mlp_part_recompute,
    output_part_backward,
    output_part_forward,
    q_part_recompute,
    qkv_part_backward,
    ring_part_backward,
    ring_part_forward,
)
from twinstream.models.kernel_costs.triton_work import TritonChunkWork
from twinstream.models.kernel_costs.work import ChunkWork
from twinstream.models.layout import EXPERTS
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.chain_builder import ChainBuilder, by_rank
from twinstream.models.lowering.declarations import DecoderShapes
from twinstream.models.lowering.optimizer_tasks import gradient_attribute
from twinstream.models.options import ROPE_SCALING, Experts
from twinstream.models.recipes.adapter_layout import lora_of_layer
from twinstream.models.recipes.quantized_base import BaseFormat
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import Attribute
from twinstream.schedule.workload import Workload

_PARTS: Mapping[str, Callable[[ChunkWork], tuple[Work, ...]]] = {
    "attention_part_forward": attention_part_forward,
    "attention_part_recompute": attention_part_recompute,
    "attention_part_backward": attention_part_backward,
    "kv_part_forward": kv_part_forward,
    "context_part_forward": context_part_forward,
    "context_part_recompute": attention_part_recompute,
    "context_part_backward": context_part_backward,
    "q_part_recompute": q_part_recompute,
    "ring_part_forward": ring_part_forward,
    "ring_part_backward": ring_part_backward,
    "output_part_forward": output_part_forward,
    "output_part_backward": output_part_backward,
    "qkv_part_backward": qkv_part_backward,
    "mlp_part_forward": mlp_part_forward,
    "mlp_part_recompute": mlp_part_recompute,
    "experts_part_recompute": ChunkWork.recompute_experts,
    "mlp_part_dispatch_forward": mlp_part_dispatch_forward,
    "mlp_part_combine_forward": ChunkWork.combine_forward,
    "mlp_part_dispatch_backward": ChunkWork.dispatch_backward,
    "mlp_part_backward": mlp_part_backward,
}

_OF_ROWS = ("experts_forward", "experts_backward")  # of other ranks' chunks
_OF_TOKENS = frozenset(
    (*(name for name in _PARTS if name.startswith(("mlp_", "experts_"))), "block_combine_forward",
     "block_dispatch_backward", *_OF_ROWS)
)  # fmt: skip
"""Kernels that take each token by itself, wherever sequences begin."""


class KeysSeen(NamedTuple):
    """How many keys a chunk of each rank sees of the block that has come in a step of a ring: in
    step 0 its own, up to the chunk's; later all queries see all of these, or there are none."""

    step: int
    keys: tuple[int, ...]


@dataclass(frozen=True)
class KernelCalls:
    """Declares calls where they are first needed; each gives its name."""

    builder: ChainBuilder
    spec: ModelSpec
    workload: Workload
    recipe: Recipe
    layout: Layout | None = None

    def work(
        self, start: int = 0, spec: ModelSpec | None = None, seen: int | None = None
    ) -> ChunkWork:
        """Of a chunk that begins so far into its sequence, in a layer built like a model's."""
        kind = TritonChunkWork if self.recipe.implementations.vector == "triton" else ChunkWork
        ep = 1 if self.layout is None else self.layout.ep
        return kind(spec or self.spec, self.workload, start, self.recipe, ep, seen)

    def _starts(self, chunk: int) -> tuple[int, ...]:
        """Where a chunk begins in its sequence, on each of the ranks that have slices of it."""
        cache = self.workload.cache
        filled = 0 if cache is None else cache.filled
        return (filled + chunk % self.workload.chunks_per_sequence * self.workload.chunk_tokens,)

    def block(
        self, kernel: str, chunk: int, layer: int, *, frozen: frozenset[str] = frozenset(),
        told: Mapping[str, Attribute] | None = None, seen: KeysSeen | None = None,
    ) -> str:  # fmt: skip
        """Of a block; chunks that begin alike share it, and layers that are built alike. Ranks that
        begin at several places take as long as one that begins at their mean.

        Args:
            frozen: those of the layer's groups that have no gradient.
            told: what else follows from where the chunk begins.
            seen: the keys of a block that goes around a ring, which attention is of.
        """
        spec, starts = self.spec.layer(layer), self._starts(chunk)
        start = sum(starts) // len(starts)
        is_frozen = str(layer) in frozen
        experts_frozen = f"{layer}{EXPERTS}" in frozen
        call_id = f"{kernel}@{start}" + (".frozen" if is_frozen else "")
        base, experts_base = self._bases(kernel, spec, layer)
        call_id += "" if base == "model" else f".{base}"
        call_id += "" if experts_base == "model" else f".experts_{experts_base}"
        call_id += ".frozen_experts" if experts_frozen and not is_frozen else ""
        call_id += ".trained_experts" if spec.experts and is_frozen and not experts_frozen else ""
        call_id += ".dense" if spec is not self.spec else ""
        call_id += "" if seen is None else f".step{seen.step}"
        if call_id in self.builder.calls:
            return call_id
        places = {"chunk_start": starts[:1] if kernel in _OF_ROWS else starts}
        work = self.work(start, spec)
        if seen is not None:
            work, told = self._of_block(seen, start, spec)
            places[NUM_SEEN] = seen.keys
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
            **by_rank("cp", places),
            "attention": self.recipe.implementations.attention,
            **(told or {}),
        }
        if spec.qk_norm_rows:
            attributes["qk_norm_rows"] = True
        if kernel in _PARTS:
            attributes[IN_PARTS] = True
        if spec.experts is not None:
            attributes |= self.experts_attributes(spec.experts)
            attributes |= self._shared_attributes(spec.experts, has_rows=kernel not in _PARTS)
        if spec.rope_scaling is not None:
            attributes |= {f"{ROPE_SCALING}{n}": v for n, v in spec.rope_scaling}
        if self.workload.packing is not None and kernel not in _OF_TOKENS:
            attributes["most_sequences"] = self.workload.packing.most_sequences
        if kernel.endswith("_backward"):
            attributes |= gradient_attribute(self.recipe, spec.dtype) | frozen_attribute(is_frozen)
            if experts_frozen:
                attributes["frozen_experts"] = True
        if (lora := lora_of_layer(self.spec, self.recipe.lora, layer)) is not None:
            attributes |= lora.attributes
        cost = _cost_of(kernel, work, frozen=is_frozen, frozen_experts=experts_frozen)
        for name, kept in (("base", base), ("experts_base", experts_base)):
            if kept != "model":
                attributes[name] = kept
        cost = (*cost, *work.dequantized(kernel, base, experts_base))
        return self.builder.call(call_id, self._key(kernel), attributes, cost)

    def _bases(self, kernel: str, spec: ModelSpec, layer: int) -> tuple[BaseFormat, BaseFormat]:
        """How the matrices lie that a kernel multiplies with, of a layer and of its experts."""
        base, experts = (self.recipe.base_of(g) for g in (str(layer), f"{layer}{EXPERTS}"))
        reads_experts = spec.experts is not None and (kernel not in _PARTS or kernel in _OF_TOKENS)
        return base, experts if reads_experts else "model"

    def _of_block(
        self, seen: KeysSeen, start: int, spec: ModelSpec
    ) -> tuple[ChunkWork, dict[str, Attribute]]:
        """The work of a chunk on a block that goes around a ring, and what else its call is told:
        of the mean of all ranks."""
        mean = sum(seen.keys) // len(seen.keys)
        if seen.step:
            return self.work(start, spec, mean), {NOT_CAUSAL: True}
        return self.work(mean - self.workload.chunk_tokens, spec), {}

    def _shared_attributes(self, experts: Experts, *, has_rows: bool) -> dict[str, Attribute]:
        """Of experts that ranks share: over how many, and the first that a rank has, which parts
        of a block that have no rows need not know."""
        if self.layout is None or self.layout.ep == 1:
            return {}
        ep = self.layout.ep
        if not has_rows:
            return {SHARED: ep}
        first = [rank * (experts.count // ep) for rank in range(ep)]
        pieces = ep if self.layout.reduction == "rank_order" else 1
        return {SHARED: ep, "num_pieces": pieces, **by_rank("ep", {"first_expert": first})}

    def experts_attributes(self, experts: Experts) -> dict[str, Attribute]:
        """What a call is told of experts; of the load-balancing loss of a round, what it counts in
        the step's."""
        balances = DecoderShapes(self.spec, self.workload, self.recipe).balances
        share = experts.aux_loss / self.workload.rounds_per_step if balances else 0.0
        return expert_attributes(experts.model_copy(update={"aux_loss": share}))

    def other(
        self, kernel: str, cost: tuple[Work, ...], told: Mapping[str, Attribute] | None = None,
        suffix: str = "",
    ) -> str:  # fmt: skip
        """Of embedding or head, by the kernel's name and what makes it another call."""
        attributes: dict[str, Attribute] = {
            "d_model": self.spec.d_model,
            "vocab_size": self.spec.vocab_size,
            "dtype": self.spec.dtype,
            "num_tokens": self.workload.chunk_tokens,
            **(told or {}),
        }
        return self.builder.call(kernel + suffix, self._key(kernel), attributes, cost)

    def _key(self, kernel: str) -> str:
        return f"{kernel}/{self.recipe.implementations.vector}"


def frozen_attribute(frozen: bool) -> dict[str, Attribute]:
    """What a call is told of weights that have no gradient: nothing where they have one."""
    return {"frozen": True} if frozen else {}


def _cost_of(
    kernel: str, work: ChunkWork, *, frozen: bool, frozen_experts: bool
) -> tuple[Work, ...]:
    costs: dict[str, Callable[[], tuple[Work, ...]]] = {
        **{name: partial(priced, work) for name, priced in _PARTS.items()},
        "block_forward": work.block_forward,
        "block_recompute_experts": work.recompute_experts,
        "block_recompute_attention": work.recompute_attention,
        "block_recompute_input": work.recompute_input,
        "block_backward": partial(
            work.block_backward, frozen=frozen, frozen_experts=frozen_experts
        ),
        "block_combine_forward": work.combine_forward,
        "block_dispatch_backward": work.dispatch_backward,
        "experts_forward": work.shared_forward,
        "experts_backward": partial(work.shared_backward, frozen_experts=frozen_experts),
    }
    return costs[kernel]()
