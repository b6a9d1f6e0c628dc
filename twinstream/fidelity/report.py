"""Validations as they are told: tables for people, JSON, a CSV of the rows."""

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic

from rich import box
from rich.console import Group

from twinstream.fidelity.scoring import R, ScoredRow
from twinstream.screens.fitted_table import FittedTable


class Report(ABC, Generic[R]):
    """A validation of one kind of rows, as it is told."""

    rows: Sequence[ScoredRow[R]]

    @abstractmethod
    def screen(self) -> Group:
        """Return tables and sentences for people."""

    @abstractmethod
    def json(self) -> dict[str, object]:
        """Return the figures as a JSON document."""

    @abstractmethod
    def told(self, each: ScoredRow[R]) -> dict[str, object]:
        """Return the values of a row's line, by column."""

    def csv(self) -> str:
        """Return one line a row, in the tables' order."""
        text = io.StringIO()
        lines = list(map(self.told, self.rows))
        writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        for told in lines:
            writer.writerow({key: "" if value is None else value for key, value in told.items()})
        return text.getvalue()


def table_of(
    words: Sequence[str], numbers: Sequence[str], lines: Iterable[Sequence[str]] = ()
) -> FittedTable:
    """Make a table of columns of words, then of numbers."""
    table = FittedTable(box=box.SIMPLE_HEAD)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table
