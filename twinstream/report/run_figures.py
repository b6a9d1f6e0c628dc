"""The curves of a run, as few points as a screen shows, without losing a peak."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from twinstream.log.metrics import EvalMetrics, StepMetrics
from twinstream.measures.residence import Residence
from twinstream.report.palette import (
    OTHER_COLOUR,
    ROLE_COLOURS,
    SERIES_COLOURS,
    WORLD_COLOURS,
    lighter,
)
from twinstream.report.view import size_unit
from twinstream.schedule.document import RankSchedule
from twinstream.screens.tables import readable

MOST_POINTS = 2000
FEW_STEPS = 20  # are not smoothed
_SMOOTHED_OVER = 0.02  # of the steps
_RAW, _SMOOTH, _EVAL = lighter(SERIES_COLOURS[0], 0.45), SERIES_COLOURS[0], SERIES_COLOURS[1]
_HEIGHT_PX, _HALF_PX = 400, 300
_LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
Floats = NDArray[np.float64]


def loss_figure(steps: Sequence[StepMetrics], evals: Sequence[EvalMetrics]) -> go.Figure:
    """The loss of each step, its running mean, and that of each evaluation."""
    figure = go.Figure()
    at, losses = _column(steps, "step"), _column(steps, "loss")
    if len(steps):
        many = len(steps) >= FEW_STEPS
        figure.add_trace(_line("train", at, losses, ".4f", colour=_RAW if many else _SMOOTH))
        if many:
            mean = smoothed(losses, max(2.0, _SMOOTHED_OVER * len(losses)))
            figure.add_trace(_line("train, smoothed", at, mean, ".4f", colour=_SMOOTH, width=2.5))
    if evals:
        figure.add_trace(
            go.Scatter(
                x=[one.step for one in evals], y=_column(evals, "loss"), name="evaluation",
                mode="lines+markers", marker={"size": 7, "symbol": "diamond", "color": _EVAL},
                line={"color": _EVAL, "width": 1.5}, customdata=[one.text for one in evals],
                hovertemplate="step %{x:,}: evaluation %{customdata}<extra></extra>",
            )
        )  # fmt: skip
    return _laid_out(figure, "loss", _HEIGHT_PX)


def rate_figure(steps: Sequence[StepMetrics]) -> go.Figure:
    """Draw the learning rate of each step."""
    figure = go.Figure(
        _line("learning rate", _column(steps, "step"), _column(steps, "learning_rate"), ".3e")
    )
    figure.update_yaxes(rangemode="tozero", exponentformat="e")
    return _laid_out(figure, "learning rate", _HALF_PX)


def norm_figure(steps: Sequence[StepMetrics]) -> go.Figure:
    """The norm of the gradients before clipping, of the steps in which it was computed."""
    norms = _column(steps, "grad_norm")
    figure = go.Figure()
    if not np.isnan(norms).all():
        figure.add_trace(_line("gradient norm", _column(steps, "step"), norms, ".4g"))
    figure.update_yaxes(rangemode="tozero")
    return _laid_out(figure, "gradient norm", _HALF_PX)


def reward_figure(steps: Sequence[StepMetrics]) -> go.Figure:
    """Draw the mean margin of each step's pairs (DPO), and the two rewards it is made of."""
    figure = go.Figure()
    for field, colour in zip(("margin", "chosen_reward", "rejected_reward"), SERIES_COLOURS,
                             strict=False):  # fmt: skip
        name = field.replace("_", " ")
        figure.add_trace(_preference(steps, field, name, "+.3f", colour=colour))
    return _laid_out(figure, "nats, times beta", _HALF_PX)


def accuracy_figure(steps: Sequence[StepMetrics]) -> go.Figure:
    """Draw the share of each step's pairs whose margin is above 0 (DPO)."""
    figure = go.Figure(_preference(steps, "accuracy", "accuracy", ".1%"))
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return _laid_out(figure, "accuracy", _HALF_PX)


def _preference(
    steps: Sequence[StepMetrics], field: str, name: str, form: str, *, colour: str = _SMOOTH
) -> go.Scatter:
    of_pairs = [step for step in steps if step.preference is not None]
    values = np.array([getattr(step.preference, field) for step in of_pairs], np.float64)
    return _line(name, _column(of_pairs, "step"), values, form, colour=colour)


def speed_figure(steps: Sequence[StepMetrics]) -> go.Figure:
    """Tokens/s of each step, predicted beside measured; from zero, so that heights compare."""
    at = _column(steps, "step")
    figure = go.Figure()
    for world, field in (("measured", "tokens_per_s"), ("predicted", "predicted_tokens_per_s")):
        rates = _column(steps, field)
        if not np.isnan(rates).all():
            figure.add_trace(_line(world, at, rates, ",.0f", colour=WORLD_COLOURS[world]))
    figure.update_yaxes(rangemode="tozero", tickformat=",")
    return _laid_out(figure, "tokens/s", _HALF_PX)


def memory_figure(schedule: RankSchedule, found: Residence) -> go.Figure:
    """Draw the bytes of both memories at the fullest moment of a step, by role."""
    unit_bytes, unit = size_unit(schedule)
    parts = [
        (readable(one.role), ROLE_COLOURS[one.role], one.device_peak_bytes, one.host_peak_bytes)
        for one in found.roles
    ]
    unused = found.device_unused_bytes, found.host_unused_bytes
    parts += [
        ("unused (packing)", lighter(OTHER_COLOUR, 0.6), *unused),
        ("context, libraries", OTHER_COLOUR, found.device_reserve_bytes, 0),
    ]
    figure = go.Figure()
    for name, colour, *sizes in parts:
        if any(sizes):
            figure.add_trace(
                go.Bar(
                    orientation="h", y=["device", "host"], x=[size / unit_bytes for size in sizes],
                    name=name, marker={"color": colour},
                    hovertemplate=f"{name}, %{{y}}: %{{x:,.2f}} {unit}<extra></extra>",
                )
            )  # fmt: skip
    figure.update_layout(
        barmode="stack", height=260, xaxis={"title": {"text": unit}},
        yaxis={"autorange": "reversed"}, legend=_LEGEND,
        margin={"l": 60, "r": 30, "t": 60, "b": 45},
    )  # fmt: skip
    return figure


def thinned(at: Floats, values: Floats, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """Return at most `most` points: the least and the greatest value of each equal stretch.

    What is not finite is NaN, which is drawn as a gap; a stretch of nothing else stays one.
    """
    values = np.where(np.isfinite(values), values, np.nan)
    if len(values) <= most:
        return at, values
    kept: list[int] = []
    for stretch in np.array_split(np.arange(len(values)), most // 2):
        finite = stretch[~np.isnan(values[stretch])]
        if len(finite):
            ends = finite[values[finite].argmin()], finite[values[finite].argmax()]
            kept += sorted({int(end) for end in ends})
        else:
            kept.append(int(stretch[0]))
    return at[kept], values[kept]


def smoothed(values: Floats, over: float) -> Floats:
    """The running mean whose weights fall by 1/e in `over` values; the first counts no more.

    Values that are not finite are left out.

    >>> smoothed(np.array([3.0, 3.0, np.nan, 3.0]), 2.0).round(12).tolist()
    [3.0, 3.0, 3.0, 3.0]
    """
    decay = np.exp(-1.0 / over)
    total = weight = 0.0
    means = np.full(len(values), np.nan)
    for number, value in enumerate(values.tolist()):
        if np.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1.0
        if weight:
            means[number] = total / weight
    return means


def _column(events: Sequence[StepMetrics] | Sequence[EvalMetrics], field: str) -> Floats:
    """One field of all events; NaN where it is unknown."""
    found = (getattr(event, field) for event in events)
    return np.array([np.nan if value is None else value for value in found], np.float64)


def _line(
    name: str, at: Floats, values: Floats, form: str, *, colour: str = _SMOOTH, width: float = 1.5
) -> go.Scatter:
    x, y = thinned(at, values)
    return go.Scatter(
        x=x, y=y, name=name, mode="lines+markers" if len(x) < FEW_STEPS else "lines",
        line={"color": colour, "width": width}, connectgaps=False,
        hovertemplate=f"step %{{x:,}}: {name} %{{y:{form}}}<extra></extra>",
    )  # fmt: skip


def _laid_out(figure: go.Figure, what: str, height: int) -> go.Figure:
    figure.update_layout(
        height=height, legend=_LEGEND, showlegend=len(figure.data) > 1, hovermode="closest",
        margin={"l": 80, "r": 30, "t": 40, "b": 50},
    )  # fmt: skip
    figure.update_xaxes(title_text="step", tickformat=",")
    figure.update_yaxes(title_text=what)
    return figure
