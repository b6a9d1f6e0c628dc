"""A validation as one HTML page: measured against predicted speed with bars, errors, tables."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from twinstream.fidelity.cluster_report import Bars, ClusterReport, Scored, series_errors
from twinstream.fidelity.scoring import Errors, errors_of, grouped
from twinstream.fidelity.validation import ScoredLine, TableReport, error_cells
from twinstream.report.page import Card, Page, Section, Table, html_of
from twinstream.report.palette import OTHER_COLOUR, series

_HEIGHT = 520
_TICKS_APART = 1.4  # times, so that their numbers do not meet
_LEGEND = {"orientation": "h", "y": 1.0, "yanchor": "bottom"}
_MARGIN = {"l": 75, "r": 20, "t": 40, "b": 90}


@dataclass(frozen=True)
class ScatterDot:
    """A row on the figures: speeds as measured and as predicted, and `place`, which errors lie by.

    `bar` is how far off its prediction is said to be, a fraction; None: that is not said.
    """

    measured: float
    predicted: float
    place: float
    text: str
    bar: float | None = None

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted / self.measured - 1


Groups = Mapping[str, Sequence[ScatterDot]]


def scatter_html(report: TableReport) -> str:
    """Return the page of runs on one device; it works offline."""
    overall, stalled = report.overall, report.stalled
    groups = grouped(report.compared, lambda row: f"{row.line.machine} {row.line.model}")
    dots = {name: list(map(_dot_of_line, group)) for name, group in groups.items()}
    return html_of(
        Page(
            "Predicted and measured",
            f"{len(report.compared):,} measured cells, {overall.count:,} distinct schedules. An "
            "error is predicted / measured - 1 of tokens/s.",
            [
                *_cards(overall, "over schedules"),
                Card("stalled, mean", _percent(stalled.mean_error),
                     f"{stalled.count} schedules, over 10 % slower than with infinite links"),
            ],
            [
                *_charts(dots, "tokens/s", "tokens of a sequence"),
                Section("By model", "", _table("machine, model", report.by_model), half=True),
                Section("By length", "", _table("tokens of a sequence", report.by_seq_len),
                        half=True),
            ],
            "Made by twinstream validate.",
        )
    )  # fmt: skip


def cluster_scatter_html(report: ClusterReport) -> str:
    """Return the page of published steps of clusters: a bar is what `plan` would say of the row."""
    known = [each for each in report.rows if each.error is not None and each.row.scored]
    groups = grouped(known, lambda row: f"{row.gpu}{_kind(row.job)}")
    bars = Bars(report.rows)
    dots = {name: [_dot_of_step(each, bars) for each in group] for name, group in groups.items()}
    covered = bars.coverage(known)
    lines = [
        [one["series"], f"{one['all_rows']}", *map(_percent, (one["all_mean_error"],
         one["all_bias"], one["mean_error"], one["worst"]))]
        for one in series_errors(report.rows, bars) if one["all_rows"]
    ]  # fmt: skip
    columns = ("series", "rows", "mean", "bias", "mean of unseen", "worst of unseen")
    count = f"of {covered['with_bar']} rows with one"
    return html_of(
        Page(
            "Published and predicted",
            f"{len(known):,} of {len(report.rows):,} published training steps on many GPUs. "
            "Figures are of tokens/s, other errors of step times, predicted / published - 1; no "
            "constant was fitted to unseen rows.",
            [
                *_cards(errors_of(known), "of step times"),
                Card("within the bar", _percent(covered["within_bar"]), count),
                Card("within two bars", _percent(covered["within_two_bars"]), count),
            ],
            [
                *_charts(dots, "tokens/s of one GPU", "GPUs"),
                Section("By series", "", Table(columns, lines)),
            ],
            "Made by twinstream validate --cluster. A bar is what would be said of a row that "
            "nobody has run: of the published steps near it, without its own family.",
        )
    )


def _kind(job: Any) -> str:
    return ", experts" if job.shape.experts is not None else ""


def _dot_of_line(each: ScoredLine) -> ScatterDot:
    row, found = each.row.line, each.predicted
    return ScatterDot(
        row.tokens_per_s or 0.0, found.tokens_per_s or 0.0, row.seq_len,
        f"{row.machine} {row.model}, {row.seq_len:,} tokens, {row.host_mem_gib:g} GiB host, "
        f"{row.dev_mem_gib:g} GiB device<br>measured {row.tokens_per_s:,.0f}, predicted "
        f"{found.tokens_per_s:,.0f} tokens/s ({each.error:+.1%})<br>stall {found.stall:.1%}",
    )  # fmt: skip


def _dot_of_step(each: Scored, bars: Bars) -> ScatterDot:
    row, tokens = each.row, each.row.tokens / each.row.num_gpus
    measured = tokens / (row.measured_s or 1.0)
    predicted, bar = tokens / (each.predicted.step_s or 1.0), bars.bar(each)
    said = "" if bar is None else f" +/- {bar:.1%}"
    return ScatterDot(
        measured, predicted, row.num_gpus,
        f"{row.row_id}, {row.series}<br>{row.layout}, {row.num_gpus:,} {row.gpu}<br>published "
        f"{measured:,.0f}, predicted {predicted:,.0f}{said} tokens/s a GPU "
        f"({predicted / measured - 1:+.1%})",
        bar,
    )  # fmt: skip


def _cards(found: Errors, what: str) -> list[Card]:
    return [
        Card("mean error", _percent(found.mean_error), f"absolute, {what}"),
        Card("median", _percent(found.median_error)),
        Card("90 %", _percent(found.p90_error), f"{what} are within"),
        Card("worst", _percent(found.max_error)),
    ]


def _charts(groups: Groups, unit: str, places: str) -> list[Section]:
    if not groups:
        return [Section("Speed", "No row of the table has a speed that was predicted, too.", None)]
    return [
        Section("Speed", f"On the line, predicted and measured {unit} are equal.",
                _speeds(groups, unit), half=True),
        Section(f"Error by {places}", "Above zero, the prediction is too fast.",
                _errors_by_place(groups, places), half=True),
    ]  # fmt: skip


def _speeds(groups: Groups, unit: str) -> go.Figure:
    speeds = [dot.measured for group in groups.values() for dot in group]
    ends = [min(speeds), max(speeds)]
    equal = go.Scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": OTHER_COLOUR})
    bars = [[(dot.bar or 0.0) * dot.predicted for dot in group] for group in groups.values()]
    return _figure(
        [equal, *_dots(groups, lambda d: d.measured, lambda d: d.predicted, bars)],
        xaxis={"type": "log", "title": {"text": f"measured {unit}"}},
        yaxis={"type": "log", "title": {"text": f"predicted {unit}"}},
    )


def _errors_by_place(groups: Groups, places: str) -> go.Figure:
    ticks: list[float] = []
    for place in sorted({dot.place for group in groups.values() for dot in group}):
        if not ticks or place >= _TICKS_APART * ticks[-1]:
            ticks.append(place)
    return _figure(
        _dots(groups, lambda d: d.place, lambda d: 100 * d.error),
        xaxis={"type": "log", "title": {"text": places}, "tickvals": ticks,
               "ticktext": [f"{place:,}" for place in ticks], "tickangle": -45},
        yaxis={"title": {"text": "predicted / measured - 1, %"}, "zeroline": True,
               "zerolinecolor": OTHER_COLOUR},
    )  # fmt: skip


def _figure(traces: Sequence[go.Scatter], **axes: object) -> go.Figure:
    figure = go.Figure(traces)
    figure.update_layout(height=_HEIGHT, legend=_LEGEND, margin=_MARGIN, **axes)
    return figure


def _dots(
    groups: Groups, x: Callable[[ScatterDot], object], y: Callable[[ScatterDot], object],
    bars: Sequence[Sequence[float]] | None = None,
) -> list[go.Scatter]:  # fmt: skip
    return [
        go.Scatter(
            x=list(map(x, group)), y=list(map(y, group)), mode="markers", name=name,
            text=[dot.text for dot in group], hovertemplate="%{text}<extra></extra>",
            marker={
                "color": series(number).colour, "size": 7, "opacity": 0.65,
                "symbol": series(number).symbol,
            },
            error_y={"array": bars[number], "thickness": 1, "width": 2}
            if bars is not None and any(bars[number]) else None,
        )
        for number, (name, group) in enumerate(groups.items())
    ]  # fmt: skip


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
