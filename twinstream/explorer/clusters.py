"""Schedules of clusters on the explorer's page: headlines, lanes, a link to the whole report."""

from collections.abc import Sequence
from dataclasses import dataclass

from dash import Dash, html
from flask import Response, abort

from twinstream.explorer.show import graph
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.cluster_summary import summarize_cluster
from twinstream.report.cluster.cluster_page import cluster_html, step_figure
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.screens.cluster_screen import cluster_lines


@dataclass(frozen=True)
class ShownCluster:
    """A cluster's schedule and its timeline; `machine` is the profile of a node."""

    name: str
    schedule: ClusterSchedule
    timeline: ClusterTimeline
    machine: Machine

    @property
    def where(self) -> str:
        return self.timeline.provenance.where

    def lines(self) -> list[str]:
        """Headlines, as `twinstream simulate` prints them."""
        summary = summarize_cluster(self.schedule, self.timeline, self.machine)
        return cluster_lines(self.schedule, summary, self.where)

    def page(self) -> str:
        """The page of `twinstream report`."""
        summary = summarize_cluster(self.schedule, self.timeline, self.machine)
        return cluster_html(self.schedule, self.timeline, summary, self.where)


def clusters_part(shown: Sequence[ShownCluster]) -> html.Div:
    """What the page has of them, one below the other."""
    parts = [
        html.Div(
            [
                html.H2(one.name),
                *map(html.P, one.lines()),
                html.P(html.A("full report", href=f"/cluster/{number}", target="_blank")),
                graph(step_figure(one.schedule, one.timeline), f"cluster-{number}"),
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
