"""Answers as parts of the page: cards, timeline, what a bit more of each would bring."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from dash import html

from twinstream.cost.bill import Prices, bill_of
from twinstream.hardware_profiles.link import D2H, DUPLEX, H2D
from twinstream.measures.metrics import rate_text
from twinstream.measures.uncertainty import Speed, order_note, prediction_notes
from twinstream.planner.request import caps_of
from twinstream.report.bars import op_bars, shrunk
from twinstream.report.page import split_error
from twinstream.report.palette import Series, series
from twinstream.report.ranks_part import RanksPart
from twinstream.report.report import report_html
from twinstream.report.timeline_figure import Shown, timeline_figure
from twinstream.report.view import round_name, view_of
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.sizes import gib
from twinstream.screens.layout_screen import money_text, range_text
from twinstream.screens.tables import readable, seconds, workload_line
from twinstream.study.answer import Answer
from twinstream.study.explore.answers import State
from twinstream.study.explore.clusters import graph

MOST_IN_CARDS = 3  # machines; more stand in a table
_BILLION = 1e9
_MORE = 0.1
_WORTH = 5e-5  # gains below are not shown
_FIELD_OF_LINK = {
    "h2d": H2D, "d2h": D2H, "pcie": DUPLEX,
    "host_dram": "host_dram_bytes_per_s",
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A machine on the page: the answer, and the question that it is the answer to."""

    machine: str
    asked: State
    answer: Answer | TwinstreamError
    is_refined: bool = False
    is_being_refined: bool = False


def column(one: Found, num_machines: int, command: str) -> html.Div:
    """One machine: its headlines, or why there is no plan, as the command line says it.

    `command` gives the same on the command line. Of many machines the headlines stand in one table,
    not in cards here.
    """
    machine, answer = one.machine, one.answer
    parts: list[Any] = [html.H2(machine), html.P(_effort(one), id=f"effort-{machine}")]
    if isinstance(answer, TwinstreamError):
        parts.append(html.Div(f"error: {answer}", className="error", id=f"error-{machine}"))
    else:
        parts += map(html.P, _about(answer))
        if num_machines <= MOST_IN_CARDS:
            cards = [_card(name, *rest) for name, *rest in _cards(one, answer)]
            parts.append(html.Div(cards, className="cards"))
        parts += map(html.P, _notes(answer))
        link = f"/report{one.asked.url}&machine={machine}"
        parts.append(html.P(html.A("full report", href=link, target="_blank")))
    parts.append(html.Code(command))
    return html.Div(parts, className="machine")


def _about(answer: Answer) -> list[str]:
    """Say how the step is cut, or laid out."""
    if answer.layout is not None:
        return [answer.layout_text]
    return [workload_line(answer.schedule.workload), *_limited(answer)]


def _notes(answer: Answer) -> list[str]:
    """Return notes about the prediction."""
    if answer.layout is None:
        schedule, timeline = answer.schedule, answer.timeline
        return prediction_notes(schedule, answer.machine, timeline)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in answer.shares.items())
    return [f"Of the step: {shares}.", answer.uncertainty.sentence]


def page_of(answer: Answer) -> str:
    """The page of `twinstream report`."""
    return report_html(answer.schedule, answer.machine, predicted=answer.timeline)


def _limited(answer: Answer) -> list[str]:
    """Say of what memory the plan may take less than one without caps would."""
    caps, usual = answer.schedule.caps, caps_of(answer.machine, None, None)
    pairs = {
        "device": (caps.device_bytes, usual.device_bytes),
        "host": (caps.host_bytes, usual.host_bytes),
    }
    told = [
        f"{gib(cap)} of its {gib(takes)} of {name} memory"
        for name, (cap, takes) in pairs.items()
        if cap is not None and takes is not None and cap < takes
    ]
    return [f"Limited to {', '.join(told)}."] if told else []


def ranking_note(shown: Sequence[Found]) -> str | None:
    """Say what of the machines' order is not certain."""
    plans = [(one.machine, one.answer) for one in shown if isinstance(one.answer, Answer)]
    return order_note({machine: Speed(one.tokens_per_s, one.uncertainty) for machine, one in plans})


def _effort(one: Found) -> str:
    if one.is_being_refined:
        return "Quick plan; a better one is being looked for ..."
    return "Refined: the plan of normal effort." if one.is_refined else ""


def compared(shown: Sequence[Found]) -> list[html.Div]:
    """Draw throughputs of many machines as bars, beside all their headlines, the fastest on top."""
    plans = [(one, one.answer) for one in shown if isinstance(one.answer, Answer)]
    if len(shown) <= MOST_IN_CARDS or not plans:
        return []
    plans.sort(key=lambda plan: -plan[1].tokens_per_s)
    looks = {one.machine: series(number) for number, one in enumerate(shown)}
    figure = go.Figure(
        go.Bar(
            orientation="h", y=[one.machine for one, _ in plans],
            x=[answer.tokens_per_s for _, answer in plans],
            marker={"color": [looks[one.machine].colour for one, _ in plans]},
            hovertemplate="%{y}: %{x:,.0f} tokens/s<extra></extra>",
        )
    )  # fmt: skip
    figure.update_layout(
        height=70 + 28 * len(plans), yaxis={"autorange": "reversed"},
        xaxis={"title": {"text": "tokens/s"}, "tickformat": ",", "rangemode": "tozero"},
        margin={"l": 110, "r": 20, "t": 10, "b": 50},
    )  # fmt: skip
    names = [name for name, *_ in _cards(*plans[0])]
    rows = [
        [one.machine, *((value, identity) for _, value, _, identity in _cards(one, answer))]
        for one, answer in plans
    ]
    return [html.Div([graph(figure, "speeds"), _table(["", *names], rows, looks)],
                     className="beside")]  # fmt: skip


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], looks: Mapping[str, Series]
) -> html.Div:
    """Numbers by machine, each with its swatch; a cell is a text, or a text and its id."""

    def cell(content: str | tuple[str, str]) -> html.Td:
        if isinstance(content, str):
            return html.Td(content, className="number")
        return html.Td(content[0], className="number", id=content[1])

    def name_of(machine: str) -> html.Td:
        swatch = html.Span(className="swatch", style={"background": looks[machine].colour})
        return html.Td([swatch, machine])

    head = [html.Th(columns[0]), *(html.Th(name, className="number") for name in columns[1:])]
    body = [html.Tr([name_of(row[0]), *map(cell, row[1:])]) for row in rows]
    return html.Div(html.Table([html.Thead(html.Tr(head)), html.Tbody(body)]), className="table")


def _cards(one: Found, answer: Answer) -> list[tuple[str, str, str, str]]:
    """Name, value, what it means, and id of each headline."""
    machine = one.machine
    limits = ", ".join(readable(limit) for limit in answer.limits)
    gap = "-" if answer.gap is None else f"{answer.gap:.1%}"
    mfu, redone = f"{answer.mfu:.1%}", ""
    if answer.layout is None:
        mfu += f", {answer.summary.hfu:.1%}"
        redone = f"{answer.summary.recompute_fraction:.1%} of FLOPs redone"
    device, host = answer.room_bytes
    return [
        ("throughput, tokens/s", f"{rate_text(answer.tokens_per_s)} {answer.uncertainty.short}",
         f"{seconds(answer.step_s)} a step", f"speed-{machine}"),
        *_money(one, answer),
        ("MFU, HFU", mfu, "of the peak", f"mfu-{machine}"),
        ("above the bound", gap, f"limited by {limits or '-'}", f"gap-{machine}"),
        ("compute waits", f"{answer.compute_waits:.1%}", redone, f"idle-{machine}"),
        ("device memory", gib(answer.device_bytes), _cap(device), f"device-{machine}"),
        ("host memory", gib(answer.host_bytes), _cap(host), f"host-{machine}"),
    ]  # fmt: skip


def _money(one: Found, answer: Answer) -> list[tuple[str, str, str, str]]:
    """Return what a billion tokens cost where prices are given; a dash where none is of it."""
    if not one.asked.price.strip():
        return []
    title, identity = "money a billion tokens", f"money-{one.machine}"
    price = one.asked.price_at(answer.place_names)
    if price is None:
        return [(title, "-", "no price is of this machine", identity)]
    run_s = _BILLION / answer.tokens_per_s
    bill = bill_of(run_s, answer.num_gpus, Prices(price_per_gpu_hour=price))
    assert bill.money is not None
    shown = range_text(bill.money, answer.uncertainty.symmetric, money_text)
    return [(title, shown, f"at {price:,.2f} a GPU-hour", identity)]


def _cap(cap_bytes: int | None) -> str:
    return "no cap" if cap_bytes is None else f"cap {gib(cap_bytes)}"


def _card(name: str, value: str, note: str, identity: str) -> html.Div:
    return html.Div(
        [
            html.Div(name, className="name"),
            html.Div(_value(value, identity), className="value"),
            html.Div(note, className="note"),
        ],
        className="card",
    )


def _value(value: str, identity: str) -> list[html.Span]:
    number, error = split_error(value)
    beside = [html.Span(f" {error}", className="beside-number")] if error else []
    return [html.Span(number, id=identity), *beside]


def timeline_of(machine: str, answer: Answer) -> html.Div:
    """Streams, memory and links of a middle round; of a layout the lanes of its ranks."""
    schedule, profile, timeline = answer.schedule, answer.machine, answer.timeline
    if not schedule.is_one_device:
        lanes = RanksPart(schedule, timeline, profile, None).figures()
        figures = [graph(one, f"timeline-{machine}") for one in lanes]
        return html.Div([html.H2(f"{machine}: {answer.layout_text}"), *figures])
    view = view_of("predicted", schedule, timeline)
    rounds = schedule.workload.rounds_per_step
    number = rounds // 2
    window = shrunk([view], view.round_span(number))
    figure = timeline_figure([Shown(view, window, op_bars(view, window))], profile)
    title = f"{machine}: {round_name(number, rounds)}"
    if window != view.round_span(number):
        title += f", {seconds(window.lasting_ns / 1e9)} around its loss"
    return html.Div([html.H2(title), graph(figure, f"timeline-{machine}")])


def more_of(answers: Mapping[str, Answer]) -> html.Div:
    """Draw what 10 % more of each cap and link would bring, by the prices of the lower bound."""
    gains = {
        machine: _gains(answer) for machine, answer in answers.items() if answer.layout is None
    }
    if not gains:
        return html.Div()
    worth = (name for found in gains.values() for name, gain in found.items() if gain > _WORTH)
    names = list(dict.fromkeys(worth))
    looks = {machine: series(number) for number, machine in enumerate(gains)}
    parts: list[Any] = [
        html.H2("What if there were 10 % more?"),
        html.P("By the lower bound's prices of memories and links, to first order. `twinstream "
               "whatif` plans every change again, a faster GPU among them."),
    ]  # fmt: skip
    if not names:
        parts.append(html.P("No memory and no link would help alone: compute limits the step."))
    elif len(gains) == 1:
        parts.append(graph(_more_figure(gains, names, looks), "more"))
    else:
        rows = [
            [machine, *(f"{found.get(name, 0.0):+.1%}" for name in names)]
            for machine, found in gains.items()
        ]
        table = _table(["", *names], rows, looks)
        parts.append(html.Div([graph(_more_figure(gains, names, looks), "more"), table],
                              className="beside"))  # fmt: skip
    return html.Div(parts)


def _more_figure(
    gains: Mapping[str, Mapping[str, float]], names: Sequence[str], looks: Mapping[str, Series]
) -> go.Figure:
    """Bars by machine in the colours of the table beside, which is the legend."""
    figure = go.Figure()
    for machine, found in gains.items():
        look = looks[machine]
        figure.add_trace(
            go.Bar(
                orientation="h", y=names, x=[100 * found.get(name, 0.0) for name in names],
                name=machine,
                marker={"color": look.colour, "pattern": {"shape": look.pattern}},
                hovertemplate="10 % more %{y}: %{x:+.2f} % tokens/s<extra>" + machine + "</extra>",
            )
        )  # fmt: skip
    figure.update_layout(
        barmode="group", height=80 + len(names) * max(26, 14 * len(gains)), showlegend=False,
        xaxis={"title": {"text": "more tokens/s, %"}, "rangemode": "tozero"},
        yaxis={"autorange": "reversed"},
        margin={"l": 130, "r": 30, "t": 10, "b": 45},
    )  # fmt: skip
    return figure


def _gains(answer: Answer) -> dict[str, float]:
    """Relative gain of tokens/s for 10 % more of each thing that has a price."""
    schedule = answer.schedule
    bound, caps = schedule.bound, schedule.caps
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
    return {name: max(0.0, _MORE * saved / answer.step_s) for name, saved in saved_s.items()}
