"""The rows of a sweep in a CSV file: appended whole, kept over a kill, never doubled."""

import csv
import io
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinstream.measures.uncertainty import Speed, Uncertainty, order_note
from twinstream.schedule.files import reason_of, write_text
from twinstream.study.answer import StudyError
from twinstream.study.sweep.cells import BUG, INFEASIBLE, MONEY, OK, OUTCOME, REFUSED, Row
from twinstream.study.values import COLUMNS, kind_of

Rows = Sequence[Mapping[str, str]]

FILE = "rows.csv"
SUPERSEDED = "superseded.csv"
_TRIED = "tried.csv"
_NUMBERS = ("model_tflop_per_s", "mfu", "hfu", "step_time_s", "step_s", "memory_bytes")


def columns_of(names: Sequence[str]) -> list[str]:
    """The key, what was asked for, the outcome, the figures."""
    return ["key", *names, *OUTCOME, *COLUMNS[kind_of(names)], *MONEY]


class RowFile:
    """An open CSV file of rows; every row is on the disk before `append` returns."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._columns = path, list(columns)
        self.rows = self._continued() if path.exists() else []
        self._tried_path = path.with_name(_TRIED)
        self.tried = self._read_tried()
        if not path.exists():
            _write_whole(path, self._columns, [])

    def append(self, row: Row) -> None:
        texts = self._texts(row)
        self._write(list(texts.values()))
        self.rows.append(texts)

    def replace(self, row: Row) -> None:
        """Put a row in the place of the one with its key; a kill leaves one of the two."""
        new = self._texts(row)
        self.rows = [new if old["key"] == new["key"] else old for old in self.rows]
        _write_whole(self._path, self._columns, self.rows)

    def note_tried(self, keys: tuple[str, ...]) -> None:
        """Keep that a cell was planned beside another: it is not done again.

        Args:
            keys: of both.
        """
        self.tried.add(keys)
        try:
            append_line(f"{','.join(keys)}\n".encode(), self._tried_path)
        except OSError as error:
            raise StudyError(f"cannot write {self._tried_path}: {reason_of(error)}") from None

    def _read_tried(self) -> set[tuple[str, ...]]:
        """A line that a kill cut off is of no pair, which is then tried again."""
        if not self._tried_path.exists():
            return set()
        lines = self._tried_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return {tuple(line.split(",")) for line in lines}

    def set_aside(self, keys: Collection[str]) -> int:
        """Move rows to `superseded.csv` beside the file; returns how many.

        A kill on the way may leave them in both files, from where they are moved again.
        """
        aside = [row for row in self.rows if row["key"] in keys]
        if not aside:
            return 0
        other = self._path.with_name(SUPERSEDED)
        _write_whole(other, self._columns, [*(read_rows(other) if other.exists() else []), *aside])
        self.rows = [row for row in self.rows if row["key"] not in keys]
        _write_whole(self._path, self._columns, self.rows)
        return len(aside)

    def _texts(self, row: Row) -> dict[str, str]:
        return {n: "" if row.get(n) is None else str(row[n]) for n in self._columns}

    def _write(self, values: Sequence[str]) -> None:
        """Append a line, whole or not at all; a kill leaves it whole or cut off at the end."""
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(values)
        try:
            append_line(line.getvalue().encode(), self._path)
        except OSError as error:
            raise StudyError(
                f"cannot write {self._path}: {reason_of(error)}; the rows before are kept: once "
                "there is room, the same command goes on"
            ) from None

    def _continued(self) -> list[dict[str, str]]:
        """The rows there are; a line that a kill cut off is removed."""
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with self._path.open("r+b") as file:
                file.truncate(len(whole))
        if not whole:
            _write_whole(self._path, self._columns, [])
            return []
        rows = read_rows(self._path)
        header = next(csv.reader(io.StringIO(whole.decode())))
        if header != self._columns:
            raise StudyError(
                f"{self._path} has rows of a sweep with other axes, or of another twinstream; name "
                "another folder with -o, or move that file away"
            )
        for number, row in enumerate(rows, start=2):
            if not _is_row(row):
                raise StudyError(
                    f"line {number} of {self._path} is damaged; remove it, and it is made again"
                )
        return rows


def _is_row(row: Mapping[str, Any]) -> bool:
    """Whether it has an outcome, and figures where it was planned."""
    if None in row or None in row.values():
        return False  # more or fewer values than columns
    if row["status"] != OK:
        return row["status"] in (INFEASIBLE, REFUSED, BUG)
    try:
        figures = [float(row[name]) for name in _NUMBERS if name in row]
        return float(row["tokens_per_s"]) > 0 and all(figure >= 0 for figure in figures)
    except (TypeError, ValueError):
        return False


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows of a file, as texts.

    Raises:
        StudyError: there is no such file.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StudyError(f"cannot read {path}: {error}") from None


def _write_whole(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
    """A whole file of rows; the same row is written once."""
    text = io.StringIO()
    lines = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    lines.writeheader()
    lines.writerows({row["key"]: row for row in rows}.values())
    write_text(text.getvalue(), path)


def append_line(line: bytes, path: Path) -> None:
    """Add a line to a file and sync it; on an error the file is as long as before.

    Raises:
        OSError: it cannot be written.
    """
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        before = os.fstat(handle).st_size
        try:
            while line:
                line = line[os.write(handle, line) :]
            os.fsync(handle)
        except BaseException:
            os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)


def errors_note(rows: Rows) -> str:
    """The expected error of each machine's predictions; empty where nothing is predicted."""
    found = {_place(row): error_text(row) for row in rows if is_certain(row)}
    provenances = set(found.values())
    if len(provenances) < 2:
        return f"Predicted, {provenances.pop()}." if provenances else ""
    return f"Predicted: {', '.join(f'{name} {short}' for name, short in found.items())}."


def error_text(row: Mapping[str, str]) -> str:
    """The expected error of a row that has a plan, for the side of its figures."""
    return _uncertainty(row).short


def ranking_note(rows: Rows) -> str:
    """What of the order of machines, by the fastest row of each, is not certain."""
    fastest: dict[str, Speed] = {}
    for row in rows:
        if not is_certain(row):
            continue
        speed = Speed(float(row["tokens_per_s"]), _uncertainty(row))
        known = fastest.get(_place(row))
        if known is None or speed.tokens_per_s > known.tokens_per_s:
            fastest[_place(row)] = speed
    return order_note(fastest) or ""


def is_certain(row: Mapping[str, str]) -> bool:
    """Whether it has figures and says how far they may be off."""
    return row["status"] == OK and bool(row.get("expected_error_kind"))


def _uncertainty(row: Mapping[str, str]) -> Uncertainty:
    mean = row["expected_error_mean"]
    return Uncertainty.model_validate(
        {
            "mean": float(mean) if mean else None, "worst": None,
            "kind": row["expected_error_kind"], "source": "",
        }
    )  # fmt: skip


def _place(row: Mapping[str, str]) -> str:
    """The machine, or the cluster."""
    return row["machine"] if "machine" in row else row["cluster"]
