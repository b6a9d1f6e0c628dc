"""What a recipe and a model need before a step can be lowered."""

from twinstream.models.model import AnyModel
from twinstream.models.recipe import Recipe
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import Workload


def settled(recipe: Recipe) -> Recipe:
    """With kernels, and with the optimizer where the recipe can have it."""
    changes: dict[str, object] = {"kernels": recipe.implementations}
    if not recipe.places_among((recipe.optimizer,)):
        if recipe.optimizer != "device":
            raise TwinstreamError(
                f"the optimizer '{recipe.optimizer}' cannot clip: the norm of all gradients is "
                'made on the device; lower with Recipe(optimizer="device_after_backward")'
            )
        changes["optimizer"] = "device_after_backward"
    return recipe.model_copy(update=changes)


def require_pairs(model: AnyModel, workload: Workload, recipe: Recipe) -> None:
    """
    Raises:
        TwinstreamError: the loss is of pairs, and the model or its chunks have none.
    """
    if recipe.loss.sides == 1:
        return
    require_packs(model)
    if not workload.most_pairs:
        raise TwinstreamError(
            "the loss of pairs (dpo) needs both sequences of a pair packed in one chunk, and a "
            f"chunk of {workload.chunk_tokens:,} tokens has no room for two: give it twice the "
            "tokens of the longest sequence"
        )


def require_packs(model: AnyModel) -> None:
    """
    Raises:
        TwinstreamError: the model cannot have both documents of a pair in one chunk.
    """
    if not model.is_packed:
        raise TwinstreamError(
            f"'{model.name}' does not keep packed documents apart, and the loss of pairs (dpo) "
            "needs both of a pair in one chunk"
        )
