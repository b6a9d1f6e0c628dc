"""Schedules of clusters on the explorer's page: headlines, lanes, a link to the whole report."""

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import plotly.io
from dash import Dash, html
from flask import Response, abort

from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import rate_text, summarize
from twinstream.report.ranks_part import RanksPart
from twinstream.report.report import report_html
from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import Timeline
from twinstream.screens.ranks_screen import mesh_lines
from twinstream.screens.tables import seconds

_FIGURES = ("cluster", "measured")  # their ids on the page, each with the number of the cluster


@dataclass(frozen=True)
class ShownCluster:
    """A cluster's schedule and its timeline; `machine` is the profile of a node.

    `measured` is of ranks that ran, `notes` are sentences about the prediction.
    """

    name: str
    schedule: Schedule
    timeline: Timeline
    machine: Machine
    measured: Timeline | None = None
    notes: Sequence[str] = ()

    @property
    def where(self) -> str:
        return self.timeline.provenance.where

    def lines(self) -> list[str]:
        """Headlines, as `twinstream simulate` prints them; what ranks measured, where they did."""
        summary = summarize(self.schedule, self.timeline, self.machine)
        lines = [*mesh_lines(self.schedule, summary, self.where), *self.notes]
        if summary.uncertainty is not None:
            lines.append(summary.uncertainty.sentence)
        if self.measured is not None:
            step_s = self.measured.step_ns / 1e9
            lines.append(
                f"Measured: {rate_text(summary.tokens_per_step / step_s)} tokens/s, "
                f"{seconds(step_s)} a step; predicted is {summary.step_time_s / step_s - 1:+.1%}."
            )
        return lines

    def figures(self) -> list[go.Figure]:
        """The lanes of a step, as predicted and as measured."""
        return RanksPart(self.schedule, self.timeline, self.machine, self.measured).figures()

    def page(self) -> str:
        """The page of `twinstream report`."""
        return report_html(
            self.schedule, self.machine, predicted=self.timeline, measured=self.measured,
            notes=self.notes,
        )  # fmt: skip


def clusters_part(shown: Sequence[ShownCluster]) -> html.Div:
    """What the page has of them, one below the other."""
    parts = [
        html.Div(
            [
                html.H2(one.name),
                *map(html.P, one.lines()),
                html.P(html.A("full report", href=f"/cluster/{number}", target="_blank")),
                *(
                    graph(figure, f"{name}-{number}")
                    for name, figure in zip(_FIGURES, one.figures(), strict=False)
                ),
            ]
        )
        for number, one in enumerate(shown)
    ]
    return html.Div(parts, id="clusters")


def add_pages(app: Dash, shown: Sequence[ShownCluster]) -> None:
    """Serve the report of each."""

    def page(number: int) -> Response:
        if number >= len(shown):
            abort(404)
        return Response(shown[number].page(), mimetype="text/html")

    app.server.add_url_rule("/cluster/<int:number>", "cluster", page)


def graph(figure: go.Figure, identity: str) -> html.Div:
    """What `explorer.js` draws, in the colours and the width of the page."""
    return html.Div(id=identity, **{"data-figure": plotly.io.to_json(figure, remove_uids=True)})
