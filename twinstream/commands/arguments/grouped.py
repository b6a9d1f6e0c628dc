"""Groups of options, which commands take as one parameter: a dataclass of annotated fields."""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

Command = Callable[..., None]


def grouped(*required: str) -> Callable[[Command], Command]:
    """Let Typer see the options of a command's groups instead of the groups.

    Args:
        required: names of a group's options that this command cannot do without.
    """

    def with_groups(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

        @wraps(command)
        def spread(**given: Any) -> None:
            for name, group in groups.items():
                inside = {field.name: given.pop(field.name) for field in fields(group)}
                given[name] = group(**inside)
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


def _options(group: Any, required: tuple[str, ...]) -> Iterable[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = Parameter.empty if field.name in required else field.default
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )
