"""Pages, traces and the explorer show all ranks as measured beside their classes as predicted."""

import json
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.front_door.command_line import TINY_STEP, call, error_of
from tests.helpers.browser import browser_page
from tests.helpers.cluster_sketches import cluster, cluster_timeline, talk
from tests.helpers.sketches import op
from tests.helpers.trace_rules import faults
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.loader import save_machine
from twinstream.measures.metrics import summarize
from twinstream.report.bars import waiting_bars
from twinstream.report.palette import WAITING
from twinstream.report.ranks_part import RanksPart
from twinstream.report.report import report_html
from twinstream.report.view import MeshView, Span
from twinstream.schedule.cluster.splitting import expanded
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import read_document, write_document
from twinstream.schedule.timeline import PassSpans, Provenance, RankTimeline, Timeline
from twinstream.schedule.workload import Packing

SLOWER = 2
RANKS = [f"stage {pp}, dp {dp}" for pp in (0, 1) for dp in (0, 1)]


@dataclass(frozen=True)
class Four:
    """A plan of two stages and two replicas, and a run of it that took twice the prediction."""

    plan: Path
    predicted: Path
    measured: Path

    @property
    def both(self) -> tuple[object, ...]:
        return (self.plan, "--measured", self.measured)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Four:
    folder = tmp_path_factory.mktemp("four")
    made = Four(*(folder / f"{name}.json" for name in ("plan", "predicted", "measured")))
    layout = ("--ranks", 4, "--pp", 2, "--dp", 2, "--device-mem", "8MiB")
    cut = ("--chunk-tokens", 64, "--chunks-per-round", 1)
    for command in (
        ("plan", *TINY_STEP, *cut, "--machine", "cpu", *layout, "-o", made.plan),
        ("simulate", made.plan, "-o", made.predicted),
    ):
        outcome = call(*command)
        assert outcome.code == 0, outcome.err
    schedule = read_document(Schedule, made.plan)
    predicted = read_document(Timeline, made.predicted)
    write_document(measured_of(schedule, predicted), made.measured)
    return made


def measured_of(schedule: Schedule, predicted: Timeline) -> Timeline:
    """All ranks as predicted, but so many times slower."""
    slow = {name: slower(line) for name, line in predicted.classes.items()}
    return predicted.model_copy(
        update={
            "classes": slow,
            "ranks": {
                one.name: slow[one.name.partition(",")[0]] for one in expanded(schedule).classes
            },
            "step_ns": predicted.step_ns * SLOWER,
            "clock_error_ns": 7_000,
            "provenance": Provenance(kind="measured", where="here"),
        }
    )


def slower(line: RankTimeline) -> RankTimeline:
    def spans(one: PassSpans) -> PassSpans:
        return PassSpans(
            start_ns=tuple(SLOWER * ns for ns in one.start_ns),
            end_ns=tuple(SLOWER * ns for ns in one.end_ns),
        )

    passes = tuple(spans(one) for one in line.passes)
    return line.model_copy(update={"passes": passes, "step_ns": line.step_ns * SLOWER})


@pytest.fixture(scope="module")
def page(four: Four) -> Path:
    path = four.plan.with_name("page.html")
    assert call("report", *four.both, "-o", path).code == 0
    return path


def sections_of(page: Path) -> dict[str, str]:
    """What stands below each heading."""
    parts = page.read_text(encoding="utf-8").split("<h2>")[1:]
    return {part.partition("<")[0]: part for part in parts}


def figure_of(section: str) -> dict[str, dict[str, object]]:
    (text,) = re.findall(r'data-figure="\w+">(.*?)</script>', section, re.DOTALL)
    return json.loads(text)


def test_one_page_has_the_lanes_of_all_ranks_measured_below_those_predicted(four, page):
    sections = sections_of(page)
    names = list(sections)
    before, after = (f"The whole step, as {what}" for what in ("predicted", "measured"))
    assert names.index(before) < names.index(after)
    shown = [figure_of(sections[name])["layout"] for name in (before, after)]
    groups = [[note["text"] for note in one["annotations"]] for one in shown]
    assert groups[0] == ["<b>stage 0</b>, 2 ranks", "<b>stage 1</b>, 2 ranks"]
    assert groups[1] == [f"<b>{name}</b>, 1 rank" for name in RANKS]
    assert shown[0]["xaxis"]["range"] == shown[1]["xaxis"]["range"]
    alone = page.with_name("alone.html")
    assert call("report", four.plan, "-o", alone).code == 0
    ends = figure_of(sections_of(alone)["The whole step"])["layout"]["xaxis"]["range"]
    assert shown[0]["xaxis"]["range"][1] == pytest.approx(SLOWER * ends[1])
    assert "right within 7 us" in sections[after]


def test_the_page_says_how_far_the_prediction_is_off(page):
    html = page.read_text(encoding="utf-8")
    assert "the prediction is -50.0%" in html
    compared = sections_of(page)["Predicted against measured"]
    for rank in RANKS:
        assert f"<td>{rank}</td><td>compute</td>" in compared
    errors = set(re.findall(r"<td class=number>([+-][0-9.]+%)</td></tr>", compared))
    assert "-50.0%" in errors and "What compute waited for, as measured" in html


def test_a_schedule_without_its_cluster_is_of_processes_here_and_that_is_assumed(four, page):
    html = page.read_text(encoding="utf-8")
    assert "tiny on 4 ranks of this machine" in html
    assert "Assumed: " in html and "gloo over loopback" in html
    assert "gloo over loopback" in call("simulate", four.plan, "--json").json()["assumed"]


def test_the_profile_beside_a_schedule_is_that_of_its_cluster(four, tmp_path):
    plan = tmp_path / "mine.json"
    plan.write_bytes(four.plan.read_bytes())
    h100 = load_cluster("h100_dgx")
    save_machine(machine_of(h100), tmp_path / "node.toml")
    profile = 'base = "h100_dgx"\nname = "mine"\nmachine = "node.toml"\n'
    (tmp_path / "mine.toml").write_text(profile)
    told = call("simulate", plan, "--json").json()
    assert told["simulated_on"] == "mine" and told["assumed"] is None
    given = call("simulate", plan, "--cluster", "h100_dgx", "--json").json()
    assert given["simulated_on"] == "h100_dgx"
    (tmp_path / "mine.toml").write_text("name = 3\n")
    assert "mine.toml" in error_of("simulate", plan)


def test_json_has_the_step_measured_beside_the_one_predicted(four, tmp_path):
    told = call("report", *four.both, "-o", tmp_path / "page.html", "--json").json()
    assert told["measured"]["step_time_s"] == pytest.approx(2 * told["predicted"]["step_time_s"])
    assert told["measured"]["tokens_per_s"] == pytest.approx(
        told["predicted"]["tokens_per_step"] / told["measured"]["step_time_s"]
    )
    alone = call("report", four.plan, "-o", tmp_path / "page.html", "--json").json()
    assert "measured" not in alone


def test_a_trace_has_a_process_for_each_rank_behind_the_classes_and_all_begin_together(
    four, tmp_path
):
    path = tmp_path / "trace.json"
    told = call("trace", *four.both, "-o", path, "--json").json()
    assert "4 classes of 4 ranks" in told["measured"]
    trace = json.loads(path.read_text())
    assert faults(trace) == []
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)] == [
        "predicted: stage 0, 2 ranks", "predicted: stage 1, 2 ranks",
        *(f"measured: {name}, 1 rank" for name in RANKS),
    ]  # fmt: skip
    slices = [e for e in events if e["ph"] == "X"]
    first = {}
    for which in ("predicted", "measured"):
        mine = [e for e in slices if names[e["pid"]].startswith(which)]
        first[which] = min(e["ts"] for e in mine if "block" in e["cat"] or "embed" in e["cat"])
    assert first["predicted"] == first["measured"] and min(e["ts"] for e in slices) == 0
    arrows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) > 0


def test_the_explorer_shows_both(four):
    pytest.importorskip("dash", reason="Dash is not installed")
    from twinstream.study.explore.clusters import ShownCluster, clusters_part

    schedule = read_document(Schedule, four.plan)
    lines = [read_document(Timeline, path) for path in (four.predicted, four.measured)]
    machine = machine_of(load_cluster("h100_dgx"))
    shown = ShownCluster("mine.json", schedule, lines[0], machine, lines[1], ("Assumed: all.",))
    assert any(line.endswith("predicted is -50.0%.") for line in shown.lines())
    assert "Assumed: all." in shown.lines() and "Assumed: all." in shown.page()
    assert "The whole step, as measured" in shown.page()
    before, after = shown.figures()
    (short,) = RanksPart(schedule, lines[0], machine).figures()
    assert before.layout.xaxis.range == after.layout.xaxis.range
    assert after.layout.xaxis.range[1] == pytest.approx(SLOWER * short.layout.xaxis.range[1])
    assert after.layout.annotations[0].text == "<b>stage 0, dp 0</b>, 1 rank"
    drawn = str(clusters_part([shown]))
    assert "cluster-0" in drawn and "measured-0" in drawn
    alone = str(clusters_part([ShownCluster("mine.json", schedule, lines[0], machine)]))
    assert "measured-0" not in alone


def test_the_command_gives_the_explorer_what_was_measured(four, monkeypatch):
    serving = pytest.importorskip("werkzeug.serving", reason="Dash is not installed")
    pytest.importorskip("dash", reason="Dash is not installed")
    served = []
    monkeypatch.setattr(serving, "run_simple", lambda host, port, app, **rest: served.append(app))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert call("explore", *four.both, "--port", port).code == 0
    answer = served[0].test_client().get("/cluster/0")
    assert "The whole step, as measured" in answer.text and "Assumed: " in answer.text


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_single_straggler_has_other_classes_than_were_measured(four, command):
    said = error_of(command, *four.both, "--straggler", "rank 1=2")
    assert "leave --straggler or --measured out" in said


def test_what_was_measured_of_another_schedule_is_refused(four, cluster_file):
    for command in ("report", "trace"):
        assert "error: " in error_of(command, cluster_file, "--measured", four.measured)
    assert "is a schedule" in error_of("explore", four.plan, "--measured", four.plan)
    said = error_of("explore", "--measured", four.measured)
    assert "there are 0 schedules, and 1 --measured" in said


def test_who_comes_early_waits_in_its_lane():
    schedule = cluster(
        {
            "a": [op("a", "compute"), talk("send", "send.next", ("a",))],
            "b": [talk("recv", "recv.prev"), op("b", "compute", ("recv",))],
        },
        [("a", "send"), ("b", "recv")],
    )
    passes = {"a": [[(100, 140), (140, 150)]], "b": [[(90, 150), (150, 170)]]}
    view = MeshView("predicted", schedule, cluster_timeline(schedule, passes))
    first, second = view.classes
    assert waiting_bars(first, view.whole) == []
    (wait,) = waiting_bars(second, view.whole)
    assert (wait.queue, wait.key, wait.start_ns, wait.end_ns) == ("recv", WAITING, 100, 140)
    assert "b waits 0.05 us for the others" in wait.text
    assert waiting_bars(second, Span(140, 170)) == []


def test_packed_sequences_are_shorter_and_the_tokens_of_a_step_are_those_of_its_chunks(four):
    schedule = read_document(Schedule, four.plan)
    predicted = read_document(Timeline, four.predicted)
    assert (schedule.tokens_per_step, schedule.is_packed) == (256, False)
    packing = Packing(most_sequences=2, expected_lengths=(48, 16))
    parts = {
        name: part.model_copy(
            update={"workload": part.workload.model_copy(update={"packing": packing})}
        )
        for name, part in schedule.schedules.items()
    }
    packed = schedule.model_copy(update={"schedules": parts, "global_batch": 8})
    assert (packed.tokens_per_step, packed.is_packed) == (256, True)
    machine = machine_of(load_cluster("h100_dgx"))
    summary = summarize(packed, predicted, machine)
    assert summary.tokens_per_s == pytest.approx(256e9 / predicted.step_ns)
    assert "8 sequences of at most 64" in report_html(packed, machine, predicted=predicted)


def test_the_cap_of_ranks_is_what_a_rank_has(four):
    schedule = read_document(Schedule, four.plan)
    predicted = read_document(Timeline, four.predicted)
    machine = machine_of(load_cluster("h100_dgx"))
    assert summarize(schedule, predicted, machine).device_bytes == 8 * 2**20


def test_a_browser_draws_every_figure_and_does_not_complain(page):
    with browser_page() as opened:
        opened.page.goto(f"file://{page}")
        opened.page.wait_for_selector("#figure1 .main-svg")
        assert opened.page.locator(".plot-container").count() == 5
        assert [text for text in opened.complaints if "willReadFrequently" not in text] == []
