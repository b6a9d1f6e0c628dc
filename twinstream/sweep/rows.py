"""The rows of a sweep in a CSV file: appended whole, kept over a kill, never doubled."""

import csv
import fcntl
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from twinstream.sweep.cell import FIGURES, OUTCOME, Row
from twinstream.sweep.config import SweepError

FILE = "rows.csv"
_LOCK = ".lock"


def columns_of(names: Sequence[str]) -> list[str]:
    """The key, what was asked for, the outcome, the figures."""
    return ["key", *names, *OUTCOME, *FIGURES]


class RowFile:
    """An open CSV file of rows; every row is on the disk before `append` returns."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._columns = path, list(columns)
        self.rows = self._continued() if path.exists() else []
        if not path.exists():
            self._write(self._columns)

    def append(self, row: Row) -> None:
        texts = ["" if row.get(name) is None else str(row[name]) for name in self._columns]
        self._write(texts)
        self.rows.append(dict(zip(self._columns, texts, strict=True)))

    def _write(self, values: Sequence[str]) -> None:
        """One write of a whole line, so that a kill leaves it whole or cut off at the end."""
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(values)
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.getvalue().encode())
            os.fsync(handle)
        finally:
            os.close(handle)

    def _continued(self) -> list[dict[str, str]]:
        """The rows there are; a line that a kill cut off is removed."""
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with self._path.open("r+b") as file:
                file.truncate(len(whole))
        if not whole:
            self._write(self._columns)
            return []
        rows = read_rows(self._path)
        header = next(csv.reader(io.StringIO(whole.decode())))
        if header != self._columns:
            raise SweepError(
                f"{self._path} has rows of a sweep with other axes; name another folder with -o, "
                "or move that file away"
            )
        return rows


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows of a file, as texts.

    Raises:
        SweepError: there is no such file.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SweepError(f"cannot read {path}: {error}") from None


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Holds the folder against a second sweep; the lock goes with the process.

    Raises:
        SweepError: another sweep is writing there, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK).open("w")
    except OSError as error:
        raise SweepError(f"cannot write into {folder}: {error.strerror or error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SweepError(f"another sweep is writing into {folder}; wait for it") from None
        yield
