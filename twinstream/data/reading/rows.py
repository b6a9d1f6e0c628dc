"""Read the rows in a range of a file of rows."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from twinstream.data.data_error import DataError
from twinstream.data.reading.arrays import rows_within
from twinstream.data.reading.blocks import FileRange
from twinstream.data.reading.csvs import csv_rows_within
from twinstream.data.reading.parquet import read_rows
from twinstream.data.reading.ranges import decoded, line_number, lines_in


@dataclass(frozen=True)
class DataRow:
    """One row; `index` is the number of its line or row, from the range's first one.

    `found` is the line as it stands in the file, from byte `start`, or the fields of a table's row.
    """

    found: bytes | dict[str, Any]
    part: FileRange
    index: int
    start: int = 0

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The row's fields; raises DataError where the line is no JSON object."""
        if isinstance(self.found, dict):
            return self.found
        return _object(self.found, self.start, self.part, self.index)

    def where(self) -> str:
        """Return the file and the line or row, counted from 1."""
        return place(self.part, self.index)


def rows_of(part: FileRange, columns: Sequence[str] = ()) -> Iterator[DataRow]:
    """Yield the rows in order, not parsed yet.

    Args:
        columns: of a table that are read beside those of known names.

    Raises:
        DataError: the file cannot be read.
    """
    if part.kind == "parquet":
        rows = read_rows(part.path, part.row_group, part.first, part.end, columns)
        yield from (DataRow(fields, part, index) for index, fields in enumerate(rows))
        return
    if part.kind in ("array", "csv"):
        within = rows_within if part.kind == "array" else csv_rows_within
        found = within(part.path, part.first, part.end)
        yield from (DataRow(fields, part, index) for index, (_, fields) in enumerate(found))
        return
    content, start = lines_in(part.path, part.first, part.end)
    for index, line in enumerate(content.split(b"\n")):
        if line.strip():
            yield DataRow(line, part, index, start)
        start += len(line) + 1


def place(part: FileRange, index: int) -> str:
    between = ":" if part.kind == "lines" else ", row "
    return f"{part.path}{between}{first_number(part) + index}"


def first_number(part: FileRange) -> int:
    """Return the number, from 1, of the first line or row of a range in its file."""
    if part.kind != "lines":
        return part.rows_before + 1
    _, start = lines_in(part.path, part.first, part.end)
    return line_number(part.path, start)


def _object(line: bytes, start: int, part: FileRange, index: int) -> dict[str, Any]:
    lead = len(line) - len(line.lstrip())
    text = decoded(line.strip(), part.path, start + lead)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(_not_json(text, str(error), part, index)) from None
    if not isinstance(found, dict):
        hint = _not_json(text, f"it is a {type(found).__name__}", part, index)
        raise DataError(hint)
    return found


def _not_json(text: str, problem: str, part: FileRange, index: int) -> str:
    if text.startswith("["):
        remedy = "if the file is one array, give it the ending .json"
    else:
        remedy = 'each line needs to be one object, as {"text": "..."}'
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    return f"{place(part, index)} is no JSON object ({problem}): {shown!r}; {remedy}"
