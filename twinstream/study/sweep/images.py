"""A sweep's heatmaps and curves as PNG files.

Drawn by matplotlib, which needs nothing but itself; plotly's own PNG export needs a Chrome.
"""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from twinstream.report.palette import series
from twinstream.schedule.files import write_bytes
from twinstream.study.sweep.config import SweepConfig
from twinstream.study.sweep.grids import Curves, Grid, curves, grids
from twinstream.study.sweep.rows import errors_note

_DPI = 110
_LINES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_MARKERS = {
    "circle": "o", "diamond": "D", "square": "s", "cross": "P", "x": "X", "triangle-up": "^",
    "star": "*",
}  # fmt: skip
_MOST_LABELLED = 150
_MOST_TICKS = 16
_WITH_COMMAS = "{x:,.0f}"


def write_images(
    config: SweepConfig, rows: Sequence[Mapping[str, str]], folder: Path
) -> list[Path]:
    """Write `heatmap*.png` and `curves*.png` into the folder, one per combination of other axes."""
    drawn = [("heatmap", grid.title, heatmap(grid)) for grid in grids(config, rows)]
    drawn += [("curves", one.title, curve_plot(one)) for one in curves(config, rows)]
    paths, errors = [], errors_note(rows)
    for kind, title, figure in drawn:
        figure.supxlabel(errors, fontsize=8, x=0.01, ha="left")
        suffix = re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-")
        path = folder / (f"{kind}-{suffix}.png" if suffix else f"{kind}.png")
        drawing = io.BytesIO()
        figure.savefig(drawing, format="png")
        write_bytes(drawing.getvalue(), path)
        paths.append(path)
    return paths


def heatmap(grid: Grid) -> Figure:
    """Four panels, one a metric; cells without a plan are grey."""
    num_y, num_x = len(grid.y_labels), len(grid.x_labels)
    figure = Figure(
        figsize=(min(15.0, max(10.0, 1.24 * num_x)), min(11.0, max(6.4, 0.6 * num_y + 2))),
        dpi=_DPI, layout="constrained",
    )  # fmt: skip
    figure.suptitle(grid.title if grid.any else f"{grid.title} nothing fits".strip())
    panels = figure.subplots(2, 2)
    for metric, axes in zip(grid.metrics, panels.flat, strict=True):
        levels = grid.levels[metric.column]
        axes.set_facecolor("#d9d9d9")
        image = axes.imshow(np.ma.masked_invalid(levels), origin="lower", aspect="auto")
        figure.colorbar(image, ax=axes, pad=0.015, format="{x:" + metric.form + "}")
        axes.set_title(metric.name, fontsize=11, fontweight="bold", loc="left")
        axes.set_xlabel(grid.x_name)
        axes.set_ylabel(grid.y_name)
        for axis, labels in ((axes.xaxis, grid.x_labels), (axes.yaxis, grid.y_labels)):
            every = -(-len(labels) // _MOST_TICKS)
            axis.set_ticks(range(0, len(labels), every), labels[::every], fontsize=8)
        axes.tick_params(axis="x", rotation=45 if num_x > 6 else 0)
        if levels.size <= _MOST_LABELLED:
            middle = np.nanmean(levels) if np.isfinite(levels).any() else 0.0
            for (y, x), level in np.ndenumerate(levels):
                if np.isfinite(level):
                    colour = "black" if level > middle else "white"
                    text = format(level, metric.form)
                    axes.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)
    return figure


def curve_plot(one: Curves) -> Figure:
    """Tokens/s over the first axis, a line per value of the second."""
    figure = Figure(figsize=(9.0, 5.0), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    axes.set_title(one.title if one.any else f"{one.title} nothing fits".strip(), fontsize=11)
    for number, (name, levels) in enumerate(one.lines.items()):
        look = series(number)
        axes.plot(
            one.positions, levels, label=name, marker=_MARKERS[look.symbol], markersize=5,
            linewidth=1.8, color=look.colour, linestyle=_LINES[look.dash],
        )  # fmt: skip
    axes.set_xlabel(one.x_name)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_WITH_COMMAS)
    if len(one.positions) <= _MOST_TICKS:
        axes.set_xticks(one.positions)
    axes.grid(visible=True, color="#e4e8ec")
    axes.spines[["top", "right"]].set_visible(False)
    if len(one.lines) > 1:
        axes.legend(fontsize=8, frameon=False, loc="lower right", ncols=-(-len(one.lines) // 12))
    return figure
