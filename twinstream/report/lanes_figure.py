"""A group of lanes for each class of ranks, on one time axis."""

from collections.abc import Sequence

import plotly.graph_objects as go

from twinstream.report.bars import Bar, merged_bars, op_bars, waiting_bars
from twinstream.report.palette import KEYS, OTHER_COLOUR, key_colour, key_name
from twinstream.report.view import Span, View, time_unit
from twinstream.screens.tables import readable

_BETWEEN = 0.7  # of a lane, between two classes
_ROW_PX, _LOW_ROW_PX, _MANY_ROWS, _EDGES_PX = 24, 17, 40, 90


def lanes_figure(
    classes: Sequence[View], span: Span, axis: Span | None = None, *, merged: bool = False
) -> go.Figure:
    """Bars of every class on its lanes, and its waits for the others below them.

    Args:
        axis: what the time axis shows, if it is not the span.
        merged: ops near to one another as one bar.
    """
    count, axis = len(classes), axis or span
    places, rows = _places(classes)
    unit_ns, unit = time_unit(axis.lasting_ns)
    figure = go.Figure()
    by_key: dict[str, list[tuple[float, Bar]]] = {}
    for one in classes:
        bars = merged_bars(one, span, count) if merged else op_bars(one, span)
        for bar in (*waiting_bars(one, span, count), *bars):
            if bar.end_ns > bar.start_ns:
                by_key.setdefault(bar.key, []).append((places[one.name, bar.queue], bar))
    for key in sorted(by_key, key=lambda key: KEYS.index(key) if key in KEYS else len(KEYS)):
        mine = by_key[key]
        figure.add_trace(
            go.Bar(
                orientation="h", y=[place for place, _ in mine], width=0.84,
                base=[(bar.start_ns - axis.start_ns) / unit_ns for _, bar in mine],
                x=[(bar.end_ns - bar.start_ns) / unit_ns for _, bar in mine],
                hovertext=[bar.text for _, bar in mine], hoverinfo="text",
                name=key_name(key), marker={"color": key_colour(key), "line": {"width": 0}},
            )
        )  # fmt: skip
    row_px = _ROW_PX if rows <= _MANY_ROWS else _LOW_ROW_PX
    figure.update_layout(
        height=round(rows * row_px) + _EDGES_PX, barmode="overlay", bargap=0, hovermode="closest",
        dragmode="zoom", margin={"l": 90, "r": 150, "t": 20, "b": 45}, showlegend=True,
        legend={"x": 1.01, "y": 1, "yanchor": "top", "traceorder": "normal"},
        xaxis={"title": {"text": f"time, {unit}"}, "range": [0, axis.lasting_ns / unit_ns],
               "showspikes": True, "spikemode": "across", "spikethickness": 1, "spikedash": "dot",
               "spikecolor": OTHER_COLOUR, "spikesnap": "cursor"},
        yaxis={"tickvals": list(places.values()), "ticktext": [readable(n) for _, n in places],
               "range": [rows - 0.4, -1.4], "fixedrange": True, "showgrid": False,
               "zeroline": False},
    )  # fmt: skip
    figure.update_layout(meta={"plays": {"unit": unit, "size": ""}})
    for one in classes:
        top = places[one.name, one.lanes[0]]
        figure.add_annotation(
            text=f"<b>{one.name}</b>, {one.num_ranks:,} rank{'s' * (one.num_ranks > 1)}",
            x=0, xref="paper", xanchor="left", y=top - 0.9, yanchor="middle", showarrow=False,
            font={"size": 12},
        )  # fmt: skip
    return figure


def _places(classes: Sequence[View]) -> tuple[dict[tuple[str, str], float], float]:
    """Where on the y axis every lane of every class is, from the top, and where they end."""
    places: dict[tuple[str, str], float] = {}
    row = 0.0
    for one in classes:
        for lane in one.lanes:
            places[one.name, lane] = row
            row += 1
        row += 1 + _BETWEEN  # the class's name stands above its lanes
    return places, row - 1 - _BETWEEN
