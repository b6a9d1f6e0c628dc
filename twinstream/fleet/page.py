"""A fleet's calendar as a page, and as a table of stretches."""

import csv
import io
from collections.abc import Mapping

import plotly.graph_objects as go

from twinstream.fleet.jobs import HOUR_S
from twinstream.fleet.plan import FleetPlan
from twinstream.fleet.screen import (
    JOB_COLUMNS,
    compared_rows,
    job_rows,
    nodes_text,
    notes_of,
    title_of,
)
from twinstream.report.page import Card, Page, Section, Table, Text, html_of
from twinstream.report.palette import series

_MOST_NAMED = 40


def fleet_html(plan: FleetPlan, beside: Mapping[str, FleetPlan] | None = None) -> str:
    """One self-contained page: the calendar, the jobs, the bounds."""
    bounds = plan.bounds
    cards = [
        Card("makespan", f"{plan.makespan_s / HOUR_S:,.1f} h",
             f"no plan ends before {bounds.makespan_s / HOUR_S:,.1f} h"),
        Card("deadlines met", f"{plan.deadlines_met} of {plan.deadlines}",
             f"no plan meets more than {bounds.deadlines_met}"),
        Card("GPU-hours", f"{plan.gpu_hours:,.0f}", f"nodes are busy {plan.busy_share:.0%}"),
    ]  # fmt: skip
    if plan.money is not None:
        cards.append(Card("money", f"{plan.money:,.0f}", f"at {plan.price_per_gpu_hour:g}"))
    rows = [row for job in plan.jobs for row in job_rows(plan, job)]
    about = (
        "A bar is a job on a node; a star is its deadline; hatched stretches begin by a restart."
    )
    sections = [
        Section("Calendar", about, calendar_figure(plan)),
        Section("Jobs", "", Table(JOB_COLUMNS, rows, num_left=3)),
        Section("Bounds and failures", "", Text("\n".join(notes_of(plan)))),
    ]
    if beside:
        plans = {"layouts searched": plan, **beside}
        table = Table(["", *plans], compared_rows(list(plans.values())))
        sections.append(Section("Beside", "The same jobs under other rules.", table))
    footer = "Made by twinstream fleet. Speeds are predictions of the simulator."
    return html_of(Page("Fleet", f"{title_of(plan)}.", cards, sections, footer))


def calendar_figure(plan: FleetPlan) -> go.Figure:
    """Nodes from top to bottom, hours from left to right, a colour for each job."""
    figure = go.Figure()
    for place, job in enumerate(plan.jobs):
        look = series(place)
        own = [one for one in plan.calendar if one.job == job.name]
        cells = [(one, node) for one in own for node in one.nodes]
        layouts = {speed.nodes: speed.layout for speed in job.speeds}
        figure.add_trace(
            go.Bar(
                name=job.name, orientation="h", y=[node for _, node in cells],
                base=[one.start_s / HOUR_S for one, _ in cells],
                x=[(one.end_s - one.start_s) / HOUR_S for one, _ in cells],
                marker={"color": look.colour, "line": {"width": 1, "color": "white"},
                        "pattern": {"shape": ["/" if one.restarts else look.pattern
                                              for one, _ in cells]}},
                text=[f"nodes {nodes_text(one.nodes)}, {layouts[len(one.nodes)]}<br>"
                      f"{one.start_s / HOUR_S:,.2f} to {one.end_s / HOUR_S:,.2f} h, "
                      f"{one.share:.0%} of the job" for one, _ in cells],
                textposition="none", hovertemplate=f"{job.name}: %{{text}}<extra></extra>",
            )
        )  # fmt: skip
        if job.deadline_s is not None:
            figure.add_trace(
                go.Scatter(
                    x=[job.deadline_s / HOUR_S], y=[own[-1].nodes[0]], mode="markers",
                    marker={"symbol": "star", "size": 11, "color": look.colour,
                            "line": {"width": 1, "color": "black"}},
                    showlegend=False,
                    hovertemplate=f"deadline of {job.name}: %{{x:,.2f}} h<extra></extra>",
                )
            )  # fmt: skip
    ticks = {"dtick": 1} if plan.nodes <= _MOST_NAMED else {}
    figure.update_layout(
        barmode="overlay", bargap=0.15, height=160 + min(900, max(180, 26 * plan.nodes)),
        xaxis={"title": {"text": "hours"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "node"}, "autorange": "reversed", **ticks},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top"},
        margin={"l": 60, "r": 20, "t": 40, "b": 60},
    )  # fmt: skip
    return figure


def fleet_csv(plan: FleetPlan) -> str:
    """A row for each stretch."""
    out = io.StringIO()
    rows = plan.records()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
