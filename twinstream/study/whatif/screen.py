"""What-ifs as tables of the terminal, and as a page with a chart."""

from collections.abc import Sequence

import plotly.graph_objects as go
from rich import box
from rich.console import Group, RenderableType

from twinstream.measures.metrics import rate_text
from twinstream.report.page import Card, Page, Section, Table, html_of
from twinstream.report.palette import lighter, series
from twinstream.schedule.sizes import gib
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.layout_screen import money_text
from twinstream.screens.tables import seconds
from twinstream.study.answer import Step
from twinstream.study.whatif.target import TargetFound
from twinstream.study.whatif.whatif import ChangedStep, Gain, Sensitivity, WhatIf, gain

LESS_COLOUR, MORE_COLOUR = "#D55E00", "#0072B2"
_LAYOUT = "layout then"
_LEFT = ("", _LAYOUT)
_PRICE_NOTE = (
    "The price: what one more unit (10 % more) would bring by the lower bound, to first order."
)


def what_if_screen(found: WhatIf, num_tokens: float | None = None) -> Group:
    """A row for each property, or where layouts or written changes are asked about, each change.

    Args:
        num_tokens: of the run; None: money is of a billion.
    """
    parts: list[RenderableType] = [*_heading(found), ""]
    if _is_matrix(found):
        parts += ["Tokens/s when a property changes and the step is planned again",
                  sensitivities_table(found), _PRICE_NOTE]  # fmt: skip
    else:
        parts += ["Step and change of tokens/s with a change", _changes_table(found, num_tokens)]
    return Group(*parts, *_notes(found, num_tokens), found.uncertainty.sentence)


def _is_matrix(found: WhatIf) -> bool:
    """Whether plans of one device were changed by shares, which a table has in its columns."""
    return bool(found.sensitivities) and found.base.layout is None


def _heading(found: WhatIf | TargetFound) -> list[str]:
    base, error = found.base, found.uncertainty
    shares = ", ".join(f"{name} {share:.0%}" for name, share in base.shares.items())
    bill = base.bill
    money = "" if bill is None or bill.money is None else f"; money {money_text(bill.money)}"
    return [
        f"{found.title}, {found.tokens_per_step:,} tokens a step",
        f"now {f'{base.layout_text}: ' if base.layout_text else ''}{seconds(base.step_s)}, "
        f"{rate_text(base.tokens_per_s)} tokens/s ({error.short}), MFU "
        f"{base.mfu:.1%}, {gib(base.memory_bytes)}{f' ({shares})' if shares else ''}{money}",
    ]


def sensitivities_table(found: WhatIf) -> FittedTable:
    """What each change of each property brings, and the property's price."""
    table = FittedTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    head, *rows = _sensitivity_rows(found)
    table.add_column("")
    for name in head[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _sensitivity_rows(found: WhatIf) -> list[tuple[str, ...]]:
    """The heads, and a row for each property."""
    changes = [change.change for change in found.sensitivities[0].changes]
    heads = ("now", *(f"{change:+.0%}" for change in changes), "price, tokens/s", "10 % of it")
    return [("", *heads), *(_row(one, found.base.tokens_per_s) for one in found.sensitivities)]


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


def _gain(change: Gain, base_tokens_per_s: float) -> str:
    if change.tokens_per_s is None:
        return "no plan"
    return f"{change.tokens_per_s / base_tokens_per_s - 1:+z.1%}"


def _changes_table(found: WhatIf, num_tokens: float | None) -> FittedTable:
    table = FittedTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    rows = [_change_row(one, found, num_tokens) for one in found.answers]
    for name in rows[0]:
        table.add_column(name, justify="left" if name in _LEFT else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def _change_row(one: ChangedStep, found: WhatIf, num_tokens: float | None) -> dict[str, str]:
    """By the columns' names; the same ones for every answer."""
    base, anew = found.base, one.anew
    cells = {"": one.name} | ({"from, to": f"{one.now} to {one.then}"} if one.now else {})
    cells |= {"kept": _speed(one.kept, base), "searched anew": _speed(anew, base)}
    if base.layout is not None:
        same = anew is not None and anew.layout == base.layout
        cells[_LAYOUT] = "-" if anew is None else "as it was" if same else anew.layout_text
    bill = None if anew is None else anew.bill
    if num_tokens is not None:
        cells["days"] = "-" if bill is None else f"{bill.wall_days:,.4g}"
    if _has_money(found):
        cells["money"] = "-" if bill is None or bill.money is None else money_text(bill.money)
    return cells


def _speed(one: Step | None, base: Step) -> str:
    return "none" if one is None else f"{seconds(one.step_s)} {gain(one, base):+z.1%}"


def _has_money(found: WhatIf) -> bool:
    bills = [one.anew.bill for one in found.answers if one.anew is not None]
    return any(bill is not None and bill.money is not None for bill in bills)


def _notes(found: WhatIf, num_tokens: float | None) -> list[str]:
    """Why a change leaves no plan or layout, and what money is of."""
    notes = []
    for one in () if _is_matrix(found) else found.answers:
        if one.kept is None:
            kept = "plan" if found.base.layout is None else "layout"
            notes.append(f"{one.name}, {kept} kept: {one.kept_reason}.")
        if one.anew is None:
            notes.append(f"{one.name}: {one.reason}.")
    if _has_money(found):
        tokens = "a billion tokens" if num_tokens is None else f"{num_tokens:.4g} tokens"
        notes.append(
            f"Money of {tokens} at the given price of a GPU-hour; a change is worth a price that "
            "is higher by what tokens/s of a GPU gain."
        )
    return notes


def target_screen(found: TargetFound) -> Group:
    """A row for each property: the smallest value that reaches the target."""
    table = FittedTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    layouts = [_LAYOUT] if found.base.layout is not None else []
    for name in ("", "now", "needs", "tokens/s", *layouts):
        table.add_column(
            name, justify="left" if name in _LEFT else "right",
            overflow="fold" if name == _LAYOUT else "ellipsis",
        )  # fmt: skip
    for one in found.found:
        needs = f"{one.value:,.4g} {one.unit}" if one.value is not None else "not by this alone"
        at = "" if one.value is not None else f" at {one.tried:,.4g} {one.unit}"
        table.add_row(
            one.name, f"{one.now:,.4g} {one.unit}", "at most " * one.less_may_do + needs,
            (rate_text(one.tokens_per_s) + at).strip(), *([one.layout_text] if layouts else []),
        )  # fmt: skip
    notes = []
    if found.is_confirmed:
        notes.append(
            "Searched with quick effort, confirmed with the effort asked for: a little less may "
            "do. --effort quick only searches."
        )
    if any(one.less_may_do for one in found.found):
        notes.append("At most: all less that was tried reaches it, too.")
    target, limit = found.target_tokens_per_s, found.compute_limit_tokens_per_s
    return Group(
        *_heading(found),
        f"The target is {rate_text(target)} tokens/s, {target / limit:.1%} of what compute could "
        f"do if it never waited and nothing were recomputed ({rate_text(limit)} tokens/s).",
        "",
        "The smallest value that reaches it, everything else as it is (within 2 %; GPUs doubled or "
        "halved)" if layouts else
        "The smallest value that reaches it, everything else as it is (within 2 %)",
        table, *notes, found.uncertainty.sentence,
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
    _lay_out(figure, base, "overlay", 120 + 34 * len(names), 130)
    figure.update_layout(legend={"traceorder": "normal"})
    return figure


def bars_figure(found: WhatIf) -> go.Figure:
    """Change of tokens/s with the plan kept and searched anew, the largest gain on top."""
    figure = go.Figure()
    rows = found.answers[::-1]
    kept = "plan kept" if found.base.layout is None else "layout kept"
    for number, (name, side) in enumerate(((kept, "kept"), ("searched anew", "anew"))):
        steps: list[Step | None] = [getattr(one, side) for one in rows]
        figure.add_trace(
            go.Bar(
                orientation="h", y=[one.name for one in rows], name=name,
                x=[100 * gain(one, found.base) for one in steps],
                marker={"color": series(number).colour},
                hovertext=["does not fit" if one is None
                           else f"{one.layout_text} {seconds(one.step_s)}".strip()
                           for one in steps],
                hoverinfo="text",
            )
        )  # fmt: skip
    _lay_out(figure, found.base.tokens_per_s, "group", 140 + 48 * len(rows), 160)
    return figure


def _lay_out(
    figure: go.Figure, base_tokens_per_s: float, mode: str, height: int, left: int
) -> None:
    title = f"change of tokens/s, % of {base_tokens_per_s:,.0f}"
    figure.update_layout(
        barmode=mode, height=height, xaxis={"title": {"text": title}, "zeroline": True},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"},
        margin={"l": left, "r": 40, "t": 50, "b": 50},
    )  # fmt: skip


def _shade(change: float, changes: Sequence[float]) -> str:
    """The colour of a change's bars and of its swatch: the larger the change, the lighter."""
    colour = MORE_COLOUR if change > 0 else LESS_COLOUR
    return lighter(colour, 0.6 * _rank(change, changes))


def _rank(change: float, changes: Sequence[float]) -> float:
    """0 for the smallest change of its sign, 1 for the largest; small ones are drawn on top."""
    sizes = sorted(abs(other) for other in changes if (other > 0) == (change > 0))
    return sizes.index(abs(change)) / max(1, len(sizes) - 1) if len(sizes) > 1 else 0.0


def what_if_html(found: WhatIf, num_tokens: float | None = None) -> str:
    """The chart and the table as one page."""
    base, best, error = found.base, found.answers[0], found.uncertainty
    if _is_matrix(found):
        (_, *heads), *lines = _sensitivity_rows(found)
        figure, table = tornado_figure(found), Table(["property", *heads], lines)
    else:
        rows = [_change_row(one, found, num_tokens) for one in found.answers]
        figure = bars_figure(found)
        table = Table(list(rows[0]), [list(row.values()) for row in rows])
    notes = [_PRICE_NOTE] if _is_matrix(found) else []
    heading, now = _heading(found)
    gap = "" if found.gap is None else f", {found.gap:.1%} above the lower bound"
    best_speed = 0.0 if best.anew is None else best.anew.tokens_per_s
    cards = [
        Card("throughput, tokens/s", rate_text(base.tokens_per_s),
             f"{error.short}, as it is"),
        Card("MFU", f"{base.mfu:.1%}"),
        Card("largest gain", best.name,
             f"{gain(best.anew, base):+z.1%}, {rate_text(best_speed)} tokens/s"),
    ]  # fmt: skip
    return html_of(
        Page(
            f"What if: {heading}",
            f"{now[0].upper()}{now[1:]}{gap}; every change is planned again.",
            cards,
            [
                Section("What throughput hangs on", "A bar to -100 % does not fit at all.", figure),
                Section("In numbers", " ".join([*notes, *_notes(found, num_tokens)]), table),
            ],
            " ".join(["Made by twinstream whatif. Figures are predictions of the simulator.",
                      error.sentence]),
        )
    )  # fmt: skip
