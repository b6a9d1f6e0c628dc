"""Streams, memory and links on one time axis: of a whole step, or of a window of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from typing import get_args

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from twinstream.hardware_profiles.schema import Machine
from twinstream.report.bars import Bar
from twinstream.report.palette import KEYS, OTHER_COLOUR, ROLE_COLOURS, key_colour, key_name
from twinstream.report.view import Span, View, memory_curve, memory_samples, size_unit, time_unit
from twinstream.schedule.analysis.resource_use import use_over_time
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST, Role, Tier
from twinstream.screens.tables import readable

_NUM_POINTS = 500
_RATES = {
    "h2d": "pcie_h2d_bytes_per_s",
    "d2h": "pcie_d2h_bytes_per_s",
    "hbm": "hbm_bytes_per_s",
    "host_dram": "host_dram_bytes_per_s",
}
_ROW_PX, _STRIP_PX, _AREA_PX, _BETWEEN_PX, _EDGES_PX = 34, 26, 190, 36, 75
_USE = "Use of links and memories, % of what the machine reaches"
_FAR = 3  # a cap so many times what is taken is told, not drawn
ROLES: tuple[Role, ...] = get_args(Role)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shown:
    """The part of one timeline that is drawn: a span, and the bars in it."""

    view: View
    span: Span
    bars: Sequence[Bar]


@dataclass(frozen=True)
class _Axis:
    """From ns of a timeline's clock to the figure's time, which begins with the span."""

    unit_ns: int
    name: str

    def place(self, moments_ns: object, span: Span) -> Floats:
        return (np.asarray(moments_ns, np.float64) - span.start_ns) / self.unit_ns


def timeline_figure(shown: Sequence[Shown], machine: Machine) -> go.Figure:
    """Gantt charts (predicted above measured), both memories against their caps, use of links.

    Memory by role is of the first timeline, the others' totals are thin lines. Time begins with
    each one's own span.
    """
    charts = [f"Streams, {one.view.name}" for one in shown]
    unit = size_unit(shown[0].view.schedule)[1]
    rows = [*charts, f"Device memory, {unit}", f"Host memory, {unit}", _USE]
    strips_px = _STRIP_PX * max(1, len(_usable(machine)) * len(shown))
    heights = [_ROW_PX * len(one.view.lanes) for one in shown] + [_AREA_PX] * 2 + [strips_px]
    height = sum(heights) + _BETWEEN_PX * (len(rows) - 1)
    figure = make_subplots(
        rows=len(rows), cols=1, shared_xaxes=True, subplot_titles=rows,
        row_heights=heights, vertical_spacing=_BETWEEN_PX / height,
    )  # fmt: skip
    axis = _Axis(*time_unit(shown[0].span.lasting_ns))
    for row, one in enumerate(shown, start=1):
        _add_gantt(figure, one, axis, row)
    _add_memory(figure, shown, axis, len(shown) + 1, DEVICE)
    _add_memory(figure, shown, axis, len(shown) + 2, HOST)
    _add_use(figure, shown, machine, axis, len(shown) + 3)
    _lay_out(figure, height + _EDGES_PX, axis, max(one.span.lasting_ns for one in shown))
    figure.update_layout(meta={"plays": {"unit": axis.name, "size": unit}})
    return figure


def _add_gantt(figure: go.Figure, one: Shown, axis: _Axis, row: int) -> None:
    names = [readable(queue) for queue in one.view.lanes]
    keys = sorted({bar.key for bar in one.bars}, key=lambda k: KEYS.index(k) if k in KEYS else 99)
    for key in keys:
        mine = [bar for bar in one.bars if bar.key == key]
        start = axis.place([bar.start_ns for bar in mine], one.span)
        is_role = key in ROLE_COLOURS
        figure.add_trace(
            go.Bar(
                orientation="h", base=start, y=[readable(bar.queue) for bar in mine],
                x=axis.place([bar.end_ns for bar in mine], one.span) - start,
                marker={"color": key_colour(key), "line": {"width": 0}},
                hovertext=[bar.text for bar in mine], hoverinfo="text", name=key_name(key),
                width=0.82, legendgroup=key, showlegend=row == 1 and not is_role,
                legend="legend",
            ),
            row=row, col=1,
        )  # fmt: skip
    figure.update_yaxes(
        categoryorder="array", categoryarray=names[::-1], row=row, col=1, fixedrange=True,
        range=[-0.6, len(names) - 0.4], showgrid=False,
    )  # fmt: skip


def _add_memory(
    figure: go.Figure, shown: Sequence[Shown], axis: _Axis, row: int, tier: Tier
) -> None:
    one, schedule = shown[0], shown[0].view.schedule
    unit_bytes, unit = size_unit(schedule)
    curve = memory_curve(memory_samples(one.view, tier), one.span, _NUM_POINTS)
    time = axis.place(curve.start_ns, one.span)
    reserve = schedule.caps.outside_arena_bytes if tier == DEVICE else 0
    areas: dict[str, Floats] = {}
    if reserve:
        areas["context, libraries"] = np.full(len(time), float(reserve))
    areas |= {role: curve.bytes_by_role[role] for role in ROLES if role in curve.bytes_by_role}
    for name, size_bytes in areas.items():
        figure.add_trace(
            go.Scatter(
                x=time, y=(size_bytes / unit_bytes).astype(np.float32), stackgroup=f"memory{row}",
                line={"width": 0, "shape": "hv"}, name=readable(name), mode="lines",
                fillcolor=ROLE_COLOURS.get(name, OTHER_COLOUR), legendgroup=name,
                legend="legend2", showlegend=name in ROLE_COLOURS and tier == DEVICE,
                hovertemplate=f"{readable(name)}: %{{y:.2f}} {unit}<extra></extra>",
            ),
            row=row, col=1,
        )  # fmt: skip
    for other in shown[1:]:
        _add_total(figure, other, axis, row, tier)
    cap = schedule.caps.device_bytes if tier == DEVICE else schedule.caps.host_bytes
    taken = arena_bytes(schedule, tier) + reserve
    told = f"taken {taken / unit_bytes:,.2f} {unit}"
    _add_line(figure, row, taken / unit_bytes, "dot")
    top = taken
    if cap is not None:
        told += f", cap {cap / unit_bytes:,.2f} {unit}"
        top = max(taken, cap if cap < _FAR * taken else 0)
        if top == cap:
            _add_line(figure, row, cap / unit_bytes, "dash")
    figure.add_annotation(
        text=told, x=1, xref="x domain", y=1, yref="y domain", xanchor="right", yanchor="bottom",
        showarrow=False, row=row, col=1,
    )  # fmt: skip
    figure.update_yaxes(range=[0, top / unit_bytes * 1.06], row=row, col=1, fixedrange=True)


def _add_total(figure: go.Figure, other: Shown, axis: _Axis, row: int, tier: Tier) -> None:
    """All bytes alive on a memory in another timeline, as a thin line."""
    curve = memory_curve(memory_samples(other.view, tier), other.span, _NUM_POINTS)
    unit_bytes, unit = size_unit(other.view.schedule)
    reserve = other.view.schedule.caps.outside_arena_bytes if tier == DEVICE else 0
    total = sum(curve.bytes_by_role.values(), np.full(len(curve.start_ns), float(reserve)))
    figure.add_trace(
        go.Scatter(
            x=axis.place(curve.start_ns, other.span), y=(total / unit_bytes).astype(np.float32),
            mode="lines", line={"width": 1.5, "shape": "hv", "color": "#222222"},
            name=f"all, {other.view.name}", legend="legend2", showlegend=tier == DEVICE,
            hovertemplate=f"{other.view.name}: %{{y:.2f}} {unit}<extra></extra>",
        ),
        row=row, col=1,
    )  # fmt: skip


def _add_line(figure: go.Figure, row: int, level: float, dash: str) -> None:
    line = {"dash": dash, "width": 1.5, "color": OTHER_COLOUR}
    figure.add_hline(y=level, row=row, col=1, line=line)


def _add_use(
    figure: go.Figure, shown: Sequence[Shown], machine: Machine, axis: _Axis, row: int
) -> None:
    """A strip per resource and timeline: share of the usable rate, mean over intervals.

    All begin with their own span; a shorter one ends before the longest does.
    """
    usable = _usable(machine)
    names: list[str] = []
    percent: list[Floats] = []
    rates: list[Floats] = []
    width_ns = max(one.span.lasting_ns for one in shown) / _NUM_POINTS
    for name in usable:
        for one in shown:
            edges = one.span.start_ns + width_ns * np.arange(_NUM_POINTS + 1.0, dtype=np.float64)
            used = use_over_time(one.view.schedule, one.view.timeline, edges)[name]
            used = np.where(edges[:-1] < one.span.end_ns, used, np.nan)
            names.append(readable(name) + ("" if len(shown) == 1 else f", {one.view.name}"))
            percent.append((100 * used / usable[name]).astype(np.float32))
            rates.append(used.astype(np.float32))
    if not names:
        return
    width = width_ns / axis.unit_ns
    bottom, top = figure.get_subplot(row, 1).yaxis.domain
    figure.add_trace(
        go.Heatmap(
            x0=width / 2, dx=width, y=names, z=np.stack(percent), customdata=np.stack(rates),
            colorscale="Cividis", zmin=0, zmax=100, ygap=3,
            colorbar={
                "x": 1.01, "y": (bottom + top) / 2, "len": (top - bottom) * 1.15, "thickness": 12,
                "ticksuffix": " %", "tickvals": [0, 50, 100], "lenmode": "fraction",
            },
            hovertemplate="%{y}: %{z:.0f} %, %{customdata:,.1f} GB/s<extra></extra>",
        ),
        row=row, col=1,
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", row=row, col=1, fixedrange=True, showgrid=False)


def _usable(machine: Machine) -> Mapping[str, float]:
    """Bytes per ns that the machine reaches, where that is limited and known."""
    found: dict[str, float] = {}
    for name, field in _RATES.items():
        if getattr(machine, field) is None:
            continue
        rate = machine.rate(field) / 1e9
        if not isinf(rate):
            found[name] = rate
    return found


def _lay_out(figure: go.Figure, height: int, axis: _Axis, longest_ns: int) -> None:
    figure.update_layout(
        height=height, barmode="overlay", bargap=0, hovermode="closest", dragmode="zoom",
        margin={"l": 90, "r": 170, "t": 30, "b": 45},
    )  # fmt: skip
    axes = [figure.layout[key] for key in figure.layout if key.startswith("yaxis")]
    tops = sorted((axis.domain[1] for axis in axes), reverse=True)
    for name, row, what in (("legend", 0, "tasks"), ("legend2", -3, "tensors")):
        place = {"x": 1.01, "y": tops[row], "yanchor": "top", "tracegroupgap": 0}
        figure.update_layout({name: {**place, "title": {"text": what}}})
    figure.update_xaxes(
        range=[0, longest_ns / axis.unit_ns], showspikes=True, spikemode="across",
        spikethickness=1, spikedash="dot", spikecolor=OTHER_COLOUR, spikesnap="cursor",
    )  # fmt: skip
    figure.update_xaxes(title_text=f"time, {axis.name}", row=len(tops), col=1)
    figure.update_annotations(font={"size": 12})
    for note in figure.layout.annotations[: len(tops)]:
        note.update(x=0, xanchor="left", text=f"<b>{note.text}</b>")
