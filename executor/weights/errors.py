"""The errors of folders of weights, in the words of whoever has to mend them."""

from collections.abc import Sequence
from pathlib import Path

from twinstream.schedule.errors import TwinstreamError

_SHOWN = 3


class WeightsError(TwinstreamError):
    """Weights cannot be read or written; says the file, what is wrong, and what to do."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


def some_of(names: Sequence[str]) -> str:
    """The first few of many, and how many more there are.

    >>> some_of(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
