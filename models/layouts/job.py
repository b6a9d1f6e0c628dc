"""What is laid out: a model, its batch, and the recipe that it is trained by."""

from typing import Any, Self

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.frozen_work import FrozenWork
from twinstream.models.layouts.layout import Layout
from twinstream.models.layouts.own_work import OwnWork
from twinstream.models.layouts.work import ShapeWork
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount
from twinstream.schedule.workload import Workload

_MEGATRON_KERNELS = KernelChoice(vector="megatron", attention="flash")


class Job(Node):
    """A training step of a model under a layout.

    `global_batch` and the layout's `micro_batch` count sequences of `seq_len` tokens. Kernels that
    the recipe leaves open are chosen layout by layout: twinstream's own where they compute it, the
    kernel set `megatron` where they do not; so are those it names, with `any_kernels`.
    `network_reduction`: switches may reduce (NVLS, SHARP) where the cluster's profile has it.
    `cut`: a round of a replica, which is a microbatch; None: its sequences whole, in one chunk.
    """

    shape: ModelSpec
    layout: Layout
    seq_len: PositiveCount
    global_batch: PositiveCount
    recipe: Recipe = Recipe()
    any_kernels: bool = True
    network_reduction: bool = True
    cut: Workload | None = None

    @classmethod
    def of_step(cls, spec: ModelSpec, workload: Workload, recipe: Recipe, layout: Layout) -> Self:
        """Of the step of one replica, whose rounds are microbatches."""
        sequences, rounds = workload.sequences_per_step, workload.rounds_per_step
        is_whole = workload.packing is None and workload.chunks_per_round == 1
        return cls(
            shape=spec,
            layout=layout.model_copy(update={"micro_batch": sequences // rounds}),
            seq_len=workload.seq_len,
            global_batch=sequences * layout.dp,
            recipe=recipe,
            cut=None if is_whole else workload.model_copy(update={"rounds_per_step": 1}),
        )

    def laid_out(self, layout: Layout) -> Self:
        """Return the job in a layout."""
        return self.model_copy(update={"layout": layout})

    def of_kind(self, kind: int) -> Self:
        """Return the job as if all layers were of a kind (`ModelSpec.kind_of`)."""
        return self.model_copy(update={"shape": self.shape.of_kind(kind)}) if kind else self

    def with_megatron_kernels(self) -> Self:
        """Return the job with the kernel set `megatron`, where its recipe leaves that open."""
        if self.recipe.kernels is not None:
            return self
        priced = KernelChoice(vector="megatron", attention="flash", deterministic=False)
        return self.model_copy(
            update={"recipe": self.recipe.model_copy(update={"kernels": priced})}
        )

    @property
    def dtype(self) -> str:
        """Of activations and parameters."""
        return self.shape.dtype

    @property
    def precision(self) -> str:
        """What linear layers multiply in: bf16, fp8 or fp4; fp16 is as fast as bf16."""
        matmuls = self.recipe.implementations.matmuls
        return "bf16" if matmuls == "model" else matmuls

    @property
    def gradient_dtype(self) -> str:
        """In which weight gradients are summed, over microbatches and over ranks."""
        return self.recipe.gradient_dtype(self.dtype)

    @property
    def num_microbatches(self) -> int:
        """Of one replica, in a step."""
        return self.global_batch // (self.layout.dp * self.layout.micro_batch)

    @property
    def tokens_per_step(self) -> int:
        """Of all replicas."""
        return self.step.tokens_per_step

    @property
    def workload(self) -> Workload:
        """The step of one replica: a round for each microbatch."""
        rounds = {"rounds_per_step": self.num_microbatches}
        if self.cut is not None:
            return self._in_slices(self.cut).model_copy(update=rounds)
        whole = Workload(
            seq_len=self.seq_len, chunk_tokens=self.layout.micro_batch * self.seq_len,
            chunks_per_round=1, rounds_per_step=self.num_microbatches,
        )  # fmt: skip
        return self._in_slices(whole)

    def _in_slices(self, workload: Workload) -> Workload:
        """Chunks are no longer than slices of a layout that splits sequences and that runs."""
        layout, kernels = self.layout, self.recipe.kernels
        is_own = kernels is not None and kernels.vector != "megatron"
        size, left = divmod(workload.seq_len, layout.num_slices)
        if not layout.splits_sequences or not is_own or left or workload.packing is not None:
            return workload
        chunk = min(size, workload.chunk_tokens)
        count = workload.chunk_tokens * workload.chunks_per_round // chunk
        return workload.model_copy(update={"chunk_tokens": chunk, "chunks_per_round": count})

    @property
    def step(self) -> Workload:
        """The step of all replicas together."""
        workload = self.workload
        rounds = workload.rounds_per_step * self.layout.dp
        return workload.model_copy(update={"rounds_per_step": rounds})

    @property
    def is_own(self) -> bool:
        """Whether the recipe's kernels are twinstream's own, of which none is split over ranks."""
        kernels, layout = self.recipe.kernels, self.layout
        is_split = layout.tp * layout.cp * layout.ep > 1
        return kernels is not None and kernels.vector != "megatron" and not is_split

    @property
    def work(self) -> ShapeWork:
        """What one rank does of a layer for one microbatch."""
        layout, kernels = self.layout, self.recipe.kernels or _MEGATRON_KERNELS
        sizes: dict[str, Any] = {
            "shape": self.shape, "seq_len": self.seq_len, "micro_batch": layout.micro_batch,
            "dtype": self.dtype, "gradient_dtype": self.gradient_dtype,
            "optimizer_state": self.recipe.state_of(self.dtype),
        }  # fmt: skip
        if self.is_own:
            return OwnWork(**sizes, recipe=self.recipe)
        sizes |= {
            "tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "etp": layout.etp,
            "sequence_parallel": layout.sequence_parallel and layout.tp > 1,
            "matmul_dtype": None if kernels.matmuls == "model" else kernels.matmuls,
            "attention_implementation":
                None if kernels.attention == "flash" else kernels.attention,
            "expert_imbalance": layout.expert_imbalance,
            "capacity_factor": layout.capacity_factor, "expert_nodes": layout.expert_nodes,
            "narrow": kernels.narrow,
        }  # fmt: skip
        if self.recipe.lora is not None or self.recipe.frozen:
            return FrozenWork(**sizes, recipe=self.recipe)
        return ShapeWork(**sizes)
