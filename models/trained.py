"""Which groups of parameters a recipe has, how they lie, and which of them it trains.

The base's groups are `embedding`, a layer by its number, and `head`; the adapters of a layer are
the group `lora.LAYER`.
"""

from twinstream.models.adapters.adapter_layout import adapter_group, adapter_layout
from twinstream.models.adapters.lora import ADAPTERS
from twinstream.models.layout import FlatLayout, group_layout, parameter_groups
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.errors import TwinstreamError


class NothingToTrainError(TwinstreamError):
    """A recipe freezes what the model does not have, or all that it has."""


def layer_of(group: str) -> int | None:
    """The layer whose parameters or adapters a group has; None of embedding and head.

    >>> layer_of("lora.3"), layer_of("3"), layer_of("head")
    (3, 3, None)
    """
    number = group.removeprefix(ADAPTERS)
    return int(number) if number.isdigit() else None


def all_groups(spec: ModelSpec, recipe: Recipe) -> tuple[str, ...]:
    """The base's groups in the order of the forward pass, then those of adapters."""
    adapters = range(spec.num_layers) if recipe.lora else ()
    return (*parameter_groups(spec), *map(adapter_group, adapters))


def trained_groups(spec: ModelSpec, recipe: Recipe) -> tuple[str, ...]:
    """Those that have a gradient, an optimizer state and an update; the rest is only read.

    Raises:
        NothingToTrainError: there are none, or what is frozen is no group of the model.
    """
    groups = all_groups(spec, recipe)
    if unknown := [group for group in recipe.frozen if group not in groups]:
        raise NothingToTrainError(
            f"'{spec.name}' has no group '{unknown[0]}' to freeze: there are embedding, the layers "
            f"0 to {spec.num_layers - 1}, and head"
        )
    trained = tuple(group for group in groups if not recipe.freezes(group))
    if not trained:
        raise NothingToTrainError(
            f"all of '{spec.name}' is frozen, and nothing is left to train; freeze less, or add "
            "adapters with --lora"
        )
    return trained


def layout_of(spec: ModelSpec, recipe: Recipe, group: str) -> FlatLayout:
    """How the flat parameters of a group lie."""
    if group.startswith(ADAPTERS):
        assert recipe.lora is not None, f"the recipe has no adapters, and so no group {group}"
        return adapter_layout(spec, recipe.lora)
    return group_layout(spec, group)


def first_backward_layer(spec: ModelSpec, recipe: Recipe) -> int:
    """The layer at which backward ends: nothing below it is trained; num_layers if no layer is.

    >>> from twinstream.models.presets import load_preset
    >>> first_backward_layer(load_preset("tiny"), Recipe(frozen=("embedding", "0")))
    1
    """
    trained = trained_groups(spec, recipe)
    if "embedding" in trained:
        return 0
    layers = [layer for group in trained if (layer := layer_of(group)) is not None]
    return min(layers, default=spec.num_layers)
