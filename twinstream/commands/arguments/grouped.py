"""Groups of options, which commands take as one parameter: a dataclass of annotated fields.

A group may also be a `Node`: its fields with descriptions (the help) are the options; their
validation aliases are the names, their titles the units, the node's title the panel.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from twinstream.schedule.node import Node, flags_of, from_options

Command = Callable[..., None]


def grouped(*required: str) -> Callable[[Command], Command]:
    """Let Typer see the options of a command's groups instead of the groups.

    Args:
        required: names of a group's options that this command cannot do without.
    """

    def with_groups(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, Any] = {name: hint for name, hint in hints.items() if _is_group(hint)}

        @wraps(command)
        def spread(**given: Any) -> None:
            for name, group in groups.items():
                options = {one.name: one.default for one in _options(group, ())}
                inside = {option: given.pop(option) for option in options}
                inside = {key: value for key, value in inside.items() if value != options[key]}
                is_node = issubclass(group, Node)
                given[name] = from_options(group, inside) if is_node else group(**inside)
            command(**given)

        shown: list[Parameter] = []
        for one in signature(command).parameters.values():
            if one.name in groups:
                shown += _options(groups[one.name], required)
            else:
                hint = hints[one.name]
                shown.append(one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint))
        spread.__signature__ = Signature(shown)  # type: ignore[attr-defined]
        spread.__annotations__ = {one.name: one.annotation for one in shown}
        return spread

    return with_groups


def _is_group(hint: Any) -> bool:
    return is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, Node))


def _options(group: Any, required: tuple[str, ...]) -> Iterable[Parameter]:
    if is_dataclass(group):
        hints = get_type_hints(group, include_extras=True)
        found = [(field.name, field.default, hints[field.name]) for field in fields(group)]
    else:
        found = _of_node(group)
    for name, usual, hint in found:
        default = Parameter.empty if name in required else usual
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _of_node(node: type[Node]) -> list[tuple[str, Any, Any]]:
    """Names, defaults and annotations of a node's fields; a switch that is on has an option off."""
    found, hints = [], get_type_hints(node)
    for name, field in node.model_fields.items():
        if field.description is None:
            continue
        flags = flags_of(node, name)
        default = Parameter.empty if field.is_required() else field.default
        option = typer.Option(
            *([f" /{flag}" for flag in flags] if default is True else flags),
            metavar=None if hints[name] is bool else field.title or "N",
            help=field.description,
            rich_help_panel=node.model_config.get("title"),
            show_default=bool(default) and default is not True,
        )
        is_text = any(get_origin(one) is dict for one in get_args(hints[name]))
        hint = str | None if is_text else hints[name]  # the field reads it
        found.append((name, default, Annotated[hint, option]))
    return found
