"""The calls of a kernel on its operands, whose arguments are made once for all passes."""

from collections.abc import Callable
from functools import partial
from typing import Any


class Calls:
    """Functions of the device's work with all their arguments, in order.

    Views, constants and the places of temporaries follow from the operands and the attributes, so
    they are the same in every pass. Nothing is computed before the calls are carried out.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def add(self, function: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Have this called next. It allocates nothing that outlives it, and keeps no state."""
        self._calls.append(partial(function, *arguments, **options))

    def __call__(self) -> None:
        for call in self._calls:
            call()
