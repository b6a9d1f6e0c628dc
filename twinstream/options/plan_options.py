"""What is planned, as options: a model and its step, and the GPUs that they are laid out on."""

from typing import Any, Literal

from twinstream.options.option_group import (
    FIXED,
    OPTIMIZER,
    SEVERAL,
    STEPS,
    WHERE,
    flag,
)
from twinstream.options.recipe_options import RecipeOptions
from twinstream.options.step_options import RankOptions, StepOptions
from twinstream.planner.choices import Effort

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
    optimizer: Literal["device", "device_after_backward"] | None = flag(
        FIXED,
        "WHEN",
        "device (each group as soon as its gradients are there, the default) or "
        "device_after_backward.",
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


def _degree(what: str, *, rare: bool = False) -> Any:
    return flag(SEVERAL, "N", what, rare=rare, ge=1)


class ClusterOptions(RankOptions):
    """What to lay out on how many GPUs, and what is not left open; None where one is not given."""

    cluster: str | None = flag(
        WHERE, "NAME|FILE",
        "GPUs of this cluster (`twinstream clusters`), or a TOML file; instead of --machine.",
    )  # fmt: skip
    gpus: int | None = flag(
        WHERE, "N",
        "GPUs, by default 1. With --cluster all layouts are searched, with --machine those that "
        "run here, unless others are asked for (--tp, --cp, --ep, --kernels megatron).", ge=1,
    )  # fmt: skip
    global_batch: int | None = flag(
        STEPS, "N", "Sequences of a training step: --tokens-per-step in sequences.", ge=1
    )
    precision: Literal["bf16", "fp16", "fp8", "fp4"] | None = flag(
        SEVERAL, "NAME", "bf16 (the default), fp16, fp8 or fp4, of linear layers; the last two are "
        "of the kernel set megatron.",
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
    tp: int | None = _degree("Tensor parallel ranks.")
    cp: int | None = _degree("Context parallel ranks.", rare=True)
    ep: int | None = _degree("Replicas that share the routed experts.", rare=True)
    micro_batch: int | None = _degree(
        "Sequences of a microbatch: --chunk-tokens in sequences.", rare=True
    )

    def given(self) -> list[str]:
        """The flags that are set."""
        found = [flag for flag in super().given() if flag != "--offload"]
        if self.offload is None:
            return found
        return [*found, "--offload" if self.offload else "--no-offload"]
