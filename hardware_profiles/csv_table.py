"""CSV tables of measurements: numbered lines, the header first."""

import csv
from pathlib import Path

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
