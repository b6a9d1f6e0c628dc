"""Every row of a measured table predicted, and how far off the predictions are."""

from collections.abc import Callable, Hashable, Mapping, Sequence

from rich.console import Group, RenderableType

from twinstream.fidelity.measured import Predicted
from twinstream.fidelity.rows import (
    RowKey,
    TableRow,
    known_of,
    nothing_left,
    profiles_of,
    unknown_of,
)
from twinstream.fidelity.scoring import (
    Errors,
    Key,
    Report,
    ScoredRow,
    errors_of,
    grouped,
    score,
    table_of,
)
from twinstream.hardware_profiles.measured_table import OUT_OF_MEMORY, MeasuredRow
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.errors import TwinstreamError
from twinstream.screens.fitted_table import FittedTable

STALLED = 0.10
ScoredLine = ScoredRow[TableRow]
Starts = Callable[[str, int], Callable[[], None]]
_CONFIGURATION = (
    *("machine", "model", "seq_len", "host_mem_gib", "dev_mem_gib"),
    *("status", "status_detail", "rounds_per_step"),
)


class ValidationError(TwinstreamError):
    """Nothing of a table can be predicted with the profiles given."""


class TableReport(Report[TableRow]):
    """The rows of a table that have a profile, in its order: errors of tokens/s, what is left out.

    `compared` rows have an error, `stalled` are predicted over 10 % slower than with infinite
    links. Runs of `failed` rows failed; `refused_alike` of these are refused for the reason that
    the table gives, or for want of memory where it gives that. `refused` rows ran, but the policy
    refuses them. `left_out` rows are of machines that no profile was given for, `without_rows` are
    profiles given whose machine has none; `unknown` counts rows of models that nobody here knows,
    by the reason.
    """

    def __init__(
        self, rows: Sequence[ScoredLine], left_out: int = 0, without_rows: tuple[str, ...] = ()
    ) -> None:
        self.rows, self.left_out, self.without_rows = rows, left_out, without_rows
        self.compared = [each for each in rows if each.error is not None]
        self.failed = [each for each in rows if each.row.line.status == "failed"]
        self.refused_alike = sum(map(_is_refused_alike, self.failed))
        ran = [each for each in rows if each.row.line.status == "ok"]
        self.refused = [each for each in ran if each.predicted.refused]
        self.unknown = unknown_of(each.predicted for each in rows)
        self.overall = errors_of(self.compared)
        self.stalled = errors_of(e for e in self.compared if (e.predicted.stall or 0.0) > STALLED)
        self.by_model = self._by(lambda row: f"{row.line.machine} {row.line.planned_model}")
        self.by_seq_len = self._by(lambda row: str(row.line.seq_len))
        self._numbers: dict[Hashable, int] = {}
        for each in self.compared:
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
        def place(each: ScoredLine) -> tuple[str, str, int]:
            return each.row.line.machine, each.row.line.model, each.row.line.seq_len

        groups = grouped(sorted(self.compared, key=place), name_of)
        return {name: errors_of(group) for name, group in groups.items()}

    def screen(self) -> Group:
        """Return a table of errors each, then notes."""
        head = (
            f"{len(self.compared)} measured cells, {self.overall.count} distinct schedules: "
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
        notes: list[RenderableType] = []
        if self.failed:
            notes.append(
                f"{self.refused_alike} of {len(self.failed)} failed cells are refused for "
                "the recorded reason."
            )
        if self.refused:
            lines = ", ".join(str(each.row.line.line) for each in self.refused[:5])
            notes.append(f"{len(self.refused)} cells that ran are refused, first in lines {lines}.")
        if self.left_out:
            notes.append(f"{self.left_out} rows are of machines without a profile here.")
        if self.without_rows:
            notes.append(f"The table has no rows for {', '.join(self.without_rows)}.")
        notes += [f"{n} rows are left out: {reason}" for reason, n in self.unknown.items()]
        return notes

    def json(self) -> dict[str, object]:
        """Return the headline errors, then those by model and by length, and counts."""
        overall = _told_errors(self.overall)
        return {
            **{name: value for name, value in overall.items() if name != "schedules"},
            "stalled_mean_error": self.stalled.mean_error,
            "cells": len(self.compared),
            "schedules": self.overall.count,
            "stalled_schedules": self.stalled.count,
            "by_model": {name: _told_errors(errors) for name, errors in self.by_model.items()},
            "by_seq_len": {name: _told_errors(errors) for name, errors in self.by_seq_len.items()},
            "failed_rows": len(self.failed),
            "refused_alike": self.refused_alike,
            "refused_rows": len(self.refused),
            "left_out": self.left_out,
            "without_rows": self.without_rows,
            "unknown": self.unknown,
        }


def _is_refused_alike(each: ScoredLine) -> bool:
    why, told = each.predicted.refused, each.row.line.status_detail
    return bool(why) and (why == told or told.lower() in OUT_OF_MEMORY)


def _told_errors(errors: Errors) -> dict[str, object]:
    names = ("mean_error", "median_error", "p90_error", "max_error")
    return {"schedules": errors.count, **{name: getattr(errors, name) for name in names}}


def _error_table(what: str, groups: Mapping[str, Errors]) -> FittedTable:
    lines = [[name, *error_cells(errors)] for name, errors in groups.items()]
    return table_of([what], ["schedules", "mean", "median", "p90", "max"], lines)


def error_cells(errors: Errors) -> list[str]:
    """Return the count and the mean, median, 90th percentile and largest absolute error."""
    sizes = (errors.mean_error, errors.median_error, errors.p90_error, errors.max_error)
    return [f"{errors.count:,}", *("-" if size is None else f"{size:.2%}" for size in sizes)]


def validate(
    rows: Sequence[MeasuredRow],
    machines: Sequence[Machine],
    *,
    jobs: int | None = None,
    on_start: Starts = lambda what, total: lambda: None,
) -> TableReport:
    """Predict the rows of a table with the profiles of their machines.

    Args:
        rows: of `read_measured`.
        machines: profiles; each is used for the rows of the machine whose class its name begins
            with, see `profiles_of`.
        jobs: processes; by default as many as there are cores.
        on_start: is told what begins and of how many parts (sizing rows, then predicting distinct
            schedules), and returns what to call after each.

    Raises:
        ValidationError: no row is of any of the machines, or none could be run.
        TwinstreamError: a row's machine or model is not known, or a profile lacks a number.
    """
    names = sorted({row.machine for row in rows})
    profiles = profiles_of(names, machines)
    if not profiles:
        given = ", ".join(machine.name for machine in machines)
        raise ValidationError(
            f"the table has rows of {', '.join(names)}, the profiles given are {given}: give the "
            "profile of one of the table's machines with --machine"
        )
    mine = [row for row in rows if row.machine in profiles]
    known = known_of(mine, on_start("sizing", len(mine)))
    keys = list(map(_key, mine, known))
    if not any(
        row.status == "ok" and isinstance(k, Key) for row, k in zip(mine, keys, strict=True)
    ):
        raise ValidationError(nothing_left(known))
    scored = score(
        [TableRow(row) for row in mine],
        keys,
        lambda row: profiles[row.line.machine],
        jobs=jobs,
        on_start=lambda total: on_start("predicting", total),
    )
    without = [machine.name for machine in machines if machine not in profiles.values()]
    return TableReport(scored, len(rows) - len(mine), tuple(without))


def _key(row: MeasuredRow, known: RowKey | Predicted) -> Key | Predicted:
    """A failed run of the seed system's is not predicted: its sizing has told all."""
    if isinstance(known, Predicted):
        return known
    return Key(known, known.plan) if row.status == "ok" or row.is_ours else Predicted()
