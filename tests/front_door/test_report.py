"""The report: one page that shows a schedule's timelines as they are."""

import json
import re

import pytest

import twinstream as ts
from tests.front_door.command_line import call, error_of
from tests.front_door.conftest import Files
from tests.helpers.browser import browser_page
from twinstream.hardware_profiles.loader import load_machine
from twinstream.measures.metrics import summarize
from twinstream.report import bars
from twinstream.report.bars import merged_bars, op_bars, shrunk
from twinstream.report.view import View, memory_curve, memory_samples, view_of
from twinstream.schedule.files import read_document
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.timeline import Timeline

LARGEST_BYTES = 10_000_000


@pytest.fixture(scope="module")
def page(files: Files, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    outcome = call(
        "report", files.schedule, "--predicted", files.predicted, "--measured", files.measured,
        "-o", path,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    return path


@pytest.fixture(scope="module")
def view(files: Files) -> View:
    return view_of("predicted", files.read_schedule(), read_document(Timeline, files.predicted))


def figures_of(page):
    found = re.findall(r'data-figure="(\w+)">(.*?)</script>', page.read_text(), re.DOTALL)
    return {name: json.loads(text) for name, text in found}


def test_the_page_holds_all_it_needs_and_stays_small(page):
    html = page.read_text()
    assert page.stat().st_size < LARGEST_BYTES
    assert re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=", html) == []
    assert len(figures_of(page)) == 6
    assert "Nothing is recomputed" in html


def test_the_headlines_are_those_of_the_summary(page, files):
    schedule, machine = files.read_schedule(), load_machine("cpu")
    predicted, measured = (
        summarize(schedule, read_document(Timeline, path), machine)
        for path in (files.predicted, files.measured)
    )
    html = page.read_text()
    assert f">{predicted.tokens_per_s:,.0f}</div>" in html
    assert f"measured {measured.tokens_per_s:,.0f};" in html
    assert f">{predicted.mfu:.1%}</div>" in html


def test_every_op_of_the_round_is_a_bar_at_its_time(page, view):
    span = view.round_span(view.schedule.workload.rounds_per_step // 2)
    (first, *_) = figures_of(page).values()
    charts = [t for t in first["data"] if t["type"] == "bar" and t["yaxis"] == "y"]
    drawn = [text for t in charts for text in t["hovertext"]]
    assert sorted(drawn) == sorted(bar.text for bar in op_bars(view, span))
    assert any("waited" in text for text in drawn)


def test_the_hover_says_op_tensor_bytes_and_wait(view):
    found = {bar.text.split("</b>")[0]: bar.text for bar in op_bars(view, view.whole)}
    copy = next(op for op in view.schedule.ops if op.kind == "copy")
    text = found[f"<b>{copy.op_id}"]
    assert f"tensor {copy.tensor} (" in text
    assert "moved" in text
    waiting = next(name for name, idle in view.idle.items() if idle.waited_for)
    assert f"for {view.idle[waiting].waited_for}" in found[f"<b>{waiting}"]


def test_merged_bars_stand_for_every_op_once(view):
    assert sum(bar.num_ops for bar in merged_bars(view)) == len(view.schedule.ops)


def test_many_ops_are_merged_into_few_bars(view, monkeypatch):
    monkeypatch.setattr(bars, "MOST_MERGED", 10)
    found = merged_bars(view)
    assert sum(bar.num_ops for bar in found) == len(view.schedule.ops)
    assert max(sum(bar.queue == q for bar in found) for q in view.lanes) <= 10 + 1


def test_a_long_round_is_shown_in_a_window_around_its_loss(view):
    whole = view.round_span(1)
    window = shrunk([view], whole, most_ops=20)
    assert 0 < len(view.within(window)) <= 20
    assert whole.start_ns <= window.start_ns < window.end_ns <= whole.end_ns
    kinds = {view.colour_key(view.schedule.ops[i]) for i in view.within(window)}
    assert "head_loss" in kinds


def test_the_memory_curve_keeps_the_peak(view):
    samples = memory_samples(view, DEVICE)
    inside = [s for s in samples if view.whole.start_ns <= s.start_ns <= view.whole.end_ns]
    curve = memory_curve(samples, view.whole, 7)
    peak = max(sum(levels) for levels in zip(*curve.bytes_by_role.values(), strict=True))
    assert peak == max(sample.total_bytes for sample in inside)


def test_without_a_prediction_the_schedule_is_simulated(files, tmp_path):
    path = tmp_path / "report.html"
    found = call("report", files.schedule, "-o", path, "--json").json()
    assert found["size_bytes"] == path.stat().st_size
    expected = call("simulate", files.schedule, "--json").json()["tokens_per_s"]
    assert found["predicted"]["tokens_per_s"] == expected
    assert "measured" not in found


def test_python_writes_the_page_of_the_command(files, page, tmp_path):
    path = tmp_path / "report.html"
    lines = (read_document(Timeline, one) for one in (files.predicted, files.measured))
    predicted, measured = lines
    ts.write_report(path, files.read_schedule(), "cpu", predicted=predicted, measured=measured)
    assert path.read_text() == page.read_text()


def test_a_timeline_in_the_place_of_the_other_is_refused(files, tmp_path):
    path = tmp_path / "report.html"
    message = error_of("report", files.schedule, "--predicted", files.measured, "-o", path)
    assert "measured, not simulated" in message
    assert not path.exists()


def test_a_timeline_of_another_schedule_is_refused(files, tmp_path):
    path = tmp_path / "other.json"
    document = json.loads(files.predicted.read_text())
    document["op_ids"][0] = "nobody"
    path.write_text(json.dumps(document))
    assert "not the schedule's" in error_of(
        "report", files.schedule, "--predicted", path, "-o", tmp_path / "report.html"
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_draws_every_figure_and_does_not_complain(page, dark):
    with browser_page(dark=dark) as opened:
        opened.page.goto(f"file://{page}")
        opened.page.wait_for_selector("#figure1 .main-svg")
        assert opened.page.locator(".plot-container").count() == len(figures_of(page))
        theme = opened.page.evaluate("document.documentElement.dataset.theme")
        assert theme == ("dark" if dark else "light")
        opened.page.click("#theme")
        assert opened.page.evaluate("document.documentElement.dataset.theme") != theme
        # plotly.js draws on canvases that Chromium would like to know about; nothing else.
        assert [text for text in opened.complaints if "willReadFrequently" not in text] == []
