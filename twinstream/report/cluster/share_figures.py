"""Where the step of each class goes, and what its device memory holds, as stacked bars."""

from collections.abc import Sequence

import plotly.graph_objects as go

from twinstream.measures.cluster_summary import ARENA, RESERVE, ClusterSummary
from twinstream.report.palette import AXIS_COLOURS, OTHER_COLOUR, PHASE_COLOURS, ROLE_COLOURS
from twinstream.schedule.analysis.idle import CAUSES
from twinstream.schedule.sizes import gib
from twinstream.screens.tables import cause_name, readable, seconds

MEAN = "mean of ranks"
_LEGEND_ABOVE = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "traceorder": "normal"}
_BAR_PX, _EDGES_PX, _LEGEND_ROW_PX, _IN_A_ROW = 26, 60, 22, 6
_GIB = 2**30
_MEMORY_NAMES = {RESERVE: "context, libraries", ARENA: "rest of the arena"}
_MEMORY_COLOURS = ROLE_COLOURS | {ARENA: "#C9CDD3"}


def exposed_figure(summary: ClusterSummary, names: Sequence[str]) -> go.Figure:
    """Share of the step in which compute ran, and in which it waited, by cause."""
    found = {one.name: one for one in summary.exposed if one.name in names}
    parts = {name: one.fractions for name, one in found.items()} | {MEAN: summary.mean_fraction}
    steps = {name: one.step_ns for name, one in found.items()}
    steps[MEAN] = round(summary.step_time_s * 1e9)
    figure = go.Figure()
    for cause in ("compute", *CAUSES):
        if not any(cause in one for one in parts.values()):
            continue
        name = cause_name(cause)
        values = [one.get(cause, 0.0) for one in parts.values()]
        figure.add_trace(
            go.Bar(
                orientation="h", y=list(parts), x=[100 * value for value in values], name=name,
                customdata=[seconds(value * steps[label] / 1e9)
                            for label, value in zip(parts, values, strict=True)],
                marker={"color": AXIS_COLOURS.get(cause, PHASE_COLOURS["forward"])},
                hovertemplate="%{y}, " + name + ": %{x:.2f} %, %{customdata}<extra></extra>",
            )
        )  # fmt: skip
    _lay_out(figure, len(parts), "% of the step")
    figure.update_xaxes(range=[0, 100.001])
    return figure


def memory_figure(summary: ClusterSummary, names: Sequence[str]) -> go.Figure:
    """Device memory of a rank of each class by role of tensor, with what a device has."""
    found = {name: summary.memory_bytes[name] for name in names}
    figure = go.Figure()
    order = [*ROLE_COLOURS, ARENA, RESERVE]
    for role in order:
        if not any(role in one for one in found.values()):
            continue
        name = _MEMORY_NAMES.get(role, readable(role))
        sizes = [one.get(role, 0) for one in found.values()]
        figure.add_trace(
            go.Bar(
                orientation="h", y=list(found), x=[size / _GIB for size in sizes], name=name,
                customdata=[gib(size) for size in sizes],
                marker={"color": _MEMORY_COLOURS.get(role, OTHER_COLOUR)},
                hovertemplate="%{y}, " + name + ": %{customdata}<extra></extra>",
            )
        )  # fmt: skip
    _lay_out(figure, len(found), "GiB of a rank's device")
    most = max(sum(one.values()) for one in found.values())
    if summary.device_bytes is not None:
        most = max(most, summary.device_bytes)
        line = {"dash": "dash", "width": 1.5, "color": OTHER_COLOUR}
        figure.add_vline(
            x=summary.device_bytes / _GIB, line=line,
            annotation={"text": f"a device has {gib(summary.device_bytes)}",
                        "xanchor": "right", "yanchor": "top"},
        )  # fmt: skip
    figure.update_xaxes(range=[0, most / _GIB * 1.03])
    return figure


def _lay_out(figure: go.Figure, num_bars: int, what: str) -> None:
    top_px = 10 + _LEGEND_ROW_PX * -(-len(figure.data) // _IN_A_ROW)
    figure.update_layout(
        barmode="stack", height=_EDGES_PX + top_px + _BAR_PX * num_bars, showlegend=True,
        xaxis={"title": {"text": what}}, yaxis={"autorange": "reversed", "fixedrange": True},
        legend=_LEGEND_ABOVE, margin={"l": 110, "r": 30, "t": top_px, "b": 45},
    )  # fmt: skip
