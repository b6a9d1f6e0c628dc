"""What-ifs as tables of the terminal, and as a page with a tornado chart."""

from collections.abc import Sequence

import plotly.graph_objects as go
from rich import box
from rich.console import Group

from twinstream.measures.metrics import rate_text
from twinstream.planner.request import PlanRequest
from twinstream.report.page import Card, Page, Section, Table, html_of
from twinstream.report.palette import lighter
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.tables import seconds, speed_text
from twinstream.whatif.sensitivity import Change, Sensitivity, WhatIf
from twinstream.whatif.target import TargetFound

LESS_COLOUR, MORE_COLOUR = "#D55E00", "#0072B2"


def what_if_screen(found: WhatIf, request: PlanRequest) -> Group:
    """A row per property, those with the largest effect first."""
    base, uncertainty = found.base, found.uncertainty
    return Group(
        f"{request.spec.name} on {request.machine.name}, policy {found.policy}, "
        f"{found.tokens_per_step:,} tokens a step: {speed_text(base, uncertainty)} "
        f"({seconds(base.step_time_s)} a step)",
        "", "Tokens/s when a property changes and the step is planned again",
        sensitivities_table(found),
        "The price: what one more unit (10 % more) would bring by the lower bound, to first order.",
        uncertainty.sentence,
    )  # fmt: skip


def sensitivities_table(found: WhatIf) -> FittedTable:
    """What each change of each property brings, and the property's price."""
    changes = [change.change for change in found.sensitivities[0].changes]
    table = FittedTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("now", *(f"{change:+.0%}" for change in changes), "price, tokens/s", "10 % of it"):
        table.add_column(name, justify="right")
    for one in found.sensitivities:
        table.add_row(*_row(one, found.base.tokens_per_s))
    return table


def _row(one: Sensitivity, base_tokens_per_s: float) -> tuple[str, ...]:
    price = one.price_tokens_per_s
    unit = one.unit.partition(" ")[0]
    return (
        one.name,
        f"{one.value:,.4g} {unit}",
        *(_gain(change, base_tokens_per_s) for change in one.changes),
        "-" if price is None else f"{price:+,.2f} per {unit}",
        "-" if price is None else f"{0.1 * one.value * price / base_tokens_per_s:+.1%}",
    )


def _gain(change: Change, base_tokens_per_s: float) -> str:
    if change.tokens_per_s is None:
        return "no plan"
    return f"{change.tokens_per_s / base_tokens_per_s - 1:+z.1%}"


def target_screen(found: TargetFound, request: PlanRequest) -> Group:
    """A row per property: the smallest value that reaches the target."""
    table = FittedTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, side in (("", "left"), ("now", "right"), ("needs", "right"), ("tokens/s", "right")):
        table.add_column(name, justify="right" if side == "right" else "left")
    for one in found.found:
        needs = f"{one.value:,.4g} {one.unit}" if one.value is not None else "not by this alone"
        if one.less_may_do:
            needs = f"at most {needs}"
        at = "" if one.value is not None else f" at {one.tried:,.4g} {one.unit}"
        reached = rate_text(one.tokens_per_s) + at
        table.add_row(one.name, f"{one.now:,.4g} {one.unit}", needs, reached)
    notes = []
    if request.with_effort("quick") != request:
        notes.append(
            f"Searched with quick effort, confirmed with {request.choices.effort}: a little less "
            "may do. --effort quick only searches."
        )
    if any(one.less_may_do for one in found.found):
        notes.append("At most: all less that was tried reaches it, too.")
    uncertainty = found.uncertainty
    share = found.target_tokens_per_s / found.compute_limit_tokens_per_s
    return Group(
        f"{request.spec.name} on {request.machine.name}, policy {request.policy}: now "
        f"{speed_text(found.base, uncertainty)}; the target is "
        f"{rate_text(found.target_tokens_per_s)}, {share:.1%} of what",
        "compute could do if it never waited and nothing were recomputed "
        f"({rate_text(found.compute_limit_tokens_per_s)} tokens/s).",
        "", "The smallest value that reaches it, everything else as it is (within 2 %)", table,
        *notes, uncertainty.sentence,
    )  # fmt: skip


def tornado_figure(found: WhatIf) -> go.Figure:
    """Change of tokens/s for the largest change either way, the largest effect on top."""
    names = [one.name for one in found.sensitivities][::-1]
    base = found.base.tokens_per_s
    figure = go.Figure()
    changes = [change.change for change in found.sensitivities[0].changes]
    for change in sorted(changes, key=lambda c: -abs(c)):
        percent, texts = [], []
        for one in found.sensitivities[::-1]:
            answer = next(c for c in one.changes if c.change == change)
            speed = answer.tokens_per_s or 0.0
            percent.append(100 * (speed / base - 1))
            said = "does not fit" if answer.tokens_per_s is None else f"{rate_text(speed)} tokens/s"
            value = f"{one.value * (1 + change):,.4g} {one.unit}"
            texts.append(f"<b>{one.name} {change:+.0%}</b>: {value}<br>{said}")
        figure.add_trace(
            go.Bar(
                orientation="h", y=names, x=percent, name=f"{change:+.0%}",
                legendrank=1000 + round(100 * change),
                marker={"color": _shade(change, changes)},
                width=0.8 - 0.4 * (1 - _rank(change, changes)),
                hovertext=texts, hoverinfo="text",
            )
        )  # fmt: skip
    figure.update_layout(
        barmode="overlay", height=120 + 34 * len(names),
        xaxis={"title": {"text": f"change of tokens/s, % of {base:,.0f}"}, "zeroline": True},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "traceorder": "normal"},
        margin={"l": 130, "r": 40, "t": 50, "b": 50},
    )  # fmt: skip
    return figure


def _shade(change: float, changes: Sequence[float]) -> str:
    """The colour of a change's bars and of its swatch: the larger the change, the lighter."""
    colour = MORE_COLOUR if change > 0 else LESS_COLOUR
    return lighter(colour, 0.6 * _rank(change, changes))


def _rank(change: float, changes: Sequence[float]) -> float:
    """0 for the smallest change of its sign, 1 for the largest; small ones are drawn on top."""
    sizes = sorted(abs(other) for other in changes if (other > 0) == (change > 0))
    return sizes.index(abs(change)) / max(1, len(sizes) - 1) if len(sizes) > 1 else 0.0


def _most_gain(found: WhatIf) -> Card:
    speeds = [
        (change.tokens_per_s or 0.0, one.name, change.change)
        for one in found.sensitivities
        for change in one.changes
    ]
    speed, name, change = max(speeds)
    gain = speed / found.base.tokens_per_s - 1
    told = f"{gain:+.1%}, {rate_text(speed)} tokens/s"
    return Card("largest gain", f"{name} {change:+.0%}", told)


def what_if_html(found: WhatIf, request: PlanRequest) -> str:
    """The tornado chart and the table as one page."""
    base, uncertainty = found.base, found.uncertainty
    rows = [_row(one, base.tokens_per_s) for one in found.sensitivities]
    changes = [f"{change.change:+.0%}" for change in found.sensitivities[0].changes]
    columns = ["property", "now", *changes, "price, tokens/s", "10 % of it"]
    return html_of(
        Page(
            f"What if: {request.spec.name} on {request.machine.name}",
            f"{found.tokens_per_step:,} tokens a step, policy {found.policy}; every change is "
            "planned again.",
            [
                Card("throughput, tokens/s", rate_text(base.tokens_per_s),
                     f"{uncertainty.short}, as it is"),
                Card("MFU", f"{base.mfu:.1%}"),
                _most_gain(found),
            ],
            [
                Section("What throughput hangs on", "A bar to -100 % does not fit at all.",
                        tornado_figure(found)),
                Section(
                    "In numbers",
                    "The price is what one more unit would bring by the lower bound, to first "
                    "order; beside it that of 10 % more.",
                    Table(columns, rows),
                ),
            ],
            "Made by twinstream whatif. Figures are predictions of the simulator. "
            + uncertainty.sentence,
        )
    )  # fmt: skip
