"""Answers as parts of the page: cards, timeline, what a bit more of each would bring."""

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
from dash import dcc, html

from twinstream.explorer.answers import Answer
from twinstream.explorer.state import State
from twinstream.report.bars import op_bars, shrunk
from twinstream.report.palette import readable
from twinstream.report.timeline_figure import Shown, timeline_figure
from twinstream.report.view import View
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.sizes import gib
from twinstream.tables import seconds, workload_line
from twinstream.uncertainty import Speed, order_note, prediction_notes, uncertainty_of
from twinstream.whatif.question import LINK_FIELDS

# Readable on light and on dark paper alike.
_TEXT, _GRID = "#76818d", "rgba(128,128,128,0.22)"
_MORE = 0.1
_WORTH = 5e-5  # gains below are not shown
_FIELD_OF_LINK = {
    "h2d": LINK_FIELDS[0], "d2h": LINK_FIELDS[1], "pcie": LINK_FIELDS[2],
    "host_dram": "host_dram_bytes_per_s",
}  # fmt: skip


def column(state: State, machine: str, answer: Answer | TwinstreamError, command: str) -> html.Div:
    """One machine: its headlines, or why there is no plan, as the command line says it.

    `command` gives the same on the command line.
    """
    parts: list[Any] = [html.H2(machine)]
    if isinstance(answer, TwinstreamError):
        parts.append(html.Div(f"error: {answer}", className="error", id=f"error-{machine}"))
    else:
        parts += [
            html.P(workload_line(answer.schedule.workload)),
            html.Div([_card(*card) for card in _cards(machine, answer)], className="cards"),
            *(html.P(note) for note in prediction_notes(answer.schedule, answer.machine)),
            html.P(
                html.A("full report", href=f"/report{state.url}&machine={machine}", target="_blank")
            ),
        ]
    parts.append(html.Code(command))
    return html.Div(parts, className="machine")


def ranking_note(answers: Mapping[str, Answer]) -> str | None:
    """What of the machines' order is not certain."""
    return order_note(
        {
            name: Speed(one.summary.tokens_per_s, uncertainty_of(one.machine))
            for name, one in answers.items()
        }
    )


def _cards(machine: str, answer: Answer) -> list[tuple[str, str, str, str]]:
    summary, caps = answer.summary, answer.schedule.caps
    limits = ", ".join(readable(limit) for limit in answer.explanation.limits) or "-"
    idle = sum(answer.explanation.compute_idle_fraction.values())
    gap = "-" if summary.gap is None else f"{summary.gap:.1%}"
    return [
        ("throughput, tokens/s", f"{summary.tokens_per_s:,.0f}",
         f"{uncertainty_of(answer.machine).short}, {seconds(summary.step_time_s)} a step",
         f"speed-{machine}"),
        ("MFU, HFU", f"{summary.mfu:.1%}, {summary.hfu:.1%}", "of the peak", f"mfu-{machine}"),
        ("above the bound", gap, f"limited by {limits}", f"gap-{machine}"),
        ("compute waits", f"{idle:.1%}", f"{summary.recompute_fraction:.1%} of FLOPs redone",
         f"idle-{machine}"),
        ("device memory", gib(summary.device_peak_bytes), _cap(caps.device_bytes),
         f"device-{machine}"),
        ("host memory", gib(summary.host_peak_bytes), _cap(caps.host_bytes), f"host-{machine}"),
    ]  # fmt: skip


def _cap(cap_bytes: int | None) -> str:
    return "no cap" if cap_bytes is None else f"cap {gib(cap_bytes)}"


def _card(name: str, value: str, note: str, identity: str) -> html.Div:
    return html.Div(
        [
            html.Div(name, className="name"),
            html.Div(value, className="value", id=identity),
            html.Div(note, className="note"),
        ],
        className="card",
    )


def timeline_of(machine: str, answer: Answer) -> html.Div:
    """Streams, memory and links of a middle round."""
    view = View("predicted", answer.schedule, answer.timeline)
    rounds = answer.schedule.workload.rounds_per_step
    number = rounds // 2
    window = shrunk(view, view.round_span(number))
    figure = timeline_figure([Shown(view, window, op_bars(view, window))], answer.machine)
    which = f"round {number} of 0 to {rounds - 1}" if rounds > 1 else "the step's only round"
    title = f"{machine}: {which}"
    if window != view.round_span(number):
        title += f", {seconds(window.lasting_ns / 1e9)} around its loss"
    return html.Div([html.H2(title), _graph(figure, f"timeline-{machine}")])


def more_of(answers: Mapping[str, Answer]) -> html.Div:
    """What 10 % more of each cap and link would bring, by the prices of the lower bound."""
    figure = go.Figure()
    colours = ("#0072B2", "#D55E00", "#009E73", "#E69F00")
    gains = {machine: _gains(answer) for machine, answer in answers.items()}
    worth = (name for found in gains.values() for name, gain in found.items() if gain > _WORTH)
    names = list(dict.fromkeys(worth))[::-1]
    for number, (machine, found) in enumerate(gains.items()):
        figure.add_trace(
            go.Bar(
                orientation="h", y=names, x=[100 * found.get(name, 0.0) for name in names],
                name=machine, marker={"color": colours[number % len(colours)]},
                hovertemplate="10 % more %{y}: %{x:+.2f} % tokens/s<extra>" + machine + "</extra>",
            )
        )  # fmt: skip
    figure.update_layout(
        barmode="group", height=80 + 26 * len(names) * max(1, len(gains)),
        xaxis={"title": {"text": "more tokens/s, %"}, "rangemode": "tozero"},
        margin={"l": 130, "r": 30, "t": 10, "b": 45}, showlegend=len(gains) > 1,
    )  # fmt: skip
    return html.Div(
        [
            html.H2("What if there were 10 % more?"),
            html.P("By the lower bound's prices of memories and links, to first order. `twinstream "
                   "whatif` plans every change again, a faster GPU among them."),
            _graph(figure, "more") if names else html.P("No memory and no link would help alone: "
                                                        "compute limits the step."),
        ]
    )  # fmt: skip


def _gains(answer: Answer) -> dict[str, float]:
    """Relative gain of tokens/s for 10 % more of each thing that has a price."""
    bound, caps = answer.schedule.bound, answer.schedule.caps
    if bound is None:
        return {}
    saved_s: dict[str, float] = {}
    if caps.device_bytes is not None:
        saved_s["device memory"] = bound.device_s_per_gib * caps.device_bytes / 2**30
    if caps.host_bytes is not None:
        saved_s["host memory"] = bound.host_s_per_gib * caps.host_bytes / 2**30
    for name, price in bound.link_s_per_gb_per_s.items():
        if name not in _FIELD_OF_LINK:
            continue
        # A price is for what the link reaches, so 10 % of that.
        saved_s[readable(name)] = price * answer.machine.rate(_FIELD_OF_LINK[name]) / 1e9
    step_s = answer.summary.step_time_s
    return {name: max(0.0, _MORE * saved / step_s) for name, saved in saved_s.items()}


def _graph(figure: go.Figure, identity: str) -> dcc.Graph:
    figure.update_layout(
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        font={"color": _TEXT, "family": "system-ui, 'DejaVu Sans', sans-serif", "size": 12.5},
    )  # fmt: skip
    figure.update_xaxes(gridcolor=_GRID, zerolinecolor=_GRID, linecolor=_GRID)
    figure.update_yaxes(gridcolor=_GRID, zerolinecolor=_GRID, linecolor=_GRID)
    return dcc.Graph(
        figure=figure, id=identity, config={"displaylogo": False, "displayModeBar": False}
    )
