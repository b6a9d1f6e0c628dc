"""What several ranks cannot train yet: one sentence, before anything is done."""

from twinstream.training.options import OptionsError, TrainOptions

_WITHOUT = "only one device does that yet: leave it out, or train without --ranks"


def require_possible(options: TrainOptions) -> None:
    """
    Raises:
        OptionsError: an option is of what ranks do not do yet.
    """
    asked = {
        "fp32_tail (another plan for the last steps)": options.fp32_tail > 0,
        f"policy '{options.policy}'": options.policy != "optimal",
        "recompute (one level for all blocks)": options.recompute is not None,
        "backend cuda": options.backend == "cuda",
    }
    if found := [what for what, is_asked in asked.items() if is_asked]:
        raise OptionsError(f"{found[0]}: {_WITHOUT}")
