"""A validation as one HTML page: measured against predicted speed, errors by length, tables."""

from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go

from twinstream.fidelity.scoring import Errors, grouped
from twinstream.fidelity.validation import ScoredLine, TableReport, error_cells
from twinstream.report.page import Card, Page, Section, Table, html_of
from twinstream.report.palette import OTHER_COLOUR, series

_HEIGHT = 520
_LEGEND = {"orientation": "h", "y": 1.0, "yanchor": "bottom"}
_MARGIN = {"l": 75, "r": 20, "t": 40, "b": 90}


def scatter_html(report: TableReport) -> str:
    """Return the page; it works offline."""
    overall, stalled = report.overall, report.stalled
    groups = grouped(report.compared, lambda row: f"{row.line.machine} {row.line.model}")
    return html_of(
        Page(
            "Predicted and measured",
            f"{len(report.compared):,} measured cells, {overall.count:,} distinct schedules. An "
            "error is predicted / measured - 1 of tokens/s.",
            [
                Card("mean error", _percent(overall.mean_error), "absolute, over schedules"),
                Card("median", _percent(overall.median_error)),
                Card("90 %", _percent(overall.p90_error), "of schedules are within"),
                Card("worst", _percent(overall.max_error)),
                Card("stalled, mean", _percent(stalled.mean_error),
                     f"{stalled.count} schedules, over 10 % slower than with infinite links"),
            ],
            [
                *_charts(groups),
                Section("By model", "", _table("machine, model", report.by_model), half=True),
                Section("By length", "", _table("tokens of a sequence", report.by_seq_len),
                        half=True),
            ],
            "Made by twinstream validate.",
        )
    )  # fmt: skip


def _charts(groups: Mapping[str, Sequence[ScoredLine]]) -> list[Section]:
    if not groups:
        return [Section("Speed", "No row of the table has a speed that was predicted, too.", None)]
    return [
        Section("Speed", "On the line, predicted and measured tokens/s are equal.",
                _speeds(groups), half=True),
        Section("Error by length", "Above zero, the prediction is too fast.",
                _errors_by_length(groups), half=True),
    ]  # fmt: skip


def _speeds(groups: Mapping[str, Sequence[ScoredLine]]) -> go.Figure:
    speeds = [each.row.measured or 0.0 for group in groups.values() for each in group]
    ends = [min(speeds), max(speeds)]
    equal = go.Scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": OTHER_COLOUR})
    return _figure(
        [equal, *_dots(groups, lambda e: e.row.measured, lambda e: e.predicted.tokens_per_s)],
        xaxis={"type": "log", "title": {"text": "measured tokens/s"}},
        yaxis={"type": "log", "title": {"text": "predicted tokens/s"}},
    )


def _errors_by_length(groups: Mapping[str, Sequence[ScoredLine]]) -> go.Figure:
    lengths = sorted({each.row.line.seq_len for group in groups.values() for each in group})
    return _figure(
        _dots(groups, lambda e: e.row.line.seq_len, lambda e: 100 * (e.error or 0.0)),
        xaxis={"type": "log", "title": {"text": "tokens of a sequence"}, "tickvals": lengths,
               "ticktext": [f"{length:,}" for length in lengths], "tickangle": -45},
        yaxis={"title": {"text": "predicted / measured - 1, %"}, "zeroline": True,
               "zerolinecolor": OTHER_COLOUR},
    )  # fmt: skip


def _figure(traces: Sequence[go.Scatter], **axes: object) -> go.Figure:
    figure = go.Figure(traces)
    figure.update_layout(height=_HEIGHT, legend=_LEGEND, margin=_MARGIN, **axes)
    return figure


def _dots(
    groups: Mapping[str, Sequence[ScoredLine]],
    x: Callable[[ScoredLine], object],
    y: Callable[[ScoredLine], object],
) -> list[go.Scatter]:
    return [
        go.Scatter(
            x=list(map(x, group)), y=list(map(y, group)), mode="markers", name=name,
            text=list(map(_told, group)), hovertemplate="%{text}<extra></extra>",
            marker={
                "color": series(number).colour, "size": 7, "opacity": 0.65,
                "symbol": series(number).symbol,
            },
        )
        for number, (name, group) in enumerate(groups.items())
    ]  # fmt: skip


def _told(each: ScoredLine) -> str:
    row, found = each.row.line, each.predicted
    return (
        f"{row.machine} {row.model}, {row.seq_len:,} tokens, {row.host_mem_gib:g} GiB host, "
        f"{row.dev_mem_gib:g} GiB device<br>measured {row.tokens_per_s:,.0f}, predicted "
        f"{found.tokens_per_s:,.0f} tokens/s ({each.error:+.1%})<br>stall {found.stall:.1%}"
    )


def _table(what: str, found: Mapping[str, Errors]) -> Table:
    columns = [what, "schedules", "mean", "median", "90 %", "worst"]
    rows = [
        [f"{int(name):,}" if name.isdecimal() else name, *error_cells(errors)]
        for name, errors in found.items()
    ]
    if found and all(name.isdecimal() for name in found):
        rows.sort(key=lambda row: int(row[0].replace(",", "")))
    return Table(columns, rows)


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:.2%}"
