"""From patterns of weights' names to the groups of parameters that they freeze."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from twinstream.models.adapters.lora import lora_of, module_lora_of
from twinstream.models.hf_weights import hf_weights_of
from twinstream.models.model import AnyModel
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.models.traced import TracedModel
from twinstream.models.trained import trained_groups
from twinstream.schedule.errors import TwinstreamError

_SHOWN = 3


class FreezeError(TwinstreamError):
    """Patterns that name no weights, or only a part of a group's."""


def frozen_groups(model: AnyModel, patterns: Sequence[str]) -> tuple[str, ...]:
    """The groups of parameters (`embedding`, a layer by its number, `head`) that are frozen.

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
            raise FreezeError(_partly(group, left))
        if not left:
            found.append(group)
    return tuple(sorted(found))


def _names(model: AnyModel, group: str) -> list[str]:
    if isinstance(model, ModelSpec):
        return [weight.name for weight in hf_weights_of(model, group)]
    return [tensor.name for tensor in model.group_layout(group).tensors]


def trained_of(model: AnyModel, lora: str | None, freeze: Sequence[str]) -> Recipe:
    """A recipe with the adapters of `lora` and the groups that patterns freeze; else the default.

    Raises:
        TwinstreamError: one cannot be read, they do not go together, or nothing is left to train.
    """
    if lora is not None and freeze:
        raise FreezeError("--lora freezes the whole model already: leave out --freeze")
    adapters = None
    if isinstance(model, TracedModel):
        if lora is not None and model.source.lora != module_lora_of(lora):
            raise FreezeError(
                f"'{model.name}' was traced with other adapters, or none: trace it again with "
                f"twinstream trace MODEL --lora {lora}"
            )
    elif lora is not None:
        adapters = lora_of(lora)
    recipe = Recipe(lora=adapters, frozen=frozen_groups(model, freeze))
    trained_groups(model, recipe)
    return recipe


def _partly(group: str, left: Sequence[str]) -> str:
    what = f"layer {group}" if group.isdigit() else f"the {group}"
    more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
    whole = {"embedding": "model.embed_tokens.*", "head": "lm_head.* and model.norm.*"}
    return (
        f"--freeze covers {what} only in part: it leaves out {', '.join(left[:_SHOWN])}{more}. "
        "Weights are frozen by whole groups: freeze all of it "
        f"({whole.get(group, f'model.layers.{group}.*')}), or none of it"
    )
