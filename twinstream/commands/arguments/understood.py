"""What all commands understand: numbers as people write them, and names that mean the same."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import wraps
from inspect import signature
from math import isfinite
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from twinstream.schedule.sizes import parse_number

_SAME = (
    ("--tokens", "--dataset-size"),
    ("--price-per-gpu-hour", "--price"),
    ("--batch-size", "--global-batch"),
)
_MODEL = "--model"
_NOT_FINITE = ("nan", "inf", "-inf")
_WRITE = "write it as 2048, 2k (2,048), 64,128, 1e12 or 15T"


def understood(command: Callable[..., None]) -> Callable[..., None]:
    """The command with options that read such numbers, and have the names of other commands."""
    hints = get_type_hints(command, include_extras=True)
    parameters = signature(command).parameters.values()
    taken = {
        flag for one in parameters if (info := _info(hints[one.name])) is not None
        for flag in _flags(one.name, info)
    }  # fmt: skip

    @wraps(command)
    def called(**given: Any) -> None:
        command(**given)

    shown = [one.replace(annotation=_hint(one.name, hints[one.name], taken)) for one in parameters]
    called.__signature__ = signature(command).replace(parameters=shown)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in shown}
    return called


def model_where_it_is_read(parameters: Sequence[Any], arguments: list[str]) -> list[str]:
    """A command line with the model where the command reads it: before its data, or as --model."""
    positional = [one for one in parameters if one.param_type_name == "argument"]
    has_option = any(_MODEL in one.opts for one in parameters)
    if has_option and not positional and arguments and not arguments[0].startswith("-"):
        return [_MODEL, *arguments]
    takes_it = positional and positional[0].name in ("model", "inputs")
    if has_option or not takes_it:
        return arguments
    for at, word in enumerate(arguments):
        name, is_given, value = word.partition("=")
        if name != _MODEL:
            continue
        rest = arguments[at + 1 :]
        if is_given:
            return [value, *arguments[:at], *rest]
        return [*rest[:1], *arguments[:at], *rest[1:]]
    return arguments


def _hint(name: str, hint: Any, taken: set[str]) -> Any:
    info = _info(hint)
    if info is None:
        return hint
    kind, found = get_args(hint)[0], copy(info)
    flags = _flags(name, info)
    found.default, *others = [*flags, *_also(flags, taken)]  # where Typer keeps the first name
    found.param_decls = tuple(others)
    number = _number_kind(kind)
    if number is not None and info.parser is None and not info.count:
        found.parser = _reader(number, info.min, info.max, is_length=name == "seq_len")
        found.min = found.max = None
        found.metavar = info.metavar or "N"
    return Annotated[kind, found]


def _also(flags: Sequence[str], taken: set[str]) -> list[str]:
    """Names of other commands for what these flags say."""
    return [
        other
        for pair in _SAME
        for flag, other in (pair, pair[::-1])
        if flag in flags and other not in taken
    ]


def _reader(
    kind: type, least: float | None, most: float | None, *, is_length: bool
) -> Callable[[Any], Any]:
    def read(given: Any) -> Any:
        if not isinstance(given, str):
            return given
        if is_length and "," in given:
            raise typer.BadParameter(f"{given!r:.60} are several lengths, and one is asked for")
        number = parse_number(given)
        if number is None and kind is float and given.lower() in _NOT_FINITE:
            return float(given)  # which an option may have, or refuses by its name
        if number is None or not isfinite(number):
            raise typer.BadParameter(f"{given!r:.60} is no number: {_WRITE}")
        if kind is int and not isinstance(number, int):
            raise typer.BadParameter(f"{given!r:.60} is no whole number")
        if (least is not None and number < least) or (most is not None and number > most):
            sides = [
                f"{word} {bound:,.15g}"
                for word, bound in (("at least", least), ("at most", most))
                if bound is not None
            ]
            raise typer.BadParameter(f"{given!r:.60} is not {' and '.join(sides)}")
        return kind(number)

    return read


def _info(hint: Any) -> OptionInfo | None:
    if get_origin(hint) is not Annotated:
        return None
    return next((one for one in hint.__metadata__ if isinstance(one, OptionInfo)), None)


def _number_kind(kind: Any) -> type | None:
    """int or float where an option is such a number, or none."""
    inside = [one for one in get_args(kind) or (kind,) if one is not NoneType]
    return inside[0] if len(inside) == 1 and inside[0] in (int, float) else None


def _flags(name: str, info: OptionInfo) -> list[str]:
    """The names of an option; of Typer's the first is where a default would be."""
    first = [info.default] if isinstance(info.default, str) else []
    return [*first, *(info.param_decls or ())] or [f"--{name.replace('_', '-')}"]
