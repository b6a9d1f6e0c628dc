"""Prediction errors by sequence length, one panel a machine, as SVG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _STEP = 420, 260, 60, 46, 520
_MOST = 0.10
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


@dataclass(frozen=True)
class Dot:
    """One schedule; `error` is predicted / measured - 1 of tokens/s."""

    seq_len: int
    error: float
    model: str
    calibrated: bool
    stalled: bool


def plot(panels: Mapping[str, Sequence[Dot]]) -> str:
    """Dots: one schedule each; filled squares were calibrated with, rings stall over 10 %."""
    parts = []
    models = sorted({dot.model for dots in panels.values() for dot in dots})
    colours = dict(zip(models, _COLOURS, strict=False))
    for i, (model, colour) in enumerate(colours.items()):
        parts.append(f'<circle cx="{_LEFT + 80 * i}" cy="14" r="4" fill="{colour}"/>')
        parts.append(_text(_LEFT + 10 + 80 * i, 18, model, "start"))
    note = "square: calibration cell; ring: stalled over 10 %"
    parts.append(_text(_LEFT + 80 * len(models) + 10, 18, note, "start"))
    for number, (name, dots) in enumerate(panels.items()):
        left = _LEFT + number * _STEP
        parts += _axes(left, name, dots)
        lengths = sorted({dot.seq_len for dot in dots})
        for i, dot in enumerate(dots):
            jitter = 0.35 * ((i * 0.618) % 1.0 - 0.5)
            x = left + _place(dot.seq_len, lengths, jitter)
            y = _TOP + _HEIGHT * (0.5 - max(-1.0, min(1.0, dot.error / _MOST)) / 2)
            parts.append(_mark(x, y, dot, colours[dot.model]))
    width = _LEFT + len(panels) * _STEP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_TOP + _HEIGHT + 50}"'
    style = 'font-family="sans-serif" font-size="12"'
    back = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f"{head} {style}>", back, *parts, "</svg>", ""])


def _axes(left: float, name: str, dots: Sequence[Dot]) -> list[str]:
    lengths = sorted({dot.seq_len for dot in dots})
    parts = [_text(left + _WIDTH / 2, _TOP - 8, f"{name}: predicted / measured tokens/s - 1")]
    for percent in range(-10, 11, 5):
        y = _TOP + _HEIGHT * (0.5 - percent / 100 / _MOST / 2)
        colour = "#888" if percent == 0 else "#ddd"
        parts.append(f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="{colour}"/>')
        parts.append(_text(left - 6, y + 4, f"{percent:+d}%", "end"))
    for length in lengths:
        shown = f"{length // 1024}k" if length >= 1024 else str(length)
        parts.append(_text(left + _place(length, lengths, 0.0), _TOP + _HEIGHT + 18, shown))
    parts.append(_text(left + _WIDTH / 2, _TOP + _HEIGHT + 38, "tokens of a sequence"))
    return parts


def _place(length: int, lengths: Sequence[int], jitter: float) -> float:
    low, high = math.log2(lengths[0]) - 0.5, math.log2(lengths[-1]) + 0.5
    return _WIDTH * (math.log2(length) + jitter - low) / (high - low)


def _mark(x: float, y: float, dot: Dot, colour: str) -> str:
    if dot.calibrated:
        at = f'x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"'
        return f'<rect {at} fill="{colour}" stroke="black"/>'
    if dot.stalled:
        at = f'cx="{x:.1f}" cy="{y:.1f}" r="4"'
        return f'<circle {at} fill="none" stroke="{colour}" stroke-width="2"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}" fill-opacity="0.6"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
