"""A validation of clusters as tables for people, as JSON, and as a CSV of its rows."""

import csv
import io
from collections.abc import Sequence

from rich import box
from rich.console import Group

from twinstream.fidelity.clusters.comparing import SpeedComparison, comparisons
from twinstream.fidelity.clusters.scoring import ScoredRow, SeriesErrors, Validation
from twinstream.screens.fitted_table import FittedTable

_KINDS = {
    "scaling": "Scaling: tokens/s per GPU relative to the run on fewest GPUs",
    "ratio": "Ratios: tokens/s per GPU relative to the first of a set",
    "zero3": "ZeRO-3 relative to PTD on as many GPUs",
}
_COLUMNS = (
    *("series", "row", "split", "gpu", "gpus", "layout", "measured_s", "predicted_s", "error"),
    *("fits", "memory_bytes", "activation_bytes", "suspect", "why_not", "note"),
)


def validation_screen(validation: Validation) -> Group:
    """Row by row, then by series, then speeds held against each other, then what does not fit."""
    parts: list[object] = [_rows_table(validation.rows), _series_table(validation.series)]
    found = comparisons(validation.rows)
    parts += [_comparison_table(kind, [one for one in found if one.kind == kind])
              for kind in _KINDS if any(one.kind == kind for one in found)]  # fmt: skip
    if activations := activation_errors(validation.rows):
        parts.append(_activation_table(activations))
    return Group(*parts, *_notes(validation))  # type: ignore[arg-type]


def _rows_table(rows: Sequence[ScoredRow]) -> Group:
    table = _table(("row", "layout"), ("GPUs", "measured s", "predicted s", "error", "fits"))
    series = ""
    for each in rows:
        if each.predicted.step_s is None:
            continue
        if each.row.series != series:
            series = each.row.series
            table.add_section()
            table.add_row(f"[{series}]")
        mark = {"calibration": " *", "not scored": " -", "scored": ""}[each.split]
        table.add_row(
            each.row.row_id + mark,
            each.row.layout,
            f"{each.row.num_gpus:,}",
            _seconds(each.row.measured_s),
            _seconds(each.predicted.step_s),
            _percent(each.error),
            {True: "yes", False: "NO", None: "-"}[each.predicted.fits],
        )
    told = "* constants were fitted to it; - not scored. Error: predicted / measured - 1."
    return Group("Rows", table, told)


def _series_table(series: Sequence[SeriesErrors]) -> Group:
    names = ("rows", "mean", "bias", "worst", "all", "drift", "most", "unfit")
    table = _table(("series",), names)
    table.columns[0].no_wrap = True
    for one in series:
        if one.all_rows:
            table.add_row(
                one.series,
                f"{one.rows} of {one.all_rows}",
                _percent(one.mean_error, signed=False),
                _percent(one.bias),
                _percent(one.worst),
                _percent(one.all_mean_error, signed=False),
                _percent(one.mean_drift, signed=False),
                _percent(one.worst_drift),
                str(one.do_not_fit or "-"),
            )
    told = (
        "Mean, bias and worst of rows that no constant was fitted to; all: mean with those. Drift: "
        "error on most GPUs less that on fewest, of one configuration, mean and most. Unfit: ran, "
        "and is predicted not to fit."
    )
    return Group("Errors of step times by series", table, told)


def _comparison_table(kind: str, found: Sequence[SpeedComparison]) -> Group:
    table = _table(("set", "row"), ("GPUs", "measured", "predicted", "points", "ratio error"))
    for one in found:
        table.add_row(
            one.set,
            one.row,
            f"{one.num_gpus:,}",
            f"{one.measured:.3f}",
            f"{one.predicted:.3f}",
            f"{one.points:+.1f}",
            _percent(one.ratio_error),
        )
    return Group(_KINDS[kind], table)


def activation_errors(rows: Sequence[ScoredRow]) -> list[tuple[ScoredRow, int]]:
    """Rows whose activations are published and predicted, with the published bytes."""
    return [
        (each, each.row.activation_bytes)
        for each in rows
        if each.row.activation_bytes is not None and each.predicted.activation_bytes is not None
    ]


def _activation_table(found: Sequence[tuple[ScoredRow, int]]) -> Group:
    table = _table(("row", "layout"), ("published GiB", "predicted GiB", "error"))
    for each, published in found:
        predicted = each.predicted.activation_bytes or 0
        table.add_row(
            each.row.row_id,
            each.row.layout,
            f"{published / 2**30:.2f}",
            f"{predicted / 2**30:.2f}",
            _percent(predicted / published - 1),
        )
    return Group("Activations of the first stage", table)


def _notes(validation: Validation) -> list[str]:
    reasons: dict[str, int] = {}
    for each in validation.rows:
        if why := each.row.why_not or each.predicted.refused:
            reasons[why] = reasons.get(why, 0) + 1
    return [f"{count} rows: {why}." for why, count in reasons.items()]


def validation_json(validation: Validation) -> dict[str, object]:
    """Series, comparisons, activations and rows."""
    return {
        "series": [one.model_dump() for one in validation.series],
        "comparisons": [
            {**one.model_dump(), "points": one.points, "ratio_error": one.ratio_error}
            for one in comparisons(validation.rows)
        ],
        "activations": [
            {"row": each.row.row_id, "published_bytes": published,
             "predicted_bytes": each.predicted.activation_bytes}
            for each, published in activation_errors(validation.rows)
        ],
        "rows": [_told(each) for each in validation.rows],
    }  # fmt: skip


def rows_csv(validation: Validation) -> str:
    """One line a row of the tables, in their order."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for each in validation.rows:
        told = _told(each)
        writer.writerow({key: "" if value is None else value for key, value in told.items()})
    return text.getvalue()


def _told(each: ScoredRow) -> dict[str, object]:
    row, found = each.row, each.predicted
    return {
        "series": row.series,
        "row": row.row_id,
        "split": each.split,
        "gpu": row.gpu,
        "gpus": row.num_gpus,
        "layout": row.layout,
        "measured_s": row.measured_s,
        "predicted_s": found.step_s,
        "error": each.error,
        "fits": found.fits,
        "memory_bytes": found.memory_bytes,
        "activation_bytes": found.activation_bytes,
        "suspect": row.suspect,
        "why_not": row.why_not or found.refused,
        "note": row.note,
    }


def _table(words: Sequence[str], numbers: Sequence[str]) -> FittedTable:
    table = FittedTable(box=box.SIMPLE_HEAD)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(value: float | None, *, signed: bool = True) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}"
