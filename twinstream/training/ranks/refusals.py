"""What several ranks cannot train yet: one sentence, before anything is done."""

from twinstream.training.options import OptionsError, TrainOptions

_WITHOUT = "only one device does that yet: leave it out, or train without --ranks"


def what_is_of_one_device(options: TrainOptions) -> str | None:
    """What is asked for that several ranks do not do yet; None where they do all."""
    asked = {
        "fp32_tail (another plan for the last steps)": options.fp32_tail > 0,
        f"policy '{options.policy}'": options.policy != "optimal",
        "recompute (one level for all blocks)": options.recompute is not None,
    }
    return next((what for what, is_asked in asked.items() if is_asked), None)


def require_possible(options: TrainOptions) -> None:
    """
    Raises:
        OptionsError: an option is of what ranks do not do yet.
    """
    if (what := what_is_of_one_device(options)) is not None:
        raise OptionsError(f"{what}: {_WITHOUT}")
