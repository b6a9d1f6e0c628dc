"""A run's line and its loss curve: what they say, how often, and what shape they have."""

import io
import math
import time

import pytest
from rich.console import Console

from tests.training.test_metrics import step
from twinstream.screens.live import LiveLine, Pace, loss_curve, step_line

BLANK = 0x2800


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def train(line: LiveLine, clock: Clock, numbers, step_s: float = 0.5) -> None:
    for number in numbers:
        clock.now_s += step_s
        line(step(number, seconds=step_s))


# --- the line


def test_the_line_says_where_the_run_is_how_fast_and_how_long_still():
    shown = step_line(
        step(1200, 2.34567, learning_rate=3e-4, grad_norm=0.8123, tokens_per_s=11_000.0,
             predicted_tokens_per_s=11_110.0),
        10_000, 3661.0, width=200,
    )  # fmt: skip
    assert shown.split("  ") == [
        "step 1,200/10,000", "loss 2.3457", "lr 3.00e-04", "grad norm 0.812", "11,000 tokens/s",
        "(predicted 11,110, +1.0%)", "1:01:01 left",
    ]  # fmt: skip


def test_what_is_not_known_is_not_said():
    shown = step_line(step(1, math.nan, tokens_per_s=0.0, predicted_tokens_per_s=5.0), None, None)
    assert shown == "step 1  loss nan  lr 1.00e-03  0 tokens/s  (predicted 5)"


@pytest.mark.parametrize("width", [100, 80, 60, 40, 20, 5])
def test_a_narrow_line_keeps_what_matters_most(width):
    one = step(1200, grad_norm=0.8, predicted_tokens_per_s=210.0)
    shown = step_line(one, 10_000, 3661.0, width=width)
    assert len(shown) <= width
    assert shown.startswith("step 1,200/10,000"[:width])
    assert ("loss" in shown) == (width >= 40)
    assert ("left" in shown) == (width >= 60)


def test_the_time_left_counts_what_lies_between_steps():
    clock = Clock()
    pace = Pace(clock)
    assert pace.left_s(10) is None
    clock.now_s += 2.0
    pace(step(1, seconds=2.0))
    assert pace.left_s(10) == 9 * 2.0
    clock.now_s += 6.0  # two seconds of step, four of a checkpoint
    pace(step(2, seconds=2.0))
    assert pace.left_s(10) == 8 * (8.0 / 2)
    for number in range(3, 200):
        clock.now_s += 1.0
        pace(step(number, seconds=1.0))
    assert pace.left_s(299) == pytest.approx(100.0)


def lines_of(numbers, step_s=0.5, **settings) -> list[str]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=False)
    with LiveLine(100, console=console, clock=clock, **settings) as line:
        train(line, clock, numbers, step_s)
    return out.getvalue().splitlines()


def numbers_of(lines):
    return [int(line.split("/")[0].removeprefix("step ")) for line in lines]


def test_what_is_no_terminal_gets_a_line_every_few_steps_and_the_last():
    assert numbers_of(lines_of(range(1, 26), every_steps=10)) == [1, 11, 21, 25]


def test_what_is_no_terminal_gets_a_line_every_few_seconds_and_the_last():
    assert numbers_of(lines_of(range(1, 131))) == [1, 61, 121, 130]
    assert numbers_of(lines_of(range(1, 4), step_s=40.0)) == [1, 2, 3]


def test_a_run_that_goes_on_begins_at_its_step():
    (first, *_) = lines_of(range(51, 60))
    assert first.startswith("step 51/100")
    assert first.endswith("24 s left")  # 49 steps of half a second


def test_a_line_that_is_no_terminals_is_one_line():
    out = io.StringIO()
    with LiveLine(10**9, console=Console(file=out, force_terminal=False, width=20)) as line:
        line(step(10**8, grad_norm=1.0, predicted_tokens_per_s=210.0))
    assert len(out.getvalue().splitlines()) == 1


def test_a_terminals_line_is_drawn_over_and_notes_stay_above_it():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=60, legacy_windows=False)
    with LiveLine(100, console=console, clock=clock) as line:
        train(line, clock, [1, 2])
        line.note("checkpoint of step [2]")
        train(line, clock, [3, 4], step_s=0.01)
    shown = out.getvalue()
    assert "\x1b[2K" in shown  # a line is erased
    assert "checkpoint of step [2]" in shown
    assert "step 3/100" not in shown  # so soon after the one before it is not worth drawing
    assert shown.rindex("step 4/100") > shown.index("checkpoint")


# --- the curve


def dots(curve: str) -> list[list[bool]]:
    """The set dots of a curve, row by row."""
    rows = [line.partition("|")[2] for line in curve.splitlines() if "|" in line]
    width = max(map(len, rows))
    grid = [[False] * 2 * width for _ in range(4 * len(rows))]
    places = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]  # by bit
    for y, row in enumerate(rows):
        for x, character in enumerate(row):
            code = 0 if character == " " else ord(character) - BLANK
            assert 0 <= code < 256
            for bit, (down, right) in enumerate(places):
                grid[4 * y + down][2 * x + right] = bool(code >> bit & 1)
    return grid


def columns_with_dots(curve: str) -> list[bool]:
    return [any(column) for column in zip(*dots(curve), strict=True)]


def test_a_falling_loss_goes_from_the_upper_left_to_the_lower_right():
    curve = loss_curve([(1, 4.0), (11, 2.0)], width=40, height=6)
    grid = dots(curve)
    assert (grid[0][0], grid[-1][-1], grid[0][-1], grid[-1][0]) == (True, True, False, False)
    assert all(columns_with_dots(curve))
    heights = [next(y for y, row in enumerate(grid) if row[x]) for x in range(len(grid[0]))]
    assert heights == sorted(heights)
    first, *_, below, axis = curve.splitlines()
    assert (first.split("|")[0], below.split("|")[0]) == ("4 ", "2 ")
    assert axis.split() == ["step", "1", "11"]


@pytest.mark.parametrize(("width", "height"), [(78, 12), (30, 4), (10, 2), (3, 1)])
def test_a_curve_is_as_wide_and_high_as_asked(width, height):
    curve = loss_curve([(i, 3 - i / 50) for i in range(100)], width, height)
    rows = [line for line in curve.splitlines() if "|" in line]
    assert len(rows) == max(1, height - 1)
    if width >= 10:
        assert max(map(len, rows)) == width


def test_a_flat_loss_is_one_line_in_the_middle():
    grid = dots(loss_curve([(i, 2.5) for i in range(50)], 40, 6))
    (y,) = [y for y, row in enumerate(grid) if any(row)]
    assert all(grid[y])
    assert abs(y - (len(grid) - 1) / 2) <= 0.5


def test_one_point_is_one_dot():
    curve = loss_curve([(7, 2.5)], 40, 6)
    assert sum(map(sum, dots(curve))) == 1
    assert "2.5 |" in curve
    assert curve.endswith("step 7")


def test_steps_without_a_finite_loss_are_a_gap_and_counted():
    points = [(i, math.nan if 40 <= i < 60 else 2.0) for i in range(101)]
    curve = loss_curve(points, 55, 4)
    drawn = columns_with_dots(curve)
    assert not any(drawn[int(0.42 * len(drawn)) : int(0.58 * len(drawn))])
    assert all(drawn[: int(0.38 * len(drawn))])
    assert all(drawn[int(0.62 * len(drawn)) :])
    assert curve.endswith("20 steps of 101 without a finite loss")


def test_nothing_finite_and_nothing_at_all_are_said():
    assert loss_curve([]) == "no step has been done yet"
    assert loss_curve([(1, math.nan), (2, math.inf)]) == "2 steps of 2 without a finite loss"


def test_a_million_points_keep_their_peak_and_take_no_time():
    points = [(i, 2.0) for i in range(1_000_000)]
    points[500_000] = (500_000, 9.0)
    start_s = time.thread_time()
    curve = loss_curve(points, 78, 12)
    assert time.thread_time() - start_s < 5
    top = dots(curve)[0]
    assert sum(top) == 1
    assert abs(top.index(True) - len(top) / 2) < 3
    assert curve.startswith("9 |")


def test_losses_at_the_ends_of_what_a_float_holds_are_drawn():
    assert all(columns_with_dots(loss_curve([(1, 1.7e308), (2, -1.7e308)], 40, 6)))
