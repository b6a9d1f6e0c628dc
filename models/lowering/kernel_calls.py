"""The kernel calls of a chain's tasks: what they are told, and what they cost."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from twinstream.models.kernel_costs.triton_work import TritonChunkWork
from twinstream.models.kernel_costs.work import ChunkWork
from twinstream.models.lowering.chain_builder import ChainBuilder
from twinstream.models.lowering.optimizer_tasks import gradient_attribute
from twinstream.models.recipe import Recipe
from twinstream.models.rope import ROPE_SCALING
from twinstream.models.spec import ModelSpec
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import Attribute
from twinstream.schedule.workload import Workload


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

    def block(self, kernel: str, chunk: int, *, frozen: bool = False) -> str:
        """Of a block; chunks that begin alike share it."""
        spec, start = self.spec, self._start(chunk)
        call_id = f"{kernel}@{start}" + (".frozen" if frozen else "")
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
        return self.builder.call(call_id, self._key(kernel), attributes, costs[kernel]())

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
