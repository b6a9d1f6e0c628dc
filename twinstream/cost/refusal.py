"""Refusals of runs that cannot be, each one sentence with its numbers."""

from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node

_Any = TypeVar("_Any", bound=Node)


class CostError(TwinstreamError):
    """A run, a split or a price that cannot be."""


def made(kind: type[_Any], given: Mapping[str, object], called: Mapping[str, str]) -> _Any:
    """A node of these fields.

    Args:
        called: how users know a field, where its option is not called like it.

    Raises:
        CostError: says which field is wrong, and what it needs.
    """
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        option = called.get(field, f"--{field.replace('_', '-')}")
        reason = first["msg"].replace("Input should be", "needs to be")
        raise CostError(f"{option} {reason}, got {first['input']!r:.60}") from None


def parts_of(whole: int, parts: int, *, what: str, by: str) -> int:
    """The size of one part.

    Raises:
        CostError: the whole does not come apart evenly.

    >>> parts_of(96, 8, what="layers", by="--p-pipe")
    12
    """
    if whole % parts:
        raise CostError(
            f"{whole:,} {what} do not come apart in {parts:,} equal parts: {by} needs to be a "
            f"divisor of {whole:,}"
        )
    return whole // parts
