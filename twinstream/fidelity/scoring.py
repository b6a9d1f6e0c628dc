"""Predictions held against measurements: errors of rows and of groups, and how they are told."""

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Generic, TypeVar

import numpy as np
from rich import box
from rich.console import Group

from twinstream.fidelity.measured import PredictableRow, Predicted, Predictors, Profile, predicted
from twinstream.schedule.node import Node
from twinstream.screens.fitted_table import FittedTable

R = TypeVar("R", bound=PredictableRow[Any])


@dataclass(frozen=True)
class Key:
    """The identity of a row's prediction, and of the schedule that it counts as in errors."""

    prediction: Hashable
    schedule: Hashable


@dataclass(frozen=True)
class ScoredRow(Generic[R]):
    """A row and its prediction; rows of an equal `schedule` are one figure in errors."""

    row: R
    predicted: Predicted
    schedule: Hashable = None

    @property
    def error(self) -> float | None:
        """Return predicted / measured - 1 of what was measured."""
        value, measured = self.row.value_in(self.predicted), self.row.measured
        return None if value is None or measured is None else value / measured - 1


class Errors(Node):
    """Relative errors as fractions, each schedule's once; None of none.

    `bias` is the mean and `worst` the largest with its sign; the others are of absolute errors.
    """

    count: int
    mean_error: float | None = None
    median_error: float | None = None
    p90_error: float | None = None
    bias: float | None = None
    worst: float | None = None

    @property
    def max_error(self) -> float | None:
        """Return the largest absolute error."""
        return None if self.worst is None else abs(self.worst)


def errors_of(rows: Iterable[ScoredRow[Any]]) -> Errors:
    """Sum up the errors of rows; a schedule's is of the means over its rows."""
    by_schedule: dict[Hashable, list[tuple[float, float]]] = {}
    for each in rows:
        value, measured = each.row.value_in(each.predicted), each.row.measured
        if value is not None and measured is not None:
            by_schedule.setdefault(each.schedule, []).append((value, measured))
    errors = [
        fmean(value for value, _ in pairs) / fmean(measured for _, measured in pairs) - 1
        for pairs in by_schedule.values()
    ]
    if not errors:
        return Errors(count=0)
    sizes = [abs(error) for error in errors]
    return Errors(
        count=len(errors),
        mean_error=fmean(sizes),
        median_error=float(np.median(sizes)),
        p90_error=float(np.percentile(sizes, 90)),
        bias=fmean(errors),
        worst=max(errors, key=abs),
    )


def grouped(
    rows: Iterable[ScoredRow[R]], name_of: Callable[[R], str]
) -> dict[str, list[ScoredRow[R]]]:
    """Sort rows into groups by a name, in the order of the rows."""
    groups: dict[str, list[ScoredRow[R]]] = {}
    for each in rows:
        groups.setdefault(name_of(each.row), []).append(each)
    return groups


def score(
    rows: Sequence[R],
    keys: Sequence[Key | Predicted],
    profile_of: Callable[[R], Profile],
    *,
    jobs: int | None = None,
    on_start: Callable[[int], Callable[[], None]] = lambda total: lambda: None,
) -> tuple[ScoredRow[R], ...]:
    """Predict rows, those of an equal key once, the dearest first.

    Args:
        keys: of each row in its place; or what is known of it without a prediction.
        jobs: processes; by default as many as there are cores.
        on_start: is told how many predictions begin, and returns what to call after each.

    Raises:
        TwinstreamError: a profile lacks a number, or a process ended.
    """
    first: dict[Hashable, R] = {}
    for row, key in zip(rows, keys, strict=True):
        if isinstance(key, Key):
            first.setdefault(key.prediction, row)
    dearest = sorted(first, key=lambda key: -first[key].effort)
    with Predictors(jobs) as predictors:
        asked = [(first[key], profile_of(first[key])) for key in dearest]
        answers = predictors.ask(predicted, asked, on_start(len(asked)))
    found = dict(zip(dearest, answers, strict=True))
    return tuple(
        ScoredRow(row, found[key.prediction], key.schedule)
        if isinstance(key, Key)
        else ScoredRow(row, key)
        for row, key in zip(rows, keys, strict=True)
    )


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
