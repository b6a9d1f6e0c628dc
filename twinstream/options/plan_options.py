"""What is planned, as options: a model and its step, and the GPUs that they are laid out on."""

from typing import Any, Literal

from twinstream.options.option_group import (
    FIXED,
    OPTIMIZER,
    SEVERAL,
    STEPS,
    WHERE,
    OptionGroup,
    flag,
)
from twinstream.options.recipe_options import RecipeOptions
from twinstream.options.step_options import RankOptions, StepOptions
from twinstream.planner.choices import Effort
from twinstream.planner.generation import TextGeneration
from twinstream.schedule.errors import ArgumentError

KEPT = 3  # layouts that are shown


class PlanOptions(RecipeOptions, StepOptions):
    """A model, its step and the device that it is planned for."""

    model: str | None = flag(
        WHERE,
        "NAME|FILE",
        "A preset (`twinstream models`), or a Hugging Face config.json.",
    )
    machine: str | None = flag(
        WHERE,
        "NAME|FILE",
        "A shipped profile (`twinstream machines`), or a TOML file.",
    )
    seq_len: str | None = flag(
        STEPS,
        "N[,N...]",
        "Tokens of a sequence, or of unequal ones that are packed together: 300,212,512.",
    )
    optimizer_overhead: str | None = flag(
        STEPS,
        "SHARE",
        "Share of the step that the optimizer may take where --tokens-per-step is not given: 1% "
        "(the default) or 0.01.",
        rare=True,
    )
    clips: bool = flag(
        OPTIMIZER,
        "",
        "Gradients are clipped to a norm, as `train` does: all updates wait for it.",
        False,
        rare=True,
    )
    home: tuple[str, ...] = flag(
        FIXED,
        "KIND=WHERE",
        "Where a kind of tensor is at home, again for each: parameter, gradient, optimizer_state "
        "or activation = device or host.",
        (),
        rare=True,
    )
    prefetch: float | None = flag(
        FIXED,
        "BLOCKS",
        "Load at most so long before the first use, in times of the longest task.",
        rare=True,
    )
    effort: Effort = flag(
        FIXED,
        "NAME",
        "quick (one cut of the step, simulated once) or normal.",
        "normal",
    )

    def given(self) -> list[str]:
        """The flags that were given, but for --machine."""
        return [flag for flag in super().given() if flag != "--machine"]


class TaskOptions(OptionGroup):
    """What is done with a model: it is trained, or generates text."""

    task: Literal["train", "inference"] = flag(
        WHERE,
        "NAME",
        "train, or inference: a pass over --batch prompts of --prompt tokens, then --decode tokens "
        "behind each.",
        "train",
    )
    prompt: int | None = flag(STEPS, "N", "Tokens of a prompt (inference).", ge=1, le=2**24)
    decode: int | None = flag(STEPS, "N", "Tokens generated behind it.", ge=1, le=2**24)
    batch: int | None = flag(STEPS, "N", "Sequences at a time; by default 1.", ge=1, le=2**24)

    def generation(self) -> TextGeneration | None:
        """Return what is generated; None where the model is trained.

        Raises:
            TwinstreamError: an option is missing, or is of the other task.
        """
        counts = {"--prompt": self.prompt, "--decode": self.decode, "--batch": self.batch}
        if self.task == "train":
            if beside := [name for name, count in counts.items() if count is not None]:
                raise ArgumentError(f"{beside[0]} is of --task inference: add that")
            return None
        for name in ("--prompt", "--decode"):
            if counts[name] is None:
                raise ArgumentError(f"--task inference needs {name}: how many tokens")
        assert self.prompt is not None and self.decode is not None
        return TextGeneration(self.prompt, self.decode, self.batch or 1)


def _degree(what: str, *, rare: bool = False) -> Any:
    return flag(SEVERAL, "N", what, rare=rare, ge=1)


class ClusterOptions(RankOptions):
    """GPUs, and what is not left open of a layout on them; None where one is not given."""

    cluster: str | None = flag(
        WHERE, "NAME|FILE",
        "GPUs of this cluster (`twinstream clusters`), or a TOML file; instead of --machine.",
    )  # fmt: skip
    gpus: int | None = flag(
        WHERE, "N",
        "GPUs, by default 1. With --cluster all layouts are searched, with --machine those that "
        "run here (unless --kernels megatron).", ge=1,
    )  # fmt: skip
    global_batch: int | None = flag(
        STEPS, "N", "Sequences of a training step: --tokens-per-step in sequences.", ge=1
    )
    precision: Literal["bf16", "fp16", "fp8", "fp4"] | None = flag(
        SEVERAL, "NAME", "bf16 (the default), fp16, fp8 or fp4, of linear layers; the last two are "
        "of the kernel set megatron.",
    )  # fmt: skip
    precision_units: str | None = flag(
        SEVERAL, "LIST", "What computes in --precision fp8 or fp4: products (of linear layers), "
        "gradients (of their weights), attention, head; by default products,gradients.",
        rare=True,
    )  # fmt: skip
    offload: bool | None = flag(
        SEVERAL, "", "Whether what has no room on the device may be in host memory; by default of "
        "several GPUs only where nothing fits without.", rare=True,
    )  # fmt: skip
    keep: int | None = flag(
        SEVERAL,
        "N",
        f"How many of the best layouts are shown, by default {KEPT}.",
        ge=1,
        le=20,
        rare=True,
    )
    etp: int | None = _degree(
        "Ranks that split an expert's matrices: as many as --tp, the default, or 1: experts then "
        "lie over tp x dp.", rare=True,
    )  # fmt: skip
    expert_imbalance: float | None = flag(
        SEVERAL, "FACTOR", "How many times the mean the rank with the busiest experts gets; 1 by "
        "default.", rare=True, ge=1, le=1e3,
    )  # fmt: skip
    expert_nodes: int | None = _degree(
        "Nodes over which the ranks that share the experts lie, where a token is sent once to each "
        "of them (DeepEP); by default it is sent to each of its experts.", rare=True,
    )  # fmt: skip
    capacity_factor: float | None = flag(
        SEVERAL, "FACTOR", "How many times the mean a rank's experts take at most; what more comes "
        "is dropped. By default nothing is.", rare=True, ge=0.01, le=1e3,
    )  # fmt: skip
    tp_overlap: bool | None = flag(
        SEVERAL, "", "Whether collectives of tp run in pieces beside the products around them, as "
        "Megatron-LM's userbuffers have it; by default not.", rare=True,
    )  # fmt: skip
    shard: int | None = _degree(
        "Ranks over which ZeRO shards; by default all of dp x cp. Groups of so many hold the same "
        "shards, and sum gradients over groups.", rare=True,
    )  # fmt: skip
    micro_batch: int | None = _degree(
        "Sequences of a microbatch: --chunk-tokens in sequences.", rare=True
    )

    def given(self) -> list[str]:
        """The flags that are set."""
        found = [flag for flag in super().given() if flag != "--offload"]
        if self.offload is None:
            return found
        return [*found, "--offload" if self.offload else "--no-offload"]
