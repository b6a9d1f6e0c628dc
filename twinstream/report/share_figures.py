"""Where time and bytes go: idle time, copies, recompute, kinds of task."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from twinstream.measures.residence import ROLES, Residence
from twinstream.report.palette import (
    CAUSE_COLOURS,
    OTHER_COLOUR,
    ROLE_COLOURS,
    WORLD_COLOURS,
    task_colour,
)
from twinstream.report.view import View, size_unit, time_unit
from twinstream.schedule.analysis.comparison import Comparison, kind_of
from twinstream.schedule.analysis.critical_path import critical_path
from twinstream.schedule.analysis.idle import idle_by_queue, idle_intervals
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute
from twinstream.screens.tables import readable, seconds

_LEGEND_ABOVE = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
_LEGEND_ROW_PX = 20
LEVEL_COLOURS = {"INPUT": "#D55E00", "ATTENTION": "#E69F00"}


def idle_figure(views: Sequence[View]) -> go.Figure:
    """Share of a step in which the compute stream waited, by the queue of what it waited for."""
    return _shares_figure(
        views, [idle_by_queue(idle_intervals(view.schedule, view.timeline)) for view in views]
    )


def critical_path_figure(views: Sequence[View]) -> go.Figure:
    """Share of a step by what is on its critical path: tasks by kind, copies by queue, latency."""
    return _shares_figure(views, [_critical_ns(view) for view in views])


def _critical_ns(view: View) -> dict[str, int]:
    ops = {op.op_id: op for op in view.schedule.ops}
    found: dict[str, int] = {}
    for piece in critical_path(view.schedule, view.timeline):
        op = ops[piece.op_id] if piece.op_id is not None else None
        key = "latency"
        if op is not None:
            key = op.label.kind if isinstance(op, Compute) else op.stream.queue
        found[key] = found.get(key, 0) + piece.end_ns - piece.start_ns
    return found


def _shares_figure(views: Sequence[View], found_ns: Sequence[Mapping[str, int]]) -> go.Figure:
    """Times of a step by kind of task, queue or latency, as a bar a timeline; the longest first.

    Queues share the tasks' colours, so they are hatched.
    """
    longest = sorted((item for found in found_ns for item in found.items()), key=lambda i: -i[1])
    keys = list(dict.fromkeys(key for key, _ in longest))
    figure = go.Figure()
    for key in keys:
        name = "latency of launches and waits" if key == "latency" else readable(key)
        marker: dict[str, object] = {"color": CAUSE_COLOURS.get(key) or task_colour(key)}
        if key in CAUSE_COLOURS and key != "latency":
            marker["pattern"] = {"shape": "/", "fgcolor": "white", "fgopacity": 0.55, "size": 7}
        times_ns = [found.get(key, 0) for found in found_ns]
        figure.add_trace(
            go.Bar(
                orientation="h", y=[view.name for view in views],
                x=[100 * ns / max(1, view.whole.lasting_ns)
                   for ns, view in zip(times_ns, views, strict=True)],
                customdata=[ns / 1e6 for ns in times_ns], name=name, marker=marker,
                hovertemplate=name + ": %{x:.2f} % of the step, %{customdata:,.2f} ms"
                "<extra></extra>",
            )
        )  # fmt: skip
    top_px = 20 + _LEGEND_ROW_PX * -(-len(keys) // 2)
    figure.update_layout(
        barmode="stack", height=80 + top_px + 55 * len(views),
        xaxis={"title": {"text": "% of the step"}},
        yaxis={"autorange": "reversed"}, legend={**_LEGEND_ABOVE, "maxheight": top_px},
        margin={"l": 90, "r": 30, "t": top_px, "b": 45},
    )  # fmt: skip
    return figure


def traffic_figure(schedule: Schedule, residence: Residence) -> go.Figure:
    """Bytes copied in one step, by direction and role."""
    figure = go.Figure()
    unit_bytes, unit = size_unit(schedule)
    moved = {role.role: (role.h2d_bytes, role.d2h_bytes) for role in residence.roles}
    for role in ROLES:
        if not any(moved[role]):
            continue
        figure.add_trace(
            go.Bar(
                orientation="h", y=["H2D", "D2H"], x=[size / unit_bytes for size in moved[role]],
                name=readable(role), marker={"color": ROLE_COLOURS[role]},
                hovertemplate=readable(role) + f", %{{y}}: %{{x:,.2f}} {unit}<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(
        barmode="stack", height=230, xaxis={"title": {"text": f"{unit} a step"}},
        yaxis={"autorange": "reversed"}, legend=_LEGEND_ABOVE,
        margin={"l": 60, "r": 30, "t": 40, "b": 45},
    )  # fmt: skip
    return figure


def recompute_figure(schedule: Schedule) -> go.Figure:
    """Share of each layer's blocks (a block is a layer of one chunk) recomputed, by level."""
    blocks: dict[int, int] = {}
    again: dict[tuple[str, int], int] = {}
    for op in schedule.ops:
        if op.kind != "compute" or op.label.layer is None:
            continue
        layer = op.label.layer
        if op.label.kind == "block_forward":
            blocks[layer] = blocks.get(layer, 0) + 1
        if op.label.kind == "block_recompute":
            key = op.label.level or "unnamed", layer
            again[key] = again.get(key, 0) + 1
    layers = sorted(blocks)
    figure = go.Figure()
    for level in dict.fromkeys(level for level, _ in again):
        counts = [again.get((level, layer), 0) for layer in layers]
        shares = [100 * n / blocks[layer] for n, layer in zip(counts, layers, strict=True)]
        figure.add_trace(
            go.Bar(
                x=layers, y=shares, customdata=counts, name=f"from {level}",
                marker={"color": LEVEL_COLOURS.get(level, OTHER_COLOUR)},
                hovertemplate="layer %{x}: %{y:.0f} % of its blocks (%{customdata}) from "
                + level + "<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(
        barmode="stack", height=270, xaxis={"title": {"text": "layer"}}, showlegend=True,
        yaxis={"title": {"text": "% of its blocks"}, "range": [0, 102]},
        legend=_LEGEND_ABOVE,
        margin={"l": 60, "r": 30, "t": 40, "b": 45},
    )  # fmt: skip
    return figure


def kinds_figure(views: Sequence[View], comparison: Comparison | None) -> go.Figure:
    """Busy time of each kind of op in one step; predicted beside measured where both are known."""
    busy: dict[str, dict[str, float]] = {}
    if comparison is not None:
        for group in comparison.kinds:
            pair = {"predicted": group.busy_ns.predicted, "measured": group.busy_ns.measured}
            busy[group.name] = {view.name: pair[view.name] for view in views}
    else:
        for view in views:
            lasting = view.end_ns - view.start_ns
            for i, op in enumerate(view.schedule.ops):
                one = busy.setdefault(kind_of(op), dict.fromkeys((v.name for v in views), 0.0))
                one[view.name] += float(lasting[i])
    names = sorted(busy, key=lambda name: max(busy[name].values()))
    longest_ns = max(max(found.values()) for found in busy.values())
    unit_ns, unit = time_unit(longest_ns)
    figure = go.Figure()
    for view in reversed(views):
        times = [busy[name][view.name] / unit_ns for name in names]
        figure.add_trace(
            go.Bar(
                orientation="h", y=[_kind(name) for name in names], x=times, name=view.name,
                marker={"color": WORLD_COLOURS[view.name]}, text=_labels(busy, names, view.name),
                textposition="outside", cliponaxis=False,
                hovertemplate="%{y}, " + view.name + f": %{{x:,.2f}} {unit} a step<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(
        barmode="group", height=110 + 26 * len(names) * max(1, len(views)), bargap=0.25,
        xaxis={"title": {"text": f"busy, {unit} a step"}},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "traceorder": "reversed"},
        margin={"l": 190, "r": 130, "t": 40, "b": 45},
    )  # fmt: skip
    return figure


def _kind(name: str) -> str:
    return " ".join(readable(part) for part in name.split(" "))


def _labels(busy: dict[str, dict[str, float]], names: Sequence[str], world: str) -> list[str]:
    """The time; beside the prediction also its error."""
    found = []
    for name in names:
        text = seconds(busy[name][world] / 1e9)
        measured = busy[name].get("measured", 0.0)
        if world == "predicted" and measured:
            text += f" ({busy[name][world] / measured - 1:+.0%})"
        found.append(text)
    return found
