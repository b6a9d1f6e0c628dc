"""`report DIR`: a run's page has its series, and says what it lacks."""

import base64
import json
import math
import re

import numpy as np
import pytest

from tests.front_door.command_line import TINY_STEP, call, error_of
from tests.front_door.small_schedule import small_schedule, timeline
from tests.helpers.browser import browser_page
from tests.training.run_folders import loss_at, write_run
from tests.training.test_metrics import step
from twinstream.log.metrics import FILE, MetricsLog
from twinstream.measures.residence import residence
from twinstream.report.run_figures import loss_figure, memory_figure, smoothed, thinned
from twinstream.schedule.analysis.comparison import compare
from twinstream.schedule.files import write_document


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with all that a run may have."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "shakespeare")
    outcome = call("plan", *TINY_STEP, "--machine", "cpu", "--device-mem", "6MiB",
                   "--policy", "streaming", "-o", folder / "plan.json")  # fmt: skip
    assert outcome.code == 0, outcome.err
    (folder / "run.toml").write_text('model = "tiny"\ndata = "</script><b>a & b"\n')
    predicted, measured = (timeline(*[ns] * 6, step_ns=6.0 * ns) for ns in (100, 80))
    write_document(compare(small_schedule(), predicted, measured), folder / "comparison.json")
    return folder


@pytest.fixture(scope="module")
def html(run):
    return written(run)


def written(folder):
    path = folder.parent / f"{folder.name}.html"
    outcome = call("report", folder, "-o", path)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith(f"Wrote {path}")
    return path.read_text()


def series_of(html) -> dict[str, dict[str, np.ndarray]]:
    """Each figure's curves by name, as the page holds them, by the heading above it."""
    found = {}
    for part in html.split("<h2>")[1:]:
        for text in re.findall(r'data-figure="\w+">(.*?)</script>', part, re.DOTALL):
            traces = json.loads(text)["data"]
            found[part.partition("<")[0]] = {trace.get("name", ""): trace for trace in traces}
    return found


def numbers(array) -> list[float]:
    """What plotly writes of an array: in base64 or as a list."""
    if isinstance(array, dict):
        return np.frombuffer(base64.b64decode(array["bdata"]), array["dtype"]).tolist()
    return [math.nan if value is None else value for value in array]


def test_the_page_holds_all_series_and_nothing_from_elsewhere(html):
    assert re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=", html) == []
    found = series_of(html)
    loss = found["Loss"]
    assert numbers(loss["train"]["x"]) == list(range(1, 41))
    assert numbers(loss["train"]["y"]) == pytest.approx([loss_at(i) for i in range(1, 41)])
    assert len(numbers(loss["train, smoothed"]["y"])) == 40
    assert numbers(loss["evaluation"]["x"]) == [10, 20, 30, 40]
    assert numbers(loss["evaluation"]["y"]) == [1.0] * 4
    (rate,) = found["Learning rate"].values()
    assert numbers(rate["y"]) == pytest.approx([i * 1e-5 for i in range(1, 41)])
    (norm,) = found["Gradient norm"].values()
    assert numbers(norm["y"]) == pytest.approx([1 / i for i in range(1, 41)])
    speed = found["Speed"]
    assert set(numbers(speed["measured"]["y"])) == {200.0}
    assert set(numbers(speed["predicted"]["y"])) == {210.0}
    assert {"parameter", "gradient", "optimizer state"} <= found["Memory by role"].keys()
    assert "Bytes copied in one step" in found


def test_the_headlines_are_those_of_the_log(html):
    for value, note in (
        ("40", "4.00 epochs"),
        (f"{loss_at(40):.4f}", f"of the last step; {loss_at(1):.4f} at step 1"),
        ("1.0000", "perplexity 2.718; best 1.0000 at step 10"),
        ("4,000", "without padding"),
        ("200", "median; predicted 210, +5.0%"),
        ("20 s", "evaluations took 0 s, checkpoints held the device 0 s"),
        ("2", "the newest of step 40, 1024.00 GiB"),
    ):
        assert re.search(rf'class="value( long)?">{re.escape(value)}</div>'
                         rf'<div class="note">{re.escape(note)}</div>', html), value  # fmt: skip


def test_checkpoints_options_and_the_comparison_are_tables_and_text(html):
    assert (
        "<td>checkpoints/20</td><td class=number>20</td><td class=number>1024.00 GiB</td>" in html
    )
    written_in = "<td class=number>3.000 s</td><td class=number>366.50</td>"  # 2**40 bytes
    assert f"{written_in}<td class=number>250.00 ms</td>" in html
    assert "&lt;/script&gt;&lt;b&gt;a &amp; b" in html
    compared = html.partition("Predicted against measured")[2]
    assert "<td>step</td>" in compared
    assert "<td class=number>+25.0%</td>" in compared  # 100 ns predicted, 80 ns measured


def test_what_a_run_does_not_have_is_said(tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    with MetricsLog(folder / FILE) as log:
        log.append(step(1, 3.0))
        log.append(step(2, math.nan))
    html = written(folder)
    for sentence in (
        "There was no evaluation.", "Steps without a finite loss: 1 (2).", "It was not computed.",
        "Nothing was predicted.", "None has been written.", "It has no plan.json.",
    ):  # fmt: skip
        assert sentence in html, sentence
    found = series_of(html)
    assert found.keys() == {"Loss", "Learning rate", "Speed"}
    assert found["Loss"].keys() == {"train"}
    assert numbers(found["Loss"]["train"]["y"]) == pytest.approx([3.0, math.nan], nan_ok=True)


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / FILE).touch()
    assert "No step has been done yet." in written(tmp_path / "new")


def test_json_has_the_run_in_few_numbers(run, tmp_path):
    found = call("report", run, "-o", tmp_path / "page.html", "--json").json()
    assert found["size_bytes"] == (tmp_path / "page.html").stat().st_size
    assert found["run"]["num_steps"] == found["run"]["last_step"] == 40
    assert found["run"]["best_eval_step"] == 10
    assert found["run"]["last_loss"] == pytest.approx(loss_at(40))


def test_a_plan_for_a_machine_that_is_not_known_is_shown_all_the_same(run, tmp_path):
    folder = write_run(tmp_path / "mine")
    plan = json.loads((run / "plan.json").read_text())
    plan["machine"]["name"] = "my workstation"
    (folder / "plan.json").write_text(json.dumps(plan))
    html = written(folder)
    assert "one op after the other in the plan" in html
    assert "parameter" in series_of(html)["Memory by role"]
    assert "as predicted" in written(run)


def test_the_memory_bars_add_up_to_what_is_taken():
    schedule = small_schedule()
    found = residence(schedule, timeline(100, 50, 10, 40, 20, 80))
    bars = memory_figure(schedule, found).data
    assert sum(bar.x[0] for bar in bars) * 2**20 == pytest.approx(1536 + 100)
    assert sum(bar.x[1] for bar in bars) * 2**20 == pytest.approx(2560)


# --- folders that are none


def test_a_folder_without_a_run_says_what_it_has_and_what_to_give(tmp_path):
    assert "it has nothing, but no metrics.jsonl" in error_of("report", tmp_path)
    for number in range(10):
        (tmp_path / f"file{number}").touch()
    message = error_of("report", tmp_path)
    assert "it has file0, file1, " in message
    assert "file7 and 2 more, but no metrics.jsonl; give a schedule, or a folder with" in message
    (tmp_path / "plan.json").touch()
    assert f"or the schedule {tmp_path / 'plan.json'}" in error_of("report", tmp_path)
    one = write_run(tmp_path / "one", 1)
    assert f"give the folder of one run: {one}" in error_of("report", tmp_path)


def test_a_damaged_log_or_comparison_is_named(tmp_path):
    folder = write_run(tmp_path / "run", 3)
    (folder / "comparison.json").write_text("{}")
    assert f"{folder / 'comparison.json'} is not a valid comparison" in error_of("report", folder)
    (folder / FILE).write_text("{}\n")
    assert f"{folder / FILE}:1: no event of a run" in error_of("report", folder)


def test_timelines_and_the_files_of_a_run_are_not_for_its_page(tmp_path):
    folder = write_run(tmp_path / "run", 3)
    assert "leave them out" in error_of("report", folder, "--measured", folder / FILE)
    before = (folder / FILE).read_bytes()
    assert "another file" in error_of("report", folder, "-o", folder / FILE)
    assert (folder / FILE).read_bytes() == before
    assert call("report", folder, "-o", folder / "report.html").code == 0
    assert call("report", folder, "-o", folder / "report.html").code == 0


# --- few points


def test_few_points_stay_and_many_keep_their_peaks_in_order():
    at = np.arange(100_000.0)
    losses = np.sin(at / 9000)
    losses[43_210], losses[77_777] = 9.0, -9.0
    x, y = thinned(at, losses, 200)
    assert len(x) <= 200
    assert list(x) == sorted(set(x.tolist()))
    assert dict(zip(x, y, strict=True))[43_210] == 9.0
    assert dict(zip(x, y, strict=True))[77_777] == -9.0
    same = thinned(at[:200], losses[:200], 200)
    assert np.array_equal(same, (at[:200], losses[:200]))


def test_what_is_not_finite_is_a_gap_in_few_points_and_in_many():
    at, losses = np.arange(1000.0), np.ones(1000)
    losses[400:600] = np.inf
    for most in (2000, 100):
        x, y = thinned(at, losses, most)
        gaps = x[np.isnan(y)]
        assert len(gaps) > 0
        assert all(400 <= gap < 600 for gap in gaps)


def test_the_running_mean_weighs_what_is_near():
    values = np.array([1.0, 2.0, np.nan, 4.0])
    w = math.exp(-1 / 3)
    expected = [1.0, (w + 2) / (w + 1), (w + 2) / (w + 1), (w * w + 2 * w + 4) / (w * w + w + 1)]
    assert smoothed(values, 3.0).tolist() == pytest.approx(expected)
    assert np.isnan(smoothed(np.array([np.nan]), 3.0)).all()


def test_a_long_run_is_a_small_figure():
    steps = [step(number) for number in range(1, 30_001)]
    assert len(loss_figure(steps, []).to_json()) < 150_000


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_draws_every_figure_and_does_not_complain(html, run, dark):
    with browser_page(dark=dark) as opened:
        opened.page.goto(f"file://{run.parent / 'shakespeare.html'}")
        opened.page.wait_for_selector("#figure0 .main-svg")
        assert opened.page.locator(".plot-container").count() == len(series_of(html))
        assert [text for text in opened.complaints if "willReadFrequently" not in text] == []
