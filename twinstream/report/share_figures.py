"""Draw where time and bytes go: idle time, copies, recompute, kinds of task."""

from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go

from twinstream.measures.metrics import ARENA, RESERVE, Summary
from twinstream.measures.residence import ROLES, Residence
from twinstream.report.palette import (
    AXIS_COLOURS,
    CAUSE_COLOURS,
    OTHER_COLOUR,
    PHASE_COLOURS,
    ROLE_COLOURS,
    WORLD_COLOURS,
    task_colour,
)
from twinstream.report.view import View, size_unit, time_unit
from twinstream.schedule.analysis.comparison import Comparison, kind_of
from twinstream.schedule.analysis.critical_path import critical_path
from twinstream.schedule.analysis.idle import CAUSES, idle_by_queue
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.sizes import gib
from twinstream.screens.tables import cause_name, readable, seconds

_LEGEND_ABOVE = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "traceorder": "normal"}
_BAR_PX, _EDGES_PX, _LEGEND_ROW_PX, _IN_A_ROW = 26, 60, 22, 6
_GIB = 2**30
_MEMORY_NAMES = {RESERVE: "context, libraries", ARENA: "rest of the arena"}
_MEMORY_COLOURS = ROLE_COLOURS | {ARENA: "#C9CDD3"}
MEAN = "mean of ranks"
_Look = tuple[str, str, dict[str, object]]  # a key, its name, its marker
LEVEL_COLOURS = {"INPUT": "#D55E00", "ATTENTION": "#E69F00", "EXPERTS": "#F0E442"}


def idle_figure(views: Sequence[View]) -> go.Figure:
    """Share of a step in which the compute stream waited, by the queue of what it waited for."""
    return _shares_figure(views, [idle_by_queue(view.compute_gaps) for view in views])


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
    looks: list[_Look] = []
    for key in dict.fromkeys(key for key, _ in longest):
        name = "latency of launches and waits" if key == "latency" else readable(key)
        marker: dict[str, object] = {"color": CAUSE_COLOURS.get(key) or task_colour(key)}
        if key in CAUSE_COLOURS and key != "latency":
            marker["pattern"] = {"shape": "/", "fgcolor": "white", "fgopacity": 0.55, "size": 7}
        looks.append((key, name, marker))
    whole_ns = {view.name: max(1, view.whole.lasting_ns) for view in views}
    parts = {
        view.name: {key: 100 * ns / whole_ns[view.name] for key, ns in found.items()}
        for view, found in zip(views, found_ns, strict=True)
    }
    return _stacked(parts, looks, "% of the step", lambda world, percent: (
        f"{percent:.2f} % of the step, {seconds(percent / 100 * whole_ns[world] / 1e9)}"
    ))  # fmt: skip


def exposed_figure(summary: Summary, names: Sequence[str]) -> go.Figure:
    """Share of the step in which compute ran, and in which it waited, by cause."""
    found = {one.name: one for one in summary.exposed if one.name in names}
    parts = {name: one.fractions for name, one in found.items()} | {MEAN: summary.mean_fraction}
    steps_s = {name: one.step_ns / 1e9 for name, one in found.items()}
    steps_s[MEAN] = summary.step_time_s
    looks: list[_Look] = [
        (cause, cause_name(cause), {"color": AXIS_COLOURS.get(cause, PHASE_COLOURS["forward"])})
        for cause in ("compute", *CAUSES)
    ]
    percent = {name: {c: 100 * share for c, share in one.items()} for name, one in parts.items()}
    figure = _stacked(percent, looks, "% of the step", lambda name, value: (
        f"{value:.2f} %, {seconds(value / 100 * steps_s[name])}"
    ))  # fmt: skip
    figure.update_xaxes(range=[0, 100.001])
    return figure


def device_memory_figure(summary: Summary, names: Sequence[str]) -> go.Figure:
    """Device memory of a rank of each class by role of tensor, with what a device has."""
    looks: list[_Look] = [
        (role, _MEMORY_NAMES.get(role, readable(role)),
         {"color": _MEMORY_COLOURS.get(role, OTHER_COLOUR)})
        for role in (*ROLE_COLOURS, ARENA, RESERVE)
    ]  # fmt: skip
    found = {
        name: {role: size / _GIB for role, size in summary.memory_bytes[name].items()}
        for name in names
    }
    figure = _stacked(
        found, looks, "GiB of a rank's device", lambda _, size_gib: gib(size_gib * _GIB)
    )
    most = max(sum(one.values()) for one in found.values())
    if summary.device_bytes is not None:
        has = summary.device_bytes / _GIB
        most = max(most, has)
        figure.add_vline(
            x=has, line={"dash": "dash", "width": 1.5, "color": OTHER_COLOUR},
            annotation={"text": f"a device has {gib(summary.device_bytes)}",
                        "xanchor": "right", "yanchor": "bottom"},
        )  # fmt: skip
    figure.update_xaxes(range=[0, most * 1.03])
    return figure


def traffic_figure(schedule: RankSchedule, residence: Residence) -> go.Figure:
    """Bytes copied in one step, by direction and role."""
    unit_bytes, unit = size_unit(schedule)
    moved: dict[str, dict[str, float]] = {
        "H2D": {role.role: role.h2d_bytes / unit_bytes for role in residence.roles},
        "D2H": {role.role: role.d2h_bytes / unit_bytes for role in residence.roles},
    }
    looks: list[_Look] = [(role, readable(role), {"color": ROLE_COLOURS[role]}) for role in ROLES]
    return _stacked(moved, looks, f"{unit} a step", lambda _, size: f"{size:,.2f} {unit}")


def _stacked(
    parts: Mapping[str, Mapping[str, float]],
    looks: Sequence[_Look],
    what: str,
    told: Callable[[str, float], str],
) -> go.Figure:
    """A stacked bar for each label, of the parts that are anywhere, in the looks' order."""
    figure = go.Figure()
    for key, name, marker in looks:
        values = [one.get(key, 0.0) for one in parts.values()]
        if any(values):
            texts = [told(label, value) for label, value in zip(parts, values, strict=True)]
            figure.add_trace(
                go.Bar(
                    orientation="h", y=list(parts), x=values, name=name, marker=marker,
                    customdata=texts,
                    hovertemplate="%{y}, " + name + ": %{customdata}<extra></extra>",
                )
            )  # fmt: skip
    top_px = 10 + _LEGEND_ROW_PX * -(-len(figure.data) // _IN_A_ROW)
    figure.update_layout(
        barmode="stack", height=_EDGES_PX + top_px + max(_BAR_PX * len(parts), 2 * _BAR_PX),
        showlegend=True, xaxis={"title": {"text": what}},
        yaxis={"autorange": "reversed", "fixedrange": True}, legend=_LEGEND_ABOVE,
        margin={"l": 110, "r": 30, "t": top_px, "b": 45},
    )  # fmt: skip
    return figure


def recompute_figure(schedule: RankSchedule) -> go.Figure:
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
    errors: dict[str, float] = {}
    if comparison is not None:
        errors = {group.name: group.busy_ns.error for group in comparison.kinds}
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
                marker={"color": WORLD_COLOURS[view.name]},
                text=_labels(busy, errors, names, view.name), textposition="outside",
                cliponaxis=False,
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


def _labels(
    busy: dict[str, dict[str, float]], errors: dict[str, float], names: Sequence[str], world: str
) -> list[str]:
    """The time; beside the prediction also its error, of the time that kernels had a core."""
    found = []
    for name in names:
        text = seconds(busy[name][world] / 1e9)
        if world == "predicted" and busy[name].get("measured"):
            text += f" ({errors[name]:+.0%})"
        found.append(text)
    return found
