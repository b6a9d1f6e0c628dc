"""A validation as tables for people, and as a CSV of its rows."""

import csv
import io

from rich import box
from rich.console import Group

from twinstream.fidelity.validation import STALLED, Errors, Validation
from twinstream.screens.fitted_table import FittedTable

_COLUMNS = (
    "machine", "model", "seq_len", "host_mem_gib", "dev_mem_gib", "status", "status_detail",
    "rounds_per_step", "tokens_per_s", "predicted_tokens_per_s", "error", "predicted_step_s",
    "stall", "schedule", "refused", "policy",
)  # fmt: skip


def validation_screen(validation: Validation) -> Group:
    """Errors overall, on stalled schedules, by model and by length; what was left out."""
    overall = _table("")
    _add(overall, "all", validation.overall)
    _add(overall, f"stalled over {STALLED:.0%}", validation.stalled)
    by_model, by_seq_len = _table("model"), _table("tokens of a sequence")
    for name, errors in validation.by_model.items():
        _add(by_model, name, errors)
    for name, errors in sorted(validation.by_seq_len.items(), key=lambda item: int(item[0])):
        _add(by_seq_len, f"{int(name):,}", errors)
    head = (
        f"{validation.cells} measured cells, {validation.overall.schedules} distinct schedules: "
        "absolute error of tokens/s"
    )
    return Group(head, overall, by_model, by_seq_len, *_notes(validation))


def _notes(validation: Validation) -> list[str]:
    notes = []
    if validation.failed_rows:
        notes.append(
            f"{validation.refused_alike} of {validation.failed_rows} failed cells are refused for "
            "the recorded reason."
        )
    ran = [each for each in validation.rows if each.row.status == "ok"]
    if refused := [each for each in ran if each.refused is not None]:
        lines = ", ".join(str(each.row.line) for each in refused[:5])
        notes.append(f"{len(refused)} cells that ran are refused, first in lines {lines}.")
    if validation.left_out:
        notes.append(f"{validation.left_out} rows are of machines without a profile here.")
    if validation.without_rows:
        notes.append(f"The table has no rows for {', '.join(validation.without_rows)}.")
    for reason, count in validation.unknown.items():
        notes.append(f"{count} rows are left out: {reason}")
    return notes


def _table(what: str) -> FittedTable:
    table = FittedTable(box=box.SIMPLE_HEAD)
    table.add_column(what)
    for name in ("schedules", "mean", "median", "p90", "max"):
        table.add_column(name, justify="right")
    return table


def _add(table: FittedTable, name: str, errors: Errors) -> None:
    values = (errors.mean_error, errors.median_error, errors.p90_error, errors.max_error)
    shown = ["-" if value is None else f"{value:.2%}" for value in values]
    table.add_row(name, f"{errors.schedules:,}", *shown)


def rows_csv(validation: Validation) -> str:
    """One line a row of the table, with measured and predicted speed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for each in validation.rows:
        values = {**dict(each.row), **dict(each)}
        writer.writerow(["" if values[name] is None else values[name] for name in _COLUMNS])
    return text.getvalue()
