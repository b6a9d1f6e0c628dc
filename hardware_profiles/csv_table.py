"""CSV tables of measurements: numbered lines under a header, and typed access to their cells."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import read_text


def table_text(path: Path, error: type[TwinstreamError]) -> str:
    """Return the text of a table; an `error` says why it cannot be read."""
    try:
        return read_text(path, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        why = fault.strerror if isinstance(fault, OSError) else "it is not text in UTF-8"
        raise error(f"cannot read {path}: {why or fault}") from None


def csv_lines(text: str, name: str, error: type[TwinstreamError]) -> list[tuple[int, list[str]]]:
    """Return the values of each line with its number; lines without any, and comments, are none.

    An `error` says with `name` which line is no CSV.
    """
    reader = csv.reader(text.splitlines(keepends=True))
    lines = []
    try:
        for values in reader:
            if any(value.strip() for value in values) and not values[0].startswith("#"):
                lines.append((reader.line_num, values))
    except csv.Error as fault:
        raise error(f"{name}, line {reader.line_num}: {fault}") from None
    return lines


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

    def valid(self, read: Callable[["Cells"], _Value]) -> _Value:
        """Return what a reader makes of this line; where it is not valid, say where it stands.

        Raises:
            ClusterTableError: pydantic refuses a value, or a cell is wrong.
        """
        try:
            return read(self)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(place) for place in first["loc"])
            raise ClusterTableError(
                f"{self.path}, line {self.line}: {where or 'the row'}: {first['msg']}"
            ) from None

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
