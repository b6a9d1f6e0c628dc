"""What-ifs of a cluster as a table of the terminal, and as a page with bars."""

import plotly.graph_objects as go
from rich import box
from rich.console import Group
from rich.table import Table as RichTable

from twinstream.report.page import Card, Page, Section, Table, html_of
from twinstream.report.palette import series
from twinstream.schedule.sizes import gib
from twinstream.screens.layout_screen import money_text
from twinstream.whatif.clusters.answers import ClusterAnswer, ClusterWhatIf, LaidOut, gain
from twinstream.whatif.clusters.target import ClusterTarget

_LAYOUT = "layout then"
_LEFT = ("", _LAYOUT)
_SAME = "as it was"


def cluster_screen(found: ClusterWhatIf, num_tokens: float | None) -> Group:
    """A row for each change, those that gain most first; then why a layout cannot be.

    Args:
        num_tokens: of the run; None: money is of a billion.
    """
    table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    rows = [_row(one, found, num_tokens) for one in found.answers]
    for name in rows[0]:
        table.add_column(name, justify="left" if name in _LEFT else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    told = "Step and change of tokens/s with a change"
    return Group(_head(found), _base(found.base), "", told, table, *_notes(found, num_tokens))


def _head(found: ClusterWhatIf | ClusterTarget) -> str:
    return (
        f"{found.model} on {found.num_gpus:,} GPUs of {found.cluster}, {found.tokens_per_step:,} "
        "tokens a step"
    )


def _base(base: LaidOut) -> str:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in base.shares.items())
    money = "" if base.bill is None or base.bill.money is None else money_text(base.bill.money)
    return (
        f"now {base.told}: {base.step_s:.4g} s, {base.tokens_per_s:,.0f} tokens/s, MFU "
        f"{base.mfu:.1%}, {gib(base.memory_bytes)} ({shares})"
        + (f"; money {money}" if money else "")
    )


def _notes(found: ClusterWhatIf, num_tokens: float | None) -> list[str]:
    notes = []
    for one in found.answers:
        if one.kept is None:
            notes.append(f"{one.name}, layout kept: {one.kept_reason}.")
        if one.anew is None:
            notes.append(f"{one.name}: {one.reason}.")
    if _has_money(found):
        tokens = "a billion tokens" if num_tokens is None else f"{num_tokens:.4g} tokens"
        notes.append(
            f"Money of {tokens} at the given price of a GPU-hour; a change is worth a price that "
            "is higher by what tokens/s of a GPU gain."
        )
    return notes


def _has_money(found: ClusterWhatIf) -> bool:
    bills = [one.anew.bill for one in found.answers if one.anew is not None]
    return any(bill is not None and bill.money is not None for bill in bills)


def _row(one: ClusterAnswer, found: ClusterWhatIf, num_tokens: float | None) -> dict[str, str]:
    """By the columns' names; the same ones for every answer."""
    base, anew = found.base, one.anew
    told = "-" if anew is None else _SAME if anew.layout == base.layout else anew.told
    cells = {"": one.name} | ({"from, to": f"{one.now} to {one.then}"} if one.now else {})
    cells |= {"kept": _speed(one.kept, base), "searched anew": _speed(anew, base), _LAYOUT: told}
    bill = None if anew is None else anew.bill
    if num_tokens is not None:
        cells["days"] = "-" if bill is None else f"{bill.wall_days:,.4g}"
    if _has_money(found):
        cells["money"] = "-" if bill is None or bill.money is None else money_text(bill.money)
    return cells


def _speed(one: LaidOut | None, base: LaidOut) -> str:
    return "none" if one is None else f"{one.step_s:.4g} s {gain(one, base):+z.1%}"


def cluster_target_screen(found: ClusterTarget) -> Group:
    """A row for each property: the smallest value that reaches the target, and the layout then."""
    table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "now", "needs", "tokens/s", _LAYOUT):
        table.add_column(name, justify="left" if name in _LEFT else "right", overflow="fold")
    for one in found.found:
        needs = "not by this alone" if one.value is None else f"{one.value:,.4g} {one.unit}"
        at = f" at {one.tried:,.4g} {one.unit}" if one.value is None else ""
        table.add_row(
            one.name, f"{one.now:,.4g} {one.unit}", "at most " * one.less_may_do + needs,
            f"{one.tokens_per_s:,.0f}{at}".strip(), one.told,
        )  # fmt: skip
    share = found.target_tokens_per_s / found.compute_limit_tokens_per_s
    told = (
        f"The target is {found.target_tokens_per_s:,.0f} tokens/s, {share:.1%} of what this layout "
        "would do if compute never waited. The smallest value that reaches it, everything else as "
        "it is (within 2 %; GPUs doubled or halved)"
    )
    return Group(_head(found), _base(found.base), "", told, table)


def bars_figure(found: ClusterWhatIf) -> go.Figure:
    """Change of tokens/s with the layout kept and searched anew, the largest gain on top."""
    figure = go.Figure()
    rows = found.answers[::-1]
    for number, (name, side) in enumerate((("layout kept", "kept"), ("searched anew", "anew"))):
        laid_out = [getattr(one, side) for one in rows]
        figure.add_trace(
            go.Bar(
                orientation="h", y=[one.name for one in rows], name=name,
                x=[100 * gain(one, found.base) for one in laid_out],
                marker={"color": series(number).colour},
                hovertext=["no layout" if one is None else f"{one.told}: {one.step_s:.4g} s"
                           for one in laid_out],
                hoverinfo="text",
            )
        )  # fmt: skip
    figure.update_layout(
        barmode="group", height=140 + 48 * len(rows),
        xaxis={"title": {"text": f"change of tokens/s, % of {found.base.tokens_per_s:,.0f}"}},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"},
        margin={"l": 160, "r": 40, "t": 50, "b": 50},
    )  # fmt: skip
    return figure


def cluster_html(found: ClusterWhatIf, num_tokens: float | None) -> str:
    """The bars and the table as one page."""
    base, best = found.base, found.answers[0]
    rows = [_row(one, found, num_tokens) for one in found.answers]
    table = Table(list(rows[0]), [list(row.values()) for row in rows])
    notes = " ".join(_notes(found, num_tokens))
    return html_of(
        Page(
            f"What if: {_head(found)}",
            f"Now {base.told}, {found.gap:.1%} above the least bound of all layouts.",
            [
                Card("throughput, tokens/s", f"{base.tokens_per_s:,.0f}", f"{base.step_s:.4g} s"),
                Card("MFU", f"{base.mfu:.1%}"),
                Card("largest gain", best.name, f"{gain(best.anew, base):+z.1%}"),
            ],
            [
                Section("What throughput hangs on", "A bar to -100 % has no layout.",
                        bars_figure(found)),
                Section("In numbers", notes, table),
            ],
            "Made by twinstream whatif. Figures are predictions of the simulator.",
        )
    )  # fmt: skip
