"""Which rows of a sweep nothing beats: no other is as fast for less money, memory or GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from twinstream.report.palette import series
from twinstream.study.sweep.grids import Metric

Rows = Sequence[Mapping[str, str]]
_GIB = 1 / 2**30
COSTS = (
    Metric("money_per_billion_tokens", "money a billion tokens", form=",.4g"),
    Metric("device_peak_bytes", "device memory, GiB", _GIB, ",.4g"),
    Metric("memory_bytes", "memory of a GPU, GiB", _GIB, ",.4g"),
    Metric("host_peak_bytes", "host memory, GiB", _GIB, ",.4g"),
    Metric("num_gpus", "GPUs"),
)
"""What speed is bought with, of which less is better."""


@dataclass(frozen=True)
class Front:
    """Rows by what they cost and how fast they are.

    Attributes:
        points: of each row its cost, in the metric's unit, and tokens/s; the cheapest first.
        best: indices of those that nothing beats: any row that costs no more is slower.
    """

    cost: Metric
    points: tuple[tuple[float, float], ...]
    labels: tuple[str, ...]
    best: tuple[int, ...]


def fronts(rows: Rows, labels: Sequence[str]) -> list[Front]:
    """Return a front for each cost that the rows differ in.

    Args:
        rows: with a plan.
        labels: what tells each from the others.
    """
    found = []
    for cost in COSTS:
        known = [
            (row, told) for row, told in zip(rows, labels, strict=True) if row.get(cost.column)
        ]
        points = [
            (float(row[cost.column]) * cost.scale, float(row["tokens_per_s"]), told)
            for row, told in known
        ]
        if len({paid for paid, _, _ in points}) < 2:
            continue
        points.sort(key=lambda point: (point[0], -point[1]))
        best: list[int] = []
        for place, (_, speed, _) in enumerate(points):
            if not best or speed > points[best[-1]][1]:
                best.append(place)
        pairs = tuple((paid, speed) for paid, speed, _ in points)
        found.append(Front(cost, pairs, tuple(told for _, _, told in points), tuple(best)))
    return found


def front_figure(front: Front) -> go.Figure:
    """Tokens/s over what they cost: all rows as points, those that nothing beats as a line."""
    others = [place for place in range(len(front.points)) if place not in front.best]
    figure = go.Figure()
    for places, name, mode, look in (
        (others, "beaten", "markers", series(1)),
        (front.best, "nothing beats", "lines+markers", series(0)),
    ):
        figure.add_trace(
            go.Scatter(
                x=[front.points[place][0] for place in places],
                y=[front.points[place][1] for place in places],
                text=[front.labels[place] for place in places], mode=mode, name=name,
                line={"shape": "hv", "color": look.colour, "width": 2},
                marker={"size": 7, "symbol": look.symbol, "color": look.colour},
                hovertemplate=f"%{{text}}<br>{front.cost.name} %{{x:{front.cost.form}}}<br>"
                "%{y:,.0f} tokens/s<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(
        height=380, xaxis={"title": {"text": front.cost.name}, "rangemode": "tozero"},
        yaxis={"title": {"text": "tokens/s"}, "rangemode": "tozero", "tickformat": ","},
        margin={"l": 80, "r": 30, "t": 20, "b": 50},
    )  # fmt: skip
    return figure
