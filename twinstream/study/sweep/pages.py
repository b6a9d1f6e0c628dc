"""A sweep as an HTML page: heatmaps, budget curves, and what it took."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

import numpy as np
import plotly.graph_objects as go

from twinstream.report.page import Card, Page, Section, Table, html_of
from twinstream.report.palette import series
from twinstream.schedule.sizes import gib
from twinstream.screens.tables import readable
from twinstream.study.sweep.cells import BUG, INFEASIBLE, OK
from twinstream.study.sweep.config import SweepConfig
from twinstream.study.sweep.fronts import front_figure, fronts
from twinstream.study.sweep.grids import (
    Curves,
    Grid,
    Metric,
    axis_name,
    curves,
    grids,
    label,
    metrics_of,
)
from twinstream.study.sweep.rows import error_text, errors_note, is_certain, ranking_note

_MOST_LABELLED = 150
_NUM_BEST = 10


def sweep_html(config: SweepConfig, rows: Sequence[Mapping[str, str]]) -> str:
    """One self-contained page of a sweep's rows."""
    done = [row for row in rows if row["status"] == OK]
    errors, ranking = errors_note(done), ranking_note(done)
    sections = [_curves_section(one, errors) for one in curves(config, rows)] if done else []
    for grid in grids(config, rows) if done else ():
        sections += _grid_sections(grid, errors)
    sections += _front_sections(config, done)
    failed = [row for row in rows if row["status"] != OK]
    if done:
        sections.append(
            Section(f"The fastest {min(_NUM_BEST, len(done))}",
                    f"All rows are in rows.csv. {errors} {ranking}".strip(), _best(config, done))
        )  # fmt: skip
    elif failed:
        sections.append(
            Section("No cell could be planned", f"Of {len(failed):,} rows in rows.csv the first.",
                    _why(config, failed[:_NUM_BEST]))
        )  # fmt: skip
    fixed = ", ".join(f"{axis_name(n)} {label(n, v)}" for n, v in config.fixed.items())
    axes = ", ".join(f"{len(v)} of {axis_name(n)}" for n, v in config.axes.items())
    return html_of(
        Page("Sweep", f"{fixed}. Swept: {axes}.", _cards(rows, done), sections,
             "Made by twinstream sweep. Figures are predictions of the simulator.")
    )  # fmt: skip


def _titled(what: str, rest: str) -> str:
    return f"{what}: {rest}" if rest else what


def _curves_section(one: Curves, errors: str) -> Section:
    title = _titled(f"Throughput over {one.x_name.partition(',')[0]}", one.title)
    if not one.any:
        return Section(title, "Nothing fits here.", None)
    return Section(title, f"A line ends where nothing fits. {errors}", curves_figure(one))


def _grid_sections(grid: Grid, errors: str) -> list[Section]:
    """A heading, and a heatmap for every metric, two in a row where the page is wide."""
    title = _titled(f"{grid.x_name.capitalize()} x {grid.y_name}", grid.title)
    if not grid.any:
        return [Section(title, "Nothing fits here.", None)]
    head = Section(title, f"Crossed cells have no plan; hover says why. {errors}", None)
    return [head, *(Section(m.name, "", heatmap_figure(grid, m), half=True) for m in grid.metrics)]


def _front_sections(config: SweepConfig, done: Sequence[Mapping[str, str]]) -> list[Section]:
    """Which cells are worth their money, memory or GPUs."""
    found = fronts(done, [_cell_text(config, row) for row in done])
    if not found:
        return []
    told = "On the line is what nothing beats: whatever costs no more is slower."
    sections = [Section(f"Speed for {one.cost.name}", "", front_figure(one), half=True)
                for one in found]  # fmt: skip
    return [Section("What speed is worth", told, None), *sections]


def _cell_text(config: SweepConfig, row: Mapping[str, str]) -> str:
    """The values of a row that are swept."""
    shown_as = {(n, str(v)): label(n, v) for n, values in config.axes.items() for v in values}
    return ", ".join(f"{axis_name(name)} {shown_as[name, row[name]]}" for name in config.axes)


def heatmap_figure(grid: Grid, metric: Metric) -> go.Figure:
    """A metric over the grid, with a cross where there is no plan."""
    reasons = np.array([["<br>".join(wrap(r, 70)) for r in line] for line in grid.reasons])
    levels = grid.levels[metric.column]
    few = levels.size <= _MOST_LABELLED
    figure = go.Figure(
        go.Heatmap(
            z=levels, x=grid.x_labels, y=grid.y_labels, colorscale="Viridis", xgap=1, ygap=1,
            texttemplate="%{z:" + metric.form + "}" if few else None, textfont={"size": 10},
            colorbar={"thickness": 10, "tickfont": {"size": 10}, "tickformat": ","},
            hovertemplate=f"{grid.x_name} %{{x}}<br>{grid.y_name} %{{y}}<br>"
            f"{metric.name} %{{z:{metric.form}}}<extra></extra>",
            hoverongaps=False,
        )
    )  # fmt: skip
    figure.add_trace(_gaps(grid, levels, reasons))
    figure.update_xaxes(type="category", showgrid=False, title_text=grid.x_name)
    figure.update_yaxes(type="category", showgrid=False, title_text=grid.y_name)
    figure.update_layout(
        height=80 + max(200, 26 * len(grid.y_labels)), showlegend=False,
        margin={"l": 90, "r": 20, "t": 10, "b": 60},
    )  # fmt: skip
    return figure


def _gaps(grid: Grid, levels: np.ndarray[Any, Any], reasons: np.ndarray[Any, Any]) -> go.Scatter:
    """A small cross in every cell without a plan, which says why."""
    ys, xs = np.nonzero(np.isnan(levels))
    return go.Scatter(
        x=[grid.x_labels[x] for x in xs], y=[grid.y_labels[y] for y in ys], mode="markers",
        marker={"symbol": "x-thin-open", "size": 6, "color": "#8C8C8C", "line": {"width": 1}},
        text=[str(reasons[y, x]) for y, x in zip(ys, xs, strict=True)],
        hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip


def curves_figure(one: Curves) -> go.Figure:
    """Tokens/s over the first axis, from zero, so that heights compare."""
    figure = go.Figure()
    for number, (name, levels) in enumerate(one.lines.items()):
        look = series(number)
        figure.add_trace(
            go.Scatter(
                x=one.positions, y=levels, mode="lines+markers", name=name,
                marker={"size": 7, "symbol": look.symbol},
                line={"color": look.colour, "width": 2, "dash": look.dash},
                hovertemplate=f"{name}<br>%{{x:,.6~g}}: %{{y:,.0f}} tokens/s<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(
        height=420, xaxis={"title": {"text": one.x_name}}, showlegend=len(one.lines) > 1,
        yaxis={"title": {"text": "tokens/s"}, "rangemode": "tozero", "tickformat": ","},
        margin={"l": 80, "r": 30, "t": 20, "b": 50},
    )  # fmt: skip
    return figure


def _why(config: SweepConfig, failed: Sequence[Mapping[str, str]]) -> Table:
    names = list(config.axes)
    shown = [[*(row[name] for name in names), row["reason"]] for row in failed]
    return Table([*map(axis_name, names), "reason"], shown, num_left=len(names) + 1)


def _best(config: SweepConfig, done: Sequence[Mapping[str, str]]) -> Table:
    best = sorted(done, key=lambda row: -float(row["tokens_per_s"]))[:_NUM_BEST]
    names = list(config.axes)
    shown_as = {(n, str(v)): label(n, v) for n, values in config.axes.items() for v in values}
    metrics, certain = metrics_of(config), any(map(is_certain, best))
    figures = [
        {
            **_about(row),
            **{m.name: format(float(row[m.column]) * m.scale, m.form) for m in metrics},
            **({"error": error_text(row) if is_certain(row) else "-"} if certain else {}),
        }
        for row in best
    ]  # fmt: skip
    shown = [
        [*(shown_as[name, row[name]] for name in names), *figure.values()]
        for row, figure in zip(best, figures, strict=True)
    ]
    return Table([*map(axis_name, names), *figures[0]], shown, num_left=len(names) + 1)


def _about(row: Mapping[str, str]) -> dict[str, str]:
    """What limits a plan, or the layout and its shares, by which of them the row has."""
    found = {}
    if "limits" in row:
        found["limited by"] = ", ".join(readable(limit) for limit in row["limits"].split("; "))
    if "layout" in row:
        found |= {"layout": row["layout"], "memory": gib(int(row["memory_bytes"]))}
    for name in ("compute", "communication", "bubble"):
        if share := row.get(f"{name}_share"):
            found[name] = f"{float(share):.0%}"
    return {**found, "gap": f"{float(row['gap']):.1%}" if row["gap"] else "-"}


def _cards(rows: Sequence[Mapping[str, str]], done: Sequence[Mapping[str, str]]) -> list[Card]:
    count = {status: sum(row["status"] == status for row in rows) for status in (INFEASIBLE, BUG)}
    other = len(rows) - len(done) - sum(count.values())
    why = "no layout does" if rows and "cluster" in rows[0] else "the caps are too small"
    cards = [
        Card("cells", f"{len(rows):,}", f"{len(done):,} planned"),
        Card("do not fit", f"{count[INFEASIBLE]:,}", why),
    ]
    if other:
        cards.append(Card("refused", f"{other:,}", "see rows.csv"))
    if count[BUG]:
        cards.append(Card("fell over", f"{count[BUG]:,}", "a bug in twinstream; see rows.csv"))
    if done:
        best = max(done, key=lambda row: float(row["tokens_per_s"]))
        cards.append(
            Card(
                "fastest, tokens/s",
                f"{float(best['tokens_per_s']):,.0f}",
                f"MFU {float(best['mfu']):.1%}",
            )
        )
    spent = sum(float(row["seconds"] or 0) for row in rows)
    cards.append(Card("planning took", f"{spent:,.0f} s", "elapsed, of all cells added up"))
    return cards
