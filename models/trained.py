"""Which groups of parameters a recipe has, how they lie, and which of them it trains.

The base's groups are those of the model; the adapters of a layer are the group `lora.LAYER`, which
a traced module has among its own.
"""

from twinstream.models.adapters.adapter_layout import adapter_group, adapter_layout
from twinstream.models.layout import ADAPTERS, HEAD, FlatLayout
from twinstream.models.model import Model
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.errors import TwinstreamError


class NothingToTrainError(TwinstreamError):
    """A recipe freezes what the model does not have, or all that it has."""


def all_groups(model: Model, recipe: Recipe) -> tuple[str, ...]:
    """The base's groups in the order of the forward pass, then those of adapters."""
    adapters = range(model.num_layers) if recipe.lora else ()
    return (*model.parameter_groups, *map(adapter_group, adapters))


def adapter_groups(model: Model, recipe: Recipe) -> tuple[str, ...]:
    """Those of adapters: of a recipe, or that a traced module has."""
    return tuple(group for group in all_groups(model, recipe) if group.startswith(ADAPTERS))


def trained_groups(model: Model, recipe: Recipe) -> tuple[str, ...]:
    """Those that have a gradient, an optimizer state and an update; the rest is only read.

    Raises:
        NothingToTrainError: there are none, or what is frozen is no group of the model.
    """
    groups = all_groups(model, recipe)
    if unknown := [group for group in recipe.frozen if group not in groups]:
        raise NothingToTrainError(
            f"'{model.name}' has no group '{unknown[0]}' to freeze: there are embedding, the "
            f"layers 0 to {model.num_layers - 1}, and head"
        )
    never = model.untrained_groups
    trained = tuple(g for g in groups if not recipe.freezes(g) and g not in never)
    if not trained:
        raise NothingToTrainError(
            f"all of '{model.name}' is frozen, and nothing is left to train; freeze less, or add "
            "adapters with --lora"
        )
    return trained


def layout_of(model: Model, recipe: Recipe, group: str) -> FlatLayout:
    """How the flat parameters of a group lie."""
    if group.startswith(ADAPTERS) and isinstance(model, ModelSpec):
        assert recipe.lora is not None, f"the recipe has no adapters, and so no group {group}"
        return adapter_layout(model, recipe.lora)
    return model.group_layout(group)


def first_backward_layer(model: Model, recipe: Recipe) -> int:
    """The layer at which backward ends: nothing below it is trained; num_layers if no layer is.

    >>> from twinstream.models.presets import load_preset
    >>> first_backward_layer(load_preset("tiny"), Recipe(frozen=("embedding", "0")))
    1
    """
    trained = trained_groups(model, recipe)
    layers = [model.layer_of(group) for group in trained if group != HEAD]
    if None in layers:  # the embedding, or what several blocks share
        return 0
    return min((layer for layer in layers if layer is not None), default=model.num_layers)
