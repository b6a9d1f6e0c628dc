"""The lines of a CSV table with their columns' names, and typed access to them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from twinstream.hardware_profiles.csv_table import csv_lines, table_text
from twinstream.schedule.errors import TwinstreamError

_Value = TypeVar("_Value")


class ClusterTableError(TwinstreamError):
    """A file is no table of measured steps; says which columns are missing, or what is wrong."""


@dataclass(frozen=True)
class Cells:
    """One line of a table: its number and the text under each column."""

    path: Path
    line: int
    columns: Mapping[str, str]

    def text(self, column: str) -> str:
        """Return the text of a column; empty where nothing is stated."""
        return self.columns.get(column, "").strip()

    def count(self, column: str, unstated: int | None = None) -> int:
        """Return a whole number above zero; `unstated` where the cell is empty."""
        return self._parsed(column, _count, "a whole number above zero", unstated)

    def number(self, column: str, unstated: float | None = None) -> float:
        """Return a number above zero; `unstated` where the cell is empty."""
        return self._parsed(column, _positive, "a number above zero", unstated)

    def flag(self, column: str, *, unstated: bool = False) -> bool:
        """Return whether a column says true, yes or 1; `unstated` where the cell is empty."""
        text = self.text(column).lower()
        return text in ("true", "yes", "1") if text else unstated

    def _parsed(
        self, column: str, parse: Callable[[str], _Value], what: str, unstated: _Value | None
    ) -> _Value:
        text = self.text(column)
        if not text and unstated is not None:
            return unstated
        try:
            return parse(text)
        except (ValueError, OverflowError):
            raise ClusterTableError(
                f"{self.path}, line {self.line}: {column} is {text!r}, and needs {what}"
            ) from None


def read_lines(path: Path) -> tuple[tuple[str, ...], tuple[Cells, ...]]:
    """Read the columns' names and the lines under them.

    Raises:
        ClusterTableError: it cannot be read, or a line has more or fewer values than columns.
    """
    lines = iter(csv_lines(table_text(path, ClusterTableError), str(path), ClusterTableError))
    header = next(lines, (0, ()))[1]
    names = tuple(name.strip() for name in header)
    return names, tuple(_cells(path, number, names, values) for number, values in lines)


def _cells(path: Path, number: int, names: Sequence[str], values: Sequence[str]) -> Cells:
    if len(values) != len(names):
        raise ClusterTableError(
            f"{path}, line {number} has {len(values)} values for {len(names)} columns"
        )
    return Cells(path, number, dict(zip(names, values, strict=True)))


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = _positive(text)
    if value % 1 or value > 2**53:
        raise ValueError(text)
    return int(value)
