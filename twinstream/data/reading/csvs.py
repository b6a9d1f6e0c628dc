"""Tables of text, with commas between columns and their names in the first line."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from twinstream.data.data_error import DataError, unreadable
from twinstream.schedule.files import open_file

_MOST_CHARS = 1 << 28  # of a cell; Python's own limit is below what documents have
_MARK = b"\xef\xbb\xbf"  # which some programs put before UTF-8 text


def csv_rows_within(path: Path, first: int, end: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows that begin at bytes [first, end), each with that byte.

    `first` is 0 or where a row begins. A cell is text; lines with nothing in them are no rows.

    Raises:
        DataError: the file cannot be read, is no UTF-8 or no CSV, or a row has more or fewer cells
            than the first line.
    """
    try:
        with open_file(path) as file:
            lines = _Lines(file, path)
            names = next(_rows(lines, path), [])
            _require_names(names, path)
            lines.seek(max(first, lines.byte))
            for cells in _rows(lines, path):
                if lines.row_byte >= end:
                    return
                if len(cells) != len(names):
                    raise DataError(
                        f"{path}, byte {lines.row_byte}: a row of {len(cells)} cells, and the "
                        f"first line names {len(names)}; a cell with commas, quotes or line ends "
                        "needs to stand in quotes"
                    )
                yield lines.row_byte, dict(zip(names, cells, strict=True))
    except OSError as error:
        raise unreadable(path, error) from None


class _Lines:
    """Lines of a file as text; `row_byte` is where a row began whose lines were taken."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.byte = self.row_byte = 0
        self._file, self._path = file, path

    def seek(self, byte: int) -> None:
        self._file.seek(byte)
        self.byte = byte

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline():
            start, self.byte = self.byte, self.byte + len(line)
            try:
                yield (line.removeprefix(_MARK) if start == 0 else line).decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{self._path} is not UTF-8 text (behind byte {start}: {error.reason}); "
                    "convert it: iconv -f ENCODING -t UTF-8"
                ) from None


def _rows(lines: _Lines, path: Path) -> Iterator[list[str]]:
    """Cells of each row that has any."""
    reader = csv.reader(lines, strict=True)
    while True:
        lines.row_byte = lines.byte
        limit = csv.field_size_limit(_MOST_CHARS)  # of the whole process, so it is put back
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"{path}, byte {lines.row_byte}: no CSV from here on: {error}"
            ) from None
        finally:
            csv.field_size_limit(limit)
        if cells:
            yield cells


def _require_names(names: list[str], path: Path) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if not names or twice is not None:
        problem = "has no first line" if twice is None else f"names a column '{twice}' twice"
        raise DataError(f"{path} {problem}: the first line needs to name its columns")
    if len(names) == 1 and any(sign in names[0] for sign in ";\t"):
        raise DataError(f"{path} has no commas between its columns ({names[0]!r:.60}): convert it")
