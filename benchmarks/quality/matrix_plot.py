"""A plot of the quality matrix as SVG: gap, tokens/s and seconds to plan, by device memory."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.quality.matrix_cells import MODELS, state_gib
from benchmarks.quality.matrix_row import Row

_WIDTH, _HEIGHT, _LEFT, _TOP, _STEP = 300, 230, 60, 46, 390
_COLOURS = dict(zip(MODELS, ("#0072b2", "#009e73", "#e69f00", "#d55e00"), strict=True))


@dataclass(frozen=True)
class _Axis:
    """From values to a share of the axis; its ticks have a label each."""

    low: float
    high: float
    log: bool
    unit: str = ""

    @staticmethod
    def of(values: Sequence[float], *, log: bool, unit: str = "") -> "_Axis":
        if log:
            low, high = min(values), max(values)
            return _Axis(low / 1.15, high * 1.15, log, unit)
        return _Axis(0.0, max(values) * 1.05 or 1.0, log, unit)

    def place(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            tens = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [m * 10.0**n for n in tens for m in (1, 3)]
            return [tick for tick in found if self.low <= tick <= self.high]
        rough = self.high / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)
        return [step * i for i in range(int(self.high / step) + 1)]

    def label(self, tick: float) -> str:
        return f"{tick:,.0f}" if tick >= 1000 else f"{tick:.3g}{self.unit}"


def plot(rows: Sequence[Row]) -> str:
    """Three panels over device cap / model state (8 bytes a parameter), one dot per cell."""
    done = [row for row in rows if row["status"] == "ok"]
    panels: tuple[tuple[str, Callable[[Row], float], bool, str], ...] = (
        ("step above the family's bound", lambda r: 100 * float(r["gap_family"]), False, " %"),
        ("tokens/s", lambda r: float(r["tokens_per_s"]), True, ""),
        ("seconds to plan", lambda r: max(0.01, float(r["plan_seconds"])), True, ""),
    )
    parts = [_text(_LEFT, 18, f"Quality matrix, {len(done)} cells", "start")]
    for i, (model, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<circle cx="{260 + 60 * i}" cy="14" r="4" fill="{colour}"/>')
        parts.append(_text(268 + 60 * i, 18, model, "start"))
    for number, (title, figure, log, unit) in enumerate(panels if done else ()):
        shifted = f'<g transform="translate({_LEFT + number * _STEP},{_TOP})">'
        parts += [shifted, *_panel(done, title, figure, log=log, unit=unit), "</g>"]
    size = f'width="{_LEFT + 3 * _STEP - 30}" height="{_TOP + _HEIGHT + 45}"'
    style = 'font-family="sans-serif" font-size="11"'
    white = '<rect width="100%" height="100%" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{white}'
    return "\n".join([head, *parts, "</svg>", ""])


def _panel(
    rows: Sequence[Row], title: str, figure: Callable[[Row], float], *, log: bool, unit: str
) -> list[str]:
    shares = [float(row["device_gib"]) / state_gib(row["model"]) for row in rows]
    across = _Axis.of(shares, log=True)
    up = _Axis.of([figure(row) for row in rows], log=log, unit=unit)
    parts = [_text(_WIDTH / 2, -8, title), _text(_WIDTH / 2, _HEIGHT + 34, "device cap / state")]
    parts.append(f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>')
    for tick in across.ticks():
        parts.append(_text(_WIDTH * across.place(tick), _HEIGHT + 16, across.label(tick)))
    for tick in up.ticks():
        y = _HEIGHT * (1 - up.place(tick))
        parts.append(f'<path d="M0 {y:.1f}H{_WIDTH}" stroke="#ddd"/>')
        parts.append(_text(-6, y + 4, up.label(tick), "end"))
    for row, share in zip(rows, shares, strict=True):
        x, y = _WIDTH * across.place(share), _HEIGHT * (1 - up.place(figure(row)))
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOURS[row["model"]]}"'
        parts.append(f'{dot} fill-opacity="0.6"/>')
    return parts


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
