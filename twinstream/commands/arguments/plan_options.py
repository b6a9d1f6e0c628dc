"""The options of `plan`, `whatif` and `run` that say what to plan on one device."""

from twinstream.options.option_group import FIXED, OPTIMIZER, STEPS, WHERE, flag
from twinstream.options.recipe_options import RecipeOptions
from twinstream.options.step_options import StepOptions
from twinstream.planner.choices import Effort


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
    optimizer: str | None = flag(
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
