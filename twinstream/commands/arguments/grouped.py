"""Groups of options, which commands take as one parameter: a dataclass of annotated fields.

A group may also be a `Node`: its fields with descriptions (the help) are the options; their
validation aliases are the names, their titles the units; their extra says the panel, else the
node's title.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from twinstream.options.option_group import OptionGroup
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
                inside = {
                    key: value for key, value in inside.items() if value not in (options[key], [])
                }
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


def let_typer_see(
    command: Command, own: Mapping[str, tuple[Any, Any]], options: Iterable[tuple[str, Any, Any]]
) -> None:
    """Say what a command takes by keywords alone.

    Args:
        own: its own parameters: annotation and default by name.
        options: names, defaults and annotations, as `options_of` gives them.
    """
    pairs = [(name, default, hint) for name, (hint, default) in own.items()]
    shown = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        for name, default, hint in (*pairs, *options)
    ]
    command.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in shown}


def _is_group(hint: Any) -> bool:
    return is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, Node))


def _options(group: Any, required: tuple[str, ...]) -> Iterable[Parameter]:
    if is_dataclass(group):
        hints = get_type_hints(group, include_extras=True)
        found = [(field.name, field.default, hints[field.name]) for field in fields(group)]
    else:
        found = options_of(group)
    for name, usual, hint in found:
        default = Parameter.empty if name in required else usual
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def options_of(node: type[Node]) -> list[tuple[str, Any, Any]]:
    """Names, defaults and annotations of a node's fields that have a help.

    What is not given is None; the help says what the node then has.
    """
    found = []
    for name, field in node.model_fields.items():
        if field.description is None:
            continue
        extra: Any = field.json_schema_extra or {}
        kind, required = _flag_type(field.annotation), field.is_required()
        shown = field.default
        is_told = not required and not isinstance(shown, bool) and shown not in (None, ())
        option = typer.Option(
            *_flags(node, name, kind is bool),
            metavar=None if kind is bool else field.title or "N",
            help=field.description + (f" Default: {shown}." if is_told else ""),
            rich_help_panel=extra.get("panel", node.model_config.get("title")),
            show_default=False,
            hidden=extra.get("rare", False),
        )
        found.append(
            (name, Parameter.empty, Annotated[kind, option])
            if required
            else (name, None, Annotated[kind | None, option])
        )
    return found


def _flags(node: type[Node], name: str, is_switch: bool) -> list[str]:
    """A switch has a flag for on and one for off; one that is on by default the latter alone."""
    flags = flags_of(node, name)
    if not is_switch:
        return flags
    if node.model_fields[name].default is True:
        return [f" /{flag}" for flag in flags]
    return [f"{flag}/--no-{flag[2:]}" for flag in flags] if issubclass(node, OptionGroup) else flags


def _flag_type(annotation: Any) -> Any:
    """What Typer reads: whole numbers, numbers, truth values, texts and lists of them."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType] or [annotation]
    if annotation == tuple[str, ...]:
        return list[str]
    if len(kinds) == 1 and kinds[0] in (bool, int, float):
        return kinds[0]
    literals = [kind for kind in (annotation, *kinds) if get_origin(kind) is Literal]
    values = [value for kind in literals for value in get_args(kind)]
    return int if values and all(isinstance(value, int) for value in values) else str
