"""A cluster's page and trace: every op in its lane, coloured by axis or phase, at its time."""

import json
import re
from pathlib import Path

import pytest

from tests.front_door.command_line import call
from tests.helpers.browser import browser_page
from tests.helpers.cluster_sketches import cluster, cluster_timeline, talk
from tests.helpers.sketches import op
from tests.helpers.trace_rules import faults
from twinstream.clusters.timed_step import document_of
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.measures.metrics import Summary, summarize
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.presets import load_preset
from twinstream.report import bars
from twinstream.report.bars import merged_bars, op_bars, shrunk
from twinstream.report.lanes_figure import lanes_figure
from twinstream.report.palette import AXIS_COLOURS, PHASE_COLOURS
from twinstream.report.report import report_html
from twinstream.report.share_figures import MEAN, device_memory_figure, exposed_figure
from twinstream.report.trace import trace_of
from twinstream.report.view import MeshView, Span, phase_of, shown_classes
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import read_document
from twinstream.schedule.ops import Compute
from twinstream.schedule.timeline import Timeline
from twinstream.simulator.replay import simulate


@pytest.fixture(scope="module")
def schedule(cluster_file: Path) -> Schedule:
    return read_document(Schedule, cluster_file)


@pytest.fixture(scope="module")
def line(schedule: Schedule) -> Timeline:
    h100 = load_cluster("h100_dgx")
    return simulate(schedule, machine_of(h100), h100)


@pytest.fixture(scope="module")
def summary(schedule: Schedule, line: Timeline) -> Summary:
    return summarize(schedule, line, machine_of(load_cluster("h100_dgx")))


@pytest.fixture(scope="module")
def view(schedule: Schedule, line: Timeline) -> MeshView:
    return MeshView("predicted", schedule, line)


@pytest.fixture(scope="module")
def page(cluster_file: Path, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert call("report", cluster_file, "-o", path).code == 0
    return path


def figures_of(page):
    found = re.findall(r'data-figure="(\w+)">(.*?)</script>', page.read_text(), re.DOTALL)
    return {name: json.loads(text) for name, text in found}


def two_stages():
    """Stage `a` computes and sends; stage `b` comes early and waits."""
    schedule = cluster(
        {
            "a": [op("a", "compute"), talk("send", "send.next", ("a",))],
            "b": [talk("recv", "recv.prev"), op("b", "compute", ("recv",))],
        },
        [("a", "send"), ("b", "recv")],
    )
    passes = {"a": [[(100, 140), (140, 150)]], "b": [[(90, 150), (150, 170)]]}
    return schedule, cluster_timeline(schedule, passes)


def test_every_class_has_a_group_of_lanes_and_every_axis_its_own(view):
    for one in view.classes:
        expected = {"compute", "tp", "cp", "dp", "send", "recv", "all_ranks"}
        assert set(one.lanes) == expected and one.lanes[0] == "compute"


LAYOUTS = {
    "plain": Layout(pp=2),
    "offload": Layout(pp=2, dp=2, offload=True),
    "ring": Layout(cp=2, tp=2, zero=3, dp=2, recompute="full"),
    "zero bubble": Layout(pp=2, tp=2, pipeline="zero_bubble"),
    "all at the end": Layout(dp=2, tp=2, dp_overlap=False, recompute="selective"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_task_of_a_layout_has_a_phase(layout):
    shape = load_preset("tiny")
    job = Job(shape=shape, layout=layout, seq_len=64, global_batch=8)
    document = document_of(job, load_cluster("h100_dgx"))
    tasks = [op for part in document.schedules.values() for op in part.ops]
    phases = {op.op_id: phase_of(op) for op in tasks if isinstance(op, Compute)}
    assert {name for name, phase in phases.items() if phase == "other"} == set()
    assert {"forward", "backward", "optimizer"} <= set(phases.values())


def test_recompute_and_the_passes_of_a_ring_are_told_apart(view, schedule):
    found = {key for one in view.classes for key in one.key}
    assert set(PHASE_COLOURS) - found == {"other"}
    for one in schedule.classes:
        for task in schedule.of(one).ops:
            if isinstance(task, Compute) and task.call.endswith(".b"):
                assert phase_of(task) == "backward"


def test_what_is_said_is_drawn_from_when_all_sides_have_come():
    view = MeshView("predicted", *two_stages())
    assert view.whole == Span(100, 170)
    found = op_bars(view.classes[1], view.whole)
    drawn = {bar.queue: (bar.key, bar.start_ns, bar.end_ns) for bar in found}
    assert drawn == {"recv": ("transfer", 140, 150), "compute": ("other", 150, 170)}
    (told,) = [bar.text for bar in found if bar.queue == "recv"]
    assert "waited 0.05 us for the others" in told and "recv over pp" in told


def test_bars_lie_on_the_lane_of_their_class_in_the_colour_of_their_axis():
    view = MeshView("predicted", *two_stages())
    figure = lanes_figure(view.classes, view.whole)
    ticks = dict(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext, strict=True))
    assert list(ticks.values()) == ["compute", "send", "compute", "recv"]
    bottom, top = figure.layout.yaxis.range  # the axis runs down: the first class is on top
    assert list(ticks) == sorted(ticks) and top < min(ticks) and max(ticks) < bottom
    (messages,) = [trace for trace in figure.data if trace.name == "message of the pipeline"]
    assert messages.marker.color == AXIS_COLOURS["transfer"]
    assert [ticks[place] for place in messages.y] == ["send", "recv"]
    assert [base * 1e6 for base in messages.base] == pytest.approx([40, 40])
    assert [length * 1e6 for length in messages.x] == pytest.approx([10, 10])
    groups = [note.text for note in figure.layout.annotations]
    assert groups == ["<b>a</b>, 2 ranks", "<b>b</b>, 2 ranks"]


def test_many_ops_are_few_bars_that_last_as_long_as_they(view, monkeypatch):
    def busy_ns(found):
        return sum(bar.end_ns - bar.start_ns for bar in found if bar.queue == "compute")

    monkeypatch.setattr(bars, "MOST_BARS", 1)
    for one in view.classes:
        every = op_bars(one, view.whole)
        merged = merged_bars(one, view.whole, len(view.classes))
        assert sum(bar.num_ops for bar in merged) == len(one.within(view.whole))
        for lane in one.lanes:
            assert sum(bar.queue == lane for bar in merged) <= 51
        assert len(merged) < len(every)
        assert busy_ns(merged) == busy_ns(every)


def test_a_window_has_few_ops_and_lies_in_the_step(view):
    window = shrunk(view.classes, view.whole, most_ops=40)
    assert 0 < sum(len(one.within(window)) for one in view.classes) <= 40
    assert view.whole.start_ns < window.start_ns < window.end_ns < view.whole.end_ns


def test_of_many_classes_the_first_the_last_and_some_between_are_shown(view):
    many = [view.classes[0]] * 30 + [view.classes[1]]
    found = shown_classes(many, 16)
    assert len(found) == 16
    assert (found[0].name, found[-1].name) == (view.classes[0].name, view.classes[1].name)
    assert shown_classes(many[:16], 16) == many[:16]


def test_stacks_of_exposed_time_are_the_whole_step(summary):
    names = [one.name for one in summary.exposed]
    figure = exposed_figure(summary, names)
    assert list(figure.data[0].y) == [*names, MEAN]
    for number in range(len(names) + 1):
        assert sum(trace.x[number] for trace in figure.data) == pytest.approx(100)
    drawn = {trace.name: trace for trace in figure.data}
    first = summary.exposed[0]
    share = 100 * first.causes_ns["bubble"] / first.step_ns
    assert drawn["bubble of the pipeline"].x[0] == pytest.approx(share)
    assert drawn["tp"].marker.color == AXIS_COLOURS["tp"]


def test_stacks_of_memory_are_what_a_rank_takes_beside_what_it_has(summary):
    names = [one.name for one in summary.exposed]
    figure = device_memory_figure(summary, names)
    for number, name in enumerate(names):
        total = sum(trace.x[number] for trace in figure.data)
        assert total * 2**30 == pytest.approx(sum(summary.memory_bytes[name].values()))
    (cap,) = figure.layout.shapes
    assert cap.x0 * 2**30 == pytest.approx(summary.device_bytes)
    assert figure.layout.xaxis.range[1] > cap.x0


def test_the_page_holds_all_it_needs(page, summary):
    html = page.read_text()
    assert page.stat().st_size < 8_000_000
    assert re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=", html) == []
    assert "tiny on 16 GPUs of h100_dgx" in html
    assert f">{summary.tokens_per_s:,.0f}</div>" in html
    assert len(figures_of(page)) == 3


def test_a_step_of_many_ops_has_a_window_too(schedule, line, monkeypatch):
    monkeypatch.setattr("twinstream.report.ranks_part.MOST_OPS", 50)
    html = report_html(schedule, machine_of(load_cluster("h100_dgx")), predicted=line)
    assert "A window" in html and "around the middle of the step, op by op" in html


def test_a_browser_draws_every_figure_and_does_not_complain(page):
    with browser_page() as opened:
        opened.page.goto(f"file://{page}")
        opened.page.wait_for_selector("#figure2 .main-svg")
        assert opened.page.locator(".plot-container").count() == 3
        assert [text for text in opened.complaints if "willReadFrequently" not in text] == []


def test_the_trace_keeps_the_rules_and_has_a_process_for_each_class(view):
    trace = trace_of([view])
    assert faults(trace) == []
    events = trace["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"{one.name}, {one.num_ranks} ranks" for one in view.classes]
    for pid, one in enumerate(view.classes, start=1):
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        assert len(slices) == len(one.ops)
        threads = {e["tid"] for e in slices}
        assert len(threads) == len({op.stream.queue for op in one.ops})


def test_an_arrow_goes_from_who_sends_to_who_waits():
    trace = trace_of([MeshView("predicted", *two_stages())])
    assert faults(trace) == []
    messages = [e for e in trace["traceEvents"] if e.get("cat") == "exchange"]
    (start,) = [e for e in messages if e["ph"] == "s"]
    (end,) = [e for e in messages if e["ph"] == "f"]
    # Times in us from the first op, which is the receiver's that waits, at 90 ns.
    assert (start["pid"], start["ts"], end["pid"], end["ts"]) == (1, 0.05, 2, 0.059)
    waits = {e["name"]: e["args"].get("waited_us") for e in trace["traceEvents"] if e["ph"] == "X"}
    assert waits["recv"] == 0.05 and waits["send"] == 0.0


def test_a_long_trace_is_cut_to_a_window_and_says_so(view):
    cut = trace_of([view], most_ops=60)
    slices = [e for e in cut["traceEvents"] if e["ph"] == "X"]
    assert 0 < len(slices) <= 60
    assert faults(cut) == []
    assert f"{len(slices)} of " in cut["otherData"]["predicted"]


def test_the_command_writes_the_trace(cluster_file, tmp_path):
    path = tmp_path / "trace.json"
    told = call("trace", cluster_file, "-o", path, "--json").json()
    written = json.loads(path.read_text())
    assert told["num_events"] == len(written["traceEvents"])
    assert faults(written) == []
