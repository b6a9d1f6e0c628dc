"""What several ranks cannot train yet: one sentence, before anything is done."""

from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.training.options import OptionsError, TrainOptions

_WITHOUT = "only one device does that yet: leave it out, or train without --ranks"


def without_clipping(options: TrainOptions) -> TrainOptions:
    """The options, not clipping unless that was asked for."""
    if "max_grad_norm" in options.model_fields_set:
        return options
    return options.model_copy(update={"max_grad_norm": 0.0})


def require_possible(options: TrainOptions) -> None:
    """
    Raises:
        OptionsError: an option is of what ranks do not do yet.
    """
    asked = {
        "eval_data (evaluation)": bool(options.eval_data),
        "lora (adapters)": options.lora is not None,
        "adapter": options.adapter is not None,
        "freeze (frozen weights)": bool(options.freeze),
        "fp32_tail (another plan for the last steps)": options.fp32_tail > 0,
        "max_grad_norm (clipping)": options.max_grad_norm > 0,
        f"policy '{options.policy}'": options.policy != "optimal",
        "recompute (one level for all blocks)": options.recompute is not None,
        "backend cuda": options.backend == "cuda",
    }
    _refuse_first(asked)
    chunk = options.chunk_tokens
    if chunk is not None and chunk < options.seq_len:
        raise OptionsError(
            f"chunk_tokens {chunk} is less than seq_len {options.seq_len}, so that sequences are "
            f"cut into slices: {_WITHOUT}"
        )


def require_possible_model(spec: ModelSpec, recipe: Recipe) -> None:
    """
    Raises:
        OptionsError: the model, or the recipe that a run goes on with, is of such a kind.
    """
    _refuse_first(
        {
            "tied embeddings": spec.tied_embeddings,
            "clipping, with which the run began": recipe.clips,
            "adapters": recipe.lora is not None,
            "frozen weights": bool(recipe.frozen),
        }
    )


def _refuse_first(asked: dict[str, bool]) -> None:
    if found := [what for what, is_asked in asked.items() if is_asked]:
        raise OptionsError(f"{found[0]}: {_WITHOUT}")
