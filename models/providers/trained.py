"""Which groups of parameters a recipe has, how they lie, and which of them it trains.

The base's groups are those of the model; the adapters of a layer are the group `lora.LAYER`, which
a traced module has among its own. What is frozen is said by patterns of weights' names.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from os.path import commonpath

from twinstream.models.decoders.hf_weights import hf_weights_of
from twinstream.models.layout import ADAPTERS, EXPERTS, HEAD, FlatLayout, layer_of, whole_group
from twinstream.models.providers.model import AnyModel, Model
from twinstream.models.recipes.adapter_layout import (
    adapter_group,
    adapter_layout_of,
    lora_of_layer,
)
from twinstream.models.recipes.lora import Lora, ModuleLora, lora_of, module_lora_of
from twinstream.models.recipes.quantized_base import (
    QuantizedBaseError,
    quantized_layout,
    require_whole_blocks,
)
from twinstream.models.recipes.recipe import Recipe, recipe_of_fields
from twinstream.schedule.errors import TwinstreamError

_SHOWN = 3


class NothingToTrainError(TwinstreamError):
    """A recipe freezes what the model does not have, or all that it has."""


def all_groups(model: Model, recipe: Recipe) -> tuple[str, ...]:
    """The base's groups in the order of the forward pass, then those of adapters."""
    adapters: list[str] = []
    if recipe.lora is not None and (decoder := model.decoder) is not None:
        for layer in range(model.num_layers):
            if lora_of_layer(decoder, recipe.lora, layer) is not None:
                parts = decoder.adapter_parts(adapter_group(layer))
                adapters += [one for one in parts if layout_of(model, recipe, one).tensors]
    return (*model.parameter_groups, *adapters)


def adapter_groups(model: Model, recipe: Recipe) -> tuple[str, ...]:
    """Those of adapters: of a recipe, or that a traced module has."""
    return tuple(group for group in all_groups(model, recipe) if group.startswith(ADAPTERS))


def trained_groups(model: Model, recipe: Recipe) -> tuple[str, ...]:
    """Those that have a gradient, an optimizer state and an update; the rest is only read.

    Raises:
        NothingToTrainError: what is frozen is no group of the model.
        QuantizedBaseError: the base is to be in few bits, and the model cannot have one.
    """
    require_few_bits(model, recipe.base)
    groups = all_groups(model, recipe)
    known = {*groups, *map(whole_group, groups)}  # a rank may have groups in parts alone
    if unknown := [group for group in recipe.frozen if group not in known]:
        raise NothingToTrainError(
            f"'{model.name}' has no group '{unknown[0]}' to freeze: there are embedding, the "
            f"layers 0 to {model.num_layers - 1}{_experts_of(model)}, and head"
        )
    never = model.untrained_groups
    trained = tuple(g for g in groups if not recipe.freezes(g) and g not in never)
    if recipe.lora is not None and HEAD in trained:  # whose gradients come first, as ever
        trained = (*(group for group in trained if group != HEAD), HEAD)
    return trained


def require_trained(model: Model, recipe: Recipe) -> None:
    """
    Raises:
        NothingToTrainError: all is frozen.
    """
    if not trained_groups(model, recipe):
        raise NothingToTrainError(
            f"all of '{model.name}' is frozen, and nothing is left to train; freeze less, or add "
            "adapters with --lora"
        )


def _experts_of(model: Model) -> str:
    """How the groups of experts are called, where there are some."""
    groups = [group for group in model.parameter_groups if group.endswith(EXPERTS)]
    return f", their experts ({groups[0]} ...)" if groups else ""


def layout_of(model: Model, recipe: Recipe, group: str) -> FlatLayout:
    """How the flat parameters of a group lie."""
    if group.startswith(ADAPTERS) and (decoder := model.decoder) is not None:
        assert recipe.lora is not None, f"the recipe has no adapters, and so no group {group}"
        layer = model.layer_of(group)
        assert layer is not None
        return adapter_layout_of(decoder, recipe.lora, group, layer)
    return quantized_layout(model.group_layout(group), recipe.base_of(group))


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


class FreezeError(TwinstreamError):
    """Patterns that name no weights, or only a part of a group's."""


def frozen_groups(model: AnyModel, patterns: Sequence[str]) -> tuple[str, ...]:
    """The groups of parameters (`embedding`, a layer by its number, `3.experts`, `head`) that are
    frozen.

    Patterns are of the shell (`*`, `?`, `[0-9]`) and match the names that Hugging Face gives a
    model's weights, or a traced module its parameters. A group is frozen whole or not at all, by
    one pattern or by several.

    Raises:
        FreezeError: a pattern matches nothing, or some weights of a group are left out.

    >>> from twinstream.models.presets import load_preset
    >>> frozen_groups(load_preset("tiny"), ["model.embed_tokens.*", "model.layers.[01].*"])
    ('0', '1', 'embedding')
    """
    names = [name for group in model.parameter_groups for name in _names(model, group)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise FreezeError(
                f"--freeze '{pattern}' matches no weight of '{model.name}'; its weights are named "
                f"as {names[0]} and {names[1]}"
            )
    found = []
    for group in model.parameter_groups:
        inside = _names(model, group)
        left = [name for name in inside if not any(fnmatchcase(name, p) for p in patterns)]
        if left and len(left) < len(inside):
            raise FreezeError(_partly(group, left, inside))
        if not left:
            found.append(group)
    return tuple(sorted(found))


def _names(model: AnyModel, group: str) -> list[str]:
    if (decoder := model.decoder) is not None:
        return [weight.name for weight in hf_weights_of(decoder, group)]
    return [tensor.name for tensor in model.group_layout(group).tensors]


def trained_of(
    model: AnyModel, lora: str | None, freeze: Sequence[str], base: str | None = None,
    adapters: Lora | None = None,
) -> Recipe:  # fmt: skip
    """A recipe with the adapters of `lora`, the groups that patterns freeze, and how a frozen base
    is kept; else the default.

    Args:
        adapters: those that are there already, which `lora` says as well if it is given.

    Raises:
        TwinstreamError: one cannot be read, they do not go together, or nothing is left to train.
    """
    has_adapters = lora is not None or adapters is not None
    if has_adapters and freeze:
        raise FreezeError("adapters freeze the whole model already: leave out --freeze")
    if lora is not None:
        asked = read_lora(model, lora)
        if isinstance(asked, Lora):
            adapters = adapters or asked
        elif asked != model.own_lora:
            raise FreezeError(
                f"'{model.name}' was traced with other adapters, or none: trace it again with "
                f"twinstream trace MODEL --lora {lora}"
            )
    require_few_bits(model, base or "model")
    is_tied = model.decoder is not None and model.decoder.tied_embeddings
    if adapters is not None and adapters.saved and is_tied:
        raise FreezeError(
            f"'{model.name}' has one matrix for embed_tokens and lm_head, of which PEFT saves a "
            "copy: train adapters alone (leave out save=), or all weights (leave out --lora)"
        )
    fields = {"lora": adapters, "frozen": frozen_groups(model, freeze), "base": base or "model"}
    recipe = recipe_of_fields(fields)
    require_trained(model, recipe)
    return recipe


def read_lora(model: Model, text: str) -> Lora | ModuleLora:
    """Return the adapters that `--lora` asks for: of a recipe, or of a module's own layers.

    Raises:
        LoraError: the text cannot be read.
    """
    return module_lora_of(text) if model.decoder is None else lora_of(text)


def require_few_bits(model: Model, base: str) -> None:
    """
    Raises:
        QuantizedBaseError: the model cannot have a base in such a format.
    """
    if base == "model":
        return
    if model.decoder is None:
        raise QuantizedBaseError(
            f"'{model.name}' runs by its own code, which takes its weights as they are: a base in "
            f"{base} is of models with kernels of ours; use --base model. A plan with that says "
            "why it has none"
        )
    require_whole_blocks(model.decoder, base)


def _partly(group: str, left: Sequence[str], names: Sequence[str]) -> str:
    number = layer_of(group)
    what = f"the {group}" if number is None else f"layer {number}"
    what = f"the experts of {what}" if group.endswith(EXPERTS) else what
    more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
    within = commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
    whole = {"embedding": "model.embed_tokens.*", "head": "lm_head.* and model.norm.*"}
    return (
        f"--freeze covers {what} only in part: it leaves out {', '.join(left[:_SHOWN])}{more}. "
        "Weights are frozen by whole groups: freeze all of it "
        f"({whole.get(group, f'{within}.*')}), or none of it"
    )
