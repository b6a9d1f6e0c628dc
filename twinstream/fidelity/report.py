"""Validations as they are told: tables for people, JSON, a CSV of the rows, a page."""

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic

from rich import box
from rich.console import Group, RenderableType

from twinstream.fidelity.measured import Predicted
from twinstream.fidelity.scoring import Errors, R, ScoredRow, errors_of, grouped
from twinstream.fidelity.table_rows import TableRow
from twinstream.fidelity.validation import STALLED, ScoredLine, TableValidation
from twinstream.screens.fitted_table import FittedTable

_CONFIGURATION = (
    *("machine", "model", "seq_len", "host_mem_gib", "dev_mem_gib"),
    *("status", "status_detail", "rounds_per_step"),
)
_STATISTICS: Mapping[str, Callable[[Errors], float | None]] = {
    "schedules": lambda errors: errors.count,
    "mean_error": lambda errors: errors.mean_error,
    "median_error": lambda errors: errors.median_error,
    "p90_error": lambda errors: errors.p90_error,
    "max_error": lambda errors: errors.max_error,
}  # fmt: skip


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


class TableReport(Report[TableRow]):
    """Errors overall, on stalled schedules, by model and by length; what was left out."""

    def __init__(self, validation: TableValidation) -> None:
        self.rows, self.validation = validation.rows, validation
        self.cells = len(validation.compared)
        self.overall = errors_of(validation.compared)
        self.stalled = errors_of(validation.stalled)
        self.by_model = self._by(lambda row: f"{row.line.machine} {row.line.planned_model}")
        self.by_seq_len = self._by(lambda row: str(row.line.seq_len))
        self._numbers: dict[Hashable, int] = {}
        for each in validation.compared:
            self._numbers.setdefault(each.schedule, len(self._numbers))

    def told(self, each: ScoredLine) -> dict[str, object]:
        """Return measured and predicted speed; the prediction of what did not run is of no use."""
        line, error, found = each.row.line, each.error, each.predicted
        if error is None:
            found = Predicted(refused=found.refused)
        return {
            **{name: getattr(line, name) for name in _CONFIGURATION},
            "tokens_per_s": line.tokens_per_s,
            "predicted_tokens_per_s": found.tokens_per_s,
            "error": error,
            "predicted_step_s": found.step_s,
            "stall": found.stall,
            "schedule": None if error is None else self._numbers[each.schedule],
            "refused": found.refused or None,
            "policy": line.policy,
        }

    def _by(self, name_of: Callable[[TableRow], str]) -> dict[str, Errors]:
        def place(each: ScoredLine) -> Any:
            return each.row.line.machine, each.row.line.model, each.row.line.seq_len

        groups = grouped(sorted(self.validation.compared, key=place), name_of)
        return {name: errors_of(group) for name, group in groups.items()}

    def screen(self) -> Group:
        """Return a table of errors each, then notes."""
        head = (
            f"{self.cells} measured cells, {self.overall.count} distinct schedules: "
            "absolute error of tokens/s"
        )
        lengths = sorted(self.by_seq_len.items(), key=lambda item: int(item[0]))
        return Group(
            head,
            _error_table("", {"all": self.overall, f"stalled over {STALLED:.0%}": self.stalled}),
            _error_table("model", self.by_model),
            _error_table("tokens of a sequence", {f"{int(name):,}": e for name, e in lengths}),
            *self._notes(),
        )

    def _notes(self) -> list[RenderableType]:
        found, notes = self.validation, []
        if found.failed:
            notes.append(
                f"{found.refused_alike} of {len(found.failed)} failed cells are refused for "
                "the recorded reason."
            )
        if found.refused:
            lines = ", ".join(str(each.row.line.line) for each in found.refused[:5])
            notes.append(
                f"{len(found.refused)} cells that ran are refused, first in lines {lines}."
            )
        if found.left_out:
            notes.append(f"{found.left_out} rows are of machines without a profile here.")
        if found.without_rows:
            notes.append(f"The table has no rows for {', '.join(found.without_rows)}.")
        notes += [f"{n} rows are left out: {reason}" for reason, n in found.unknown.items()]
        return [*notes]

    def json(self) -> dict[str, object]:
        """Return the headline errors, then those by model and by length, and counts."""
        overall, found = _told_errors(self.overall), self.validation
        return {
            **{name: value for name, value in overall.items() if name != "schedules"},
            "stalled_mean_error": self.stalled.mean_error,
            "cells": self.cells,
            "schedules": self.overall.count,
            "stalled_schedules": self.stalled.count,
            "by_model": {name: _told_errors(errors) for name, errors in self.by_model.items()},
            "by_seq_len": {name: _told_errors(errors) for name, errors in self.by_seq_len.items()},
            "failed_rows": len(found.failed),
            "refused_alike": found.refused_alike,
            "refused_rows": len(found.refused),
            "left_out": found.left_out,
            "without_rows": found.without_rows,
            "unknown": found.unknown,
        }


def _told_errors(errors: Errors) -> dict[str, object]:
    return {name: tell(errors) for name, tell in _STATISTICS.items()}


def _error_table(what: str, groups: Mapping[str, Errors]) -> FittedTable:
    lines = [[name, *error_cells(errors)] for name, errors in groups.items()]
    return table_of([what], ["schedules", "mean", "median", "p90", "max"], lines)


def error_cells(errors: Errors) -> list[str]:
    """Return the count and the mean, median, 90th percentile and largest absolute error."""
    sizes = (errors.mean_error, errors.median_error, errors.p90_error, errors.max_error)
    return [f"{errors.count:,}", *("-" if size is None else f"{size:.2%}" for size in sizes)]
