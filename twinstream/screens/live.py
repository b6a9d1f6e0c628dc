"""A run while it trains: one line that changes, and its loss as a curve of characters."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live
from rich.text import Text

from twinstream.log.metrics import PairMetrics
from twinstream.measures.metrics import rate_text

_REDRAWN_S = 0.25  # drawing takes time from what is trained
_STEPS_OF_PACE = 50
_WIDTH = 100  # of what is no terminal
_DOTS_X, _DOTS_Y = 2, 4  # of a braille character
_BRAILLE = 0x2800
_DOT_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
Grid = NDArray[np.bool_]
Floats = NDArray[np.float64]
Points = Sequence[tuple[float, float]] | Floats


class Step(Protocol):
    """What the line shows of a step; `StepMetrics` has it."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def grad_norm(self) -> float | None: ...
    @property
    def preference(self) -> PairMetrics | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def tokens_per_s(self) -> float: ...
    @property
    def predicted_tokens_per_s(self) -> float | None: ...


class Pace:
    """How long the steps still to come take, by the last ones: all that lies between included."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[int, float]] = deque(maxlen=_STEPS_OF_PACE)

    def __call__(self, step: Step) -> None:
        if not self._seen:
            self._seen.append((step.step - 1, self._clock() - step.seconds))
        self._seen.append((step.step, self._clock()))

    def left_s(self, total_steps: int) -> float | None:
        """Until the last step is done; None before the first."""
        if not self._seen:
            return None
        (first, start_s), (last, end_s) = self._seen[0], self._seen[-1]
        per_step_s = (end_s - start_s) / max(1, last - first)
        return max(0, total_steps - last) * per_step_s


class LiveLine:
    """A run's line: on a terminal one that changes, elsewhere a new one every few steps.

    Args:
        total_steps: of the whole run; None where it is not known.
        console: where to; by default standard output.
        every_steps, every_s: what is no terminal gets a line when so many steps or seconds have
            gone by since the last line; the first step and the last one always have one.
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        console: Console | None = None,
        every_steps: int | None = None,
        every_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._clock = total_steps, clock
        self._console = console or Console(highlight=False, markup=False)
        self._every_steps, self._every_s = every_steps, every_s
        self._pace = Pace(clock)
        self._shown: Step | None = None
        self._shown_s, self._waiting = -math.inf, ""
        self._live = Live(console=self._console, auto_refresh=False, redirect_stderr=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._waiting:
            self._show(self._waiting)
        if self._console.is_terminal:
            self._live.stop()

    def __call__(self, step: Step) -> None:
        """Show a step that is done."""
        self._pace(step)
        left_s = None if self._total is None else self._pace.left_s(self._total)
        width = self._console.width if self._console.is_terminal else _WIDTH
        self._waiting = step_line(step, self._total, left_s, width=width)
        if self._is_due(step):
            self._show(self._waiting)
            self._shown, self._waiting = step, ""

    def note(self, text: str) -> None:
        """A line that stays: an evaluation, a checkpoint, what was asked for."""
        self._console.print(Text(text))

    def _is_due(self, step: Step) -> bool:
        waited_s = self._clock() - self._shown_s
        if self._shown is None or self._console.is_terminal:
            return waited_s >= _REDRAWN_S
        steps = step.step - self._shown.step
        return waited_s >= self._every_s or (self._every_steps or math.inf) <= steps

    def _show(self, line: str) -> None:
        text = Text(line, no_wrap=True, overflow="ellipsis")
        if self._console.is_terminal:
            self._live.update(text, refresh=True)
        else:
            self._console.print(text, soft_wrap=True)
        self._shown_s = self._clock()


def step_line(
    step: Step, total_steps: int | None, left_s: float | None, *, width: int = _WIDTH
) -> str:
    """One line about a step; where it is too wide, what matters less is left out.

    Args:
        left_s: seconds until the run ends, if known.
    """
    of = "" if total_steps is None else f"/{total_steps:,}"
    parts = [
        (0, f"step {step.step:,}{of}"),
        (0, f"loss {step.loss:.4f}"),
        (2, "" if step.preference is None else step.preference.text),
        (3, f"lr {step.learning_rate:.2e}"),
        (4, "" if step.grad_norm is None else f"grad norm {step.grad_norm:.3g}"),
        (2, f"{rate_text(step.tokens_per_s)} tokens/s"),
        (5, _predicted(step)),
        (1, "" if left_s is None else f"{duration(left_s)} left"),
    ]
    for least in range(5, -1, -1):
        line = "  ".join(text for weight, text in parts if text and weight <= least)
        if len(line) <= width:
            return line
    return line[:width]


def _predicted(step: Step) -> str:
    predicted = step.predicted_tokens_per_s
    if predicted is None:
        return ""
    error = f", {predicted / step.tokens_per_s - 1:+.1%}" if step.tokens_per_s > 0 else ""
    return f"(predicted {rate_text(predicted)}{error})"


def duration(lasting_s: float) -> str:
    """
    >>> duration(42.4), duration(3661.0), duration(200_000.0)
    ('42 s', '1:01:01', '2 d 7 h')
    """
    if not math.isfinite(lasting_s):
        return "?"
    if lasting_s < 100:
        return f"{lasting_s:.0f} s"
    minutes, seconds = divmod(round(lasting_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{seconds:02}"


def loss_curve(points: Points, width: int = 78, height: int = 12) -> str:
    """Losses by step as a curve of braille characters, at most so wide and high.

    Each column of dots reaches from the least to the greatest loss of its steps, so no peak is
    lost however many there are. Steps without a finite loss are gaps, and are counted.

    Args:
        points: (step, loss) in the order of steps.
    """
    array = np.asarray(points, np.float64).reshape(-1, 2)
    steps, losses = array[:, 0], array[:, 1]
    finite = np.isfinite(losses)
    gaps = f"{_steps(int((~finite).sum()))} of {len(losses):,} without a finite loss"
    if not finite.any():
        return gaps if len(losses) else "no step has been done yet"
    low, high = float(losses[finite].min()), float(losses[finite].max())
    labels = [f"{high:.4g}", f"{low:.4g}"] if high > low else [f"{low:.4g}"]
    margin = max(map(len, labels)) + 1
    rows, columns = max(1, height - 1), max(1, width - margin - 1)
    drawn = _characters(_dots(steps, losses, rows, columns))
    shown = {0: labels[0], rows - 1: labels[-1]} if high > low else {rows // 2: labels[0]}
    lines = [
        f"{shown.get(row, ''):>{margin - 1}} |{text}".rstrip() for row, text in enumerate(drawn)
    ]
    first, last = f"step {steps[0]:,.0f}", f"{steps[-1]:,.0f}"
    axis = first if steps[0] == steps[-1] else f"{first}{last:>{max(0, columns - len(first))}}"
    below = [f"{'':{margin}} {axis}"]
    return "\n".join([*lines, *below, *([] if finite.all() else [gaps])])


def _steps(number: int) -> str:
    return f"{number:,} step" if number == 1 else f"{number:,} steps"


def _dots(steps: Floats, losses: Floats, rows: int, columns: int) -> Grid:
    """Which dots are set, top row first; flat curves run through the middle."""
    height, width = rows * _DOTS_Y, columns * _DOTS_X
    finite = np.isfinite(losses)
    low, high = losses[finite].min(), losses[finite].max()
    # Halves, because the difference of two finite losses may be none.
    range_half = high / 2 - low / 2
    share = (high / 2 - losses / 2) / range_half if range_half > 0 else np.full_like(losses, 0.5)
    across = steps[-1] - steps[0]
    x = (steps - steps[0]) / across * (width - 1) if across > 0 else np.zeros_like(steps)
    at_x = np.rint(x).astype(np.int64)
    at_y = np.rint(np.where(finite, share, 0.0) * (height - 1)).astype(np.int64)
    top, bottom = np.full(width, height), np.full(width, -1)
    np.minimum.at(top, at_x[finite], at_y[finite])
    np.maximum.at(bottom, at_x[finite], at_y[finite])
    moved = finite[:-1] & finite[1:] & (at_x[:-1] != at_x[1:])
    for one in np.flatnonzero(moved):  # at most as many as there are columns of dots
        x0, x1, y0, y1 = at_x[one], at_x[one + 1], at_y[one], at_y[one + 1]
        path_x = np.arange(x0, x1 + 1)
        edges = y0 + (y1 - y0) * np.clip((path_x[:, None] + [-0.5, 0.5] - x0) / (x1 - x0), 0, 1)
        ends = np.rint(edges).astype(np.int64)
        top[path_x] = np.minimum(top[path_x], ends.min(axis=1))
        bottom[path_x] = np.maximum(bottom[path_x], ends.max(axis=1))
    row = np.arange(height)[:, None]
    return (row >= top) & (row <= bottom)


def _characters(dots: Grid) -> list[str]:
    rows, columns = dots.shape[0] // _DOTS_Y, dots.shape[1] // _DOTS_X
    cells = dots.reshape(rows, _DOTS_Y, columns, _DOTS_X).transpose(0, 2, 1, 3)
    codes = _BRAILLE + (cells * _DOT_BITS).sum(axis=(2, 3))
    blank = chr(_BRAILLE)
    return ["".join(map(chr, row)).replace(blank, " ") for row in codes]
