"""How a step is cut, planned and computed, as options, and the layout of ranks that run it."""

from typing import Any, Literal, get_args

from twinstream.models.kernel_costs.attention_limits import attention_names
from twinstream.models.layouts.layout import (
    RUN_PIPELINES,
    Layout,
    LayoutError,
    Pipeline,
    ReplicaSum,
)
from twinstream.options.option_group import MEMORY, SEVERAL, STEPS, OptionGroup, flag
from twinstream.planner.choices import UpdatePlaces
from twinstream.planner.policies import policy_names
from twinstream.planner.request import DEFAULT_POLICY


class StepOptions(OptionGroup):
    """The step of one device, its memories, and the kernels that compute it."""

    tokens_per_step: int | None = flag(
        STEPS,
        "N",
        "Tokens of an optimizer step; by default as few as leave the optimizer 1 % of it (of a "
        "run also as leave 20 steps).",
        ge=1,
    )
    chunk_tokens: int | None = flag(
        STEPS,
        "N",
        "Tokens of a chunk: packed sequences, or a slice of one.",
        ge=1,
        rare=True,
    )
    chunks_per_round: int | None = flag(
        STEPS,
        "N",
        "Chunks of a round of gradient accumulation; with ranks a round is a microbatch.",
        ge=1,
        rare=True,
    )
    device_mem: str | None = flag(
        MEMORY,
        "SIZE",
        "Cap of the memory of a device, or rank: 24GiB, 80% or bytes; by default all (that is "
        "free, where it runs).",
    )
    host_mem: str | None = flag(
        MEMORY,
        "SIZE",
        "Cap of pinned host memory, of each rank: 75GiB, 80% or bytes; by default 80% (of what is "
        "free, where it runs).",
    )
    disk_mem: str | None = flag(
        MEMORY,
        "SIZE",
        "Most of a drive for what has no room in host memory: 2TB.",
    )
    disk_bandwidth: str | None = flag(
        MEMORY,
        "SIZE/s",
        "Rate of the drive's reads, 7GB/s, or 7GB/s,5GB/s with that of writes, without which it is "
        "only read; a run goes no faster. By default the profile's (of a run what is measured when "
        "it begins).",
        rare=True,
    )
    disk_tbw: str | None = flag(
        MEMORY,
        "SIZE",
        "What the drive's maker warrants to be written, 1200TB, beside which a plan says what it "
        "writes a day. By default the profile's, else 600TB.",
        rare=True,
    )
    policy: str = flag(
        MEMORY,
        "NAME",
        f"One of: {', '.join(policy_names())}, or FILE.py:NAME of your own; `sweep` compares "
        "several.",
        DEFAULT_POLICY,
    )
    recompute: str | None = flag(
        MEMORY,
        "NAME",
        "none; full (every block from its input); attention (all but attention); experts; of the "
        "kernel set megatron also selective (attention's core) and mlp. By default as little as "
        "fits.",
        rare=True,
    )
    optimizer: Literal["device", "device_after_backward", "host", "auto"] | None = flag(
        MEMORY,
        "WHERE",
        "Updates: device (each group as soon as its gradients are there, the default), "
        "device_after_backward, host (its CPU), or auto (each group where that is faster).",
        rare=True,
    )
    kernels: str | None = flag(
        MEMORY,
        "NAME",
        "auto (Triton for a CUDA machine, torch's ops for a CPU; Megatron's for layouts that "
        "these do not compute), eager, triton, or megatron (priced, not run).",
        rare=True,
    )
    attention: str | None = flag(
        MEMORY,
        "NAME",
        "auto (what the machine's profile names as usual on its card, else sdpa_flash on CUDA and "
        "eager on a CPU; a run takes what is installed), or one of: "
        f"{', '.join(attention_names())}.",
        rare=True,
    )
    nondeterministic: bool = flag(
        MEMORY,
        "",
        "Allow an --attention that does not give the same bits from run to run.",
        False,
        rare=True,
    )

    @property
    def update_places(self) -> UpdatePlaces:
        """Where `optimal` is to have updates made: where the recipe says, or on the host, too."""
        on_host = self.policy == DEFAULT_POLICY and self.optimizer in ("host", "auto")
        return self.optimizer if on_host else "recipe"  # type: ignore[return-value]


class RankOptions(OptionGroup):
    """The layout of ranks that run; None where it is left open."""

    pp: int | None = flag(
        SEVERAL,
        "N",
        "Pipeline stages; by default what is predicted to be fastest.",
        ge=1,
    )
    dp: int | None = flag(
        SEVERAL,
        "N",
        "Data parallel replicas; by default what is predicted to be fastest.",
        ge=1,
    )
    zero: Literal[0, 1, 2, 3] | None = flag(
        SEVERAL,
        "STAGE",
        "What replicas shard, by ZeRO: 0 nothing, 1 state, 2 gradients too, 3 all; by default "
        "what is needed to fit, or is faster.",
    )
    tp: int | None = flag(
        SEVERAL,
        "N",
        "Tensor parallel ranks; by default searched.",
        ge=1,
    )
    parts: int | None = flag(
        SEVERAL,
        "N",
        "Parts of a block, whatever --tp is, added up in their order: every --tp that divides N "
        "has the same bits. By default a part a rank, and the transport's sums, which are faster.",
        ge=1,
        rare=True,
    )
    sequence_parallel: bool | None = flag(
        SEVERAL,
        "",
        "Ranks of --tp have slices of each chunk's tokens between sums (sequence parallelism): "
        "less is kept, and backward gathers it again. By default not, with --cluster priced so.",
        rare=True,
    )
    cp: int | None = flag(
        SEVERAL,
        "N",
        "Ranks with slices of each sequence; by default searched.",
        ge=1,
    )
    cp_parts: int | None = flag(
        SEVERAL,
        "N",
        "Parts of a sequence, whatever --cp is, summed in pairs: every --cp has the same bits that "
        "divides N, both powers of two. By default a part a rank.",
        ge=1,
        rare=True,
    )
    cp_exchange: Literal["all_gather", "ring", "auto"] | None = flag(
        SEVERAL,
        "NAME",
        "How ranks of --cp exchange keys and values: all_gather (the default), ring (a rank keeps "
        "blocks alone, the next travels beside attention) or auto: both are planned, the faster is "
        "taken.",
        rare=True,
    )
    ep: int | None = flag(
        SEVERAL,
        "N",
        "Replicas that share the routed experts, each with as many; by default each has all.",
        ge=1,
        rare=True,
    )
    virtual_stages: int | None = flag(
        SEVERAL,
        "N",
        "Virtual stages of a rank, with the pipelines interleaved and ring; by default 1.",
        ge=1,
        rare=True,
    )
    pipeline: Pipeline | None = flag(
        SEVERAL,
        "NAME",
        f"Order of the pipeline: {', '.join(get_args(Pipeline))} (the last is priced, not run); "
        "by default 1f1b.",
        rare=True,
    )
    reduction: ReplicaSum | None = flag(
        SEVERAL,
        "NAME",
        "How ranks that run sum gradients of replicas: rank_order (the same bits on any transport; "
        "the default) or library (the transport's own sums).",
        rare=True,
    )

    @property
    def split(self) -> Layout:
        """The layout of parts, of blocks or sequences, and of shared experts that is asked for,
        and nothing beside it."""
        tp, ep = self.tp or 1, self.ep or 1
        return Layout(
            tp=tp, parts=self.parts, cp=self.cp or 1, cp_parts=self.cp_parts, pp=self.pp or 1,
            ep=ep, dp=self.dp or ep,
        ).with_sequence_parallel(bool(self.sequence_parallel))  # fmt: skip

    def layout_fields(self) -> dict[str, Any]:
        """Fields of the layout that are given."""
        names = RankOptions.model_fields
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def require_run(self) -> None:
        """
        Raises:
            LayoutError: the pipeline is none that ranks run.
        """
        if self.pipeline is not None and self.pipeline not in RUN_PIPELINES:
            raise LayoutError(
                f"--pipeline '{self.pipeline}' is none that ranks run; these are: "
                f"{', '.join(RUN_PIPELINES)}"
            )
