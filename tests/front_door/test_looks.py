"""Pages are readable: colours that differ, nothing empty, and a phone's width."""

from itertools import combinations

import plotly.graph_objects as go

from tests.front_door.small_schedule import small_schedule, timeline
from tests.helpers.browser import browser_page
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.report.page import Card, Page, Section, Table, html_of
from twinstream.report.palette import SERIES_COLOURS, series
from twinstream.report.report import report_html
from twinstream.study.answer import Step
from twinstream.study.sweep.config import config_of
from twinstream.study.sweep.grids import Curves
from twinstream.study.sweep.pages import curves_figure, sweep_html
from twinstream.study.whatif.screen import tornado_figure
from twinstream.study.whatif.whatif import Gain, Sensitivity, WhatIf

PAPERS = ("#ffffff", "#14181d")


def luminance(colour: str) -> float:
    """Of WCAG 2.2, relative luminance."""
    levels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in levels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def nine_lines() -> Curves:
    lines = {f"machine {number}": (1.0 + number, 2.0 + number) for number in range(9)}
    return Curves("", "device memory, GiB", (4.0, 6.0), ("4GiB", "6GiB"), lines)


def test_nine_machines_have_nine_colours_that_are_seen_on_both_papers():
    assert len({trace.line.color for trace in curves_figure(nine_lines()).data}) == 9
    for colour in SERIES_COLOURS:
        assert min(contrast(colour, paper) for paper in PAPERS) > 2.2, colour


def test_more_machines_than_colours_look_different_still():
    assert len(machine_names()) > len(SERIES_COLOURS)
    looks = [series(number) for number in range(36)]
    for one, other in combinations(looks, 2):
        assert (one.colour, one.dash) != (other.colour, other.dash)
        assert (one.colour, one.pattern) != (other.colour, other.pattern)


def what_if(changes=(-0.5, -0.1, 0.1, 1.0)) -> WhatIf:
    found = tuple(Gain(change=c, tokens_per_s=100 * (1 + c / 2)) for c in changes)
    base = Step.model_construct(tokens_per_s=100.0)
    one = Sensitivity.model_construct(
        name="HBM", unit="GB/s", value=20.0, price_tokens_per_s=1.5, changes=found
    )
    return WhatIf.model_construct(base=base, sensitivities=(one,))


def test_swatches_of_small_and_large_changes_differ_as_their_bars_do():
    traces = tornado_figure(what_if()).data
    assert {trace.name for trace in traces} == {"-50%", "-10%", "+10%", "+100%"}
    # A swatch shows the colour, and no opacity.
    assert len({trace.marker.color for trace in traces}) == 4
    assert {trace.marker.opacity for trace in traces} == {None}


def test_what_a_step_lacks_is_said_and_not_drawn_as_an_empty_chart():
    line = timeline(100, 50, 10, 40, 20, 80)
    page = report_html(small_schedule(), load_machine("cpu"), predicted=line)
    assert "Nothing is recomputed: all that backward needs is saved." in page
    assert "% of its blocks" not in page


def config():
    axes = {"device_mem": ["1MiB", "2MiB"], "seq_len": [64, 128]}
    fixed = {"model": "tiny", "machine": "cpu", "policy": "streaming"}
    return config_of({"fixed": fixed, "axes": axes}, source="test", folder=None)


def failed_rows():
    return [
        {"device_mem": size, "seq_len": length, "status": "infeasible", "seconds": "1",
         "reason": f"too small for {length}"}
        for size in ("1MiB", "2MiB") for length in ("64", "128")
    ]  # fmt: skip


def test_a_sweep_in_which_nothing_fits_says_why_and_draws_nothing():
    page = sweep_html(config(), failed_rows())
    assert "data-figure=" not in page.partition("<body>")[2]
    assert "No cell could be planned" in page
    assert "too small for 128" in page


def test_an_error_stands_in_small_type_beside_a_cards_number():
    page = html_of(Page("", "", [Card("speed", "11,114 +/- 1.0 %")], [], ""))
    assert '<div class="value">11,114 <span class="error">+/- 1.0 %</span></div>' in page


COVERED = """() => [...document.querySelectorAll(".js-plotly-plot")].flatMap((plot) => {
  const bar = plot.querySelector(".modebar").getBoundingClientRect();
  return [...plot.querySelectorAll(".legend, .colorbar, .annotation, .nsewdrag")].filter((part) => {
    const box = part.getBoundingClientRect();
    return box.width && box.left < bar.right && bar.left < box.right && box.top < bar.bottom;
  }).map((part) => `${plot.id}: ${part.getAttribute("class")} ${part.textContent}`);
})"""


def test_no_toolbar_covers_a_legend_or_a_scale(tmp_path):
    above = {"orientation": "h", "y": 1.0, "yanchor": "bottom"}
    rows = go.Figure([go.Bar(x=[1], y=["a"], name=f"a name of a task {n}") for n in range(16)])
    rows.update_layout(height=150, legend=above, margin={"t": 54, "l": 90, "r": 20, "b": 45})
    scale = go.Figure(go.Heatmap(z=[[1, 2], [3, 4]]))
    scale.update_layout(height=250, margin={"t": 20})
    corner = go.Figure([go.Scatter(x=[1, 2], y=[1, 2], name=name) for name in "ab"])
    corner.update_layout(height=250, legend={"x": 1, "y": 1.2, "xanchor": "right"})
    figures = [Section("", "", one, half=True) for one in (rows, scale, corner)]
    path = tmp_path / "page.html"
    path.write_text(html_of(Page("Figures", "", [], figures, "")))
    for width in (1400, 390):
        with browser_page(width=width) as opened:
            opened.page.goto(f"file://{path}")
            opened.page.wait_for_selector("#figure2 .main-svg")
            opened.page.wait_for_timeout(300)  # figures that grow are drawn again
            assert opened.page.evaluate(COVERED) == [], width
            assert opened.complaints == []


PLAYED = """() => {
  const [line] = document.getElementsByClassName("playhead");
  const told = document.querySelector("output").textContent;
  return [line.style.display, parseFloat(line.style.left), told];
}"""


def test_a_step_is_played_back_on_its_timeline(tmp_path):
    """The line stands where the slider is, tells what runs there, and goes on by itself."""
    path = tmp_path / "page.html"
    measured = timeline(100, 50, 10, 40, 20, 80)
    path.write_text(report_html(small_schedule(), load_machine("cpu"), predicted=measured))
    with browser_page() as opened:
        page = opened.page
        page.goto(f"file://{path}")
        slider, button = page.locator(".player input").first, page.locator(".player button").first
        slider.wait_for()
        seen = []
        for place in (300, 600):
            slider.fill(str(place))
            shown, left_px, told = page.evaluate(PLAYED)
            assert shown == "block" and "on the device" in told
            seen.append((left_px, told))
        drawn = page.locator("#figure0 .nsewdrag, [id^=figure] .nsewdrag").first.bounding_box()
        assert abs(seen[1][0] - seen[0][0] - 0.3 * drawn["width"]) < 2
        assert seen[0][1] != seen[1][1]
        button.click()
        page.wait_for_function("() => document.querySelector('.player input').value > 610")
        assert button.inner_text() == "pause"
        button.click()
        assert button.inner_text() == "play"
        assert opened.complaints == []


def test_a_page_without_figures_has_no_plotly():
    text = html_of(Page("Words", "", [], [Section("a", "", Table(["x"], [["1"]]))], ""))
    assert len(text) < 20_000 and "<td>1</td>" in text


def test_a_page_on_a_phone_is_as_wide_as_the_phone_and_its_figures_fill_it(tmp_path):
    path = tmp_path / "page.html"
    cards = [Card("throughput, tokens/s", f"{n}1,114 +/- 1.0 %", "measured 9") for n in range(6)]
    figure = curves_figure(nine_lines())
    sections = [Section("wide", "", figure), Section("half", "", figure, half=True)]
    path.write_text(html_of(Page("A page", "with cards", cards, sections, "")))
    with browser_page(dark=True, width=390) as opened:
        page = opened.page
        page.goto(f"file://{path}")
        page.wait_for_selector("#figure1 .main-svg")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        plot = page.locator("#figure0 .nsewdrag").first.bounding_box()
        assert plot["width"] > 390 / 2
        tops = [page.locator(".card").nth(i).bounding_box()["y"] for i in range(3)]
        assert tops[0] == tops[1] < tops[2]
        assert page.evaluate(
            "[...document.querySelectorAll('.card')].every(c => c.scrollWidth <= c.clientWidth)"
        )
