"""Schedules of clusters on the explorer's page are those of the command line."""

import shlex
import socket
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("dash", reason="Dash is not installed")

from tests.front_door.command_line import call, error_of
from tests.front_door.test_explorer import TINY, complaints, served
from tests.helpers.browser import browser_page
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.loader import load_machine
from twinstream.measures.metrics import rate_text
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import read_document
from twinstream.schedule.timeline import Timeline
from twinstream.simulator.replay import simulate
from twinstream.study.answer import Answer
from twinstream.study.explore.answers import Answers, State
from twinstream.study.explore.app import explorer
from twinstream.study.explore.clusters import ShownCluster, clusters_part
from twinstream.study.explore.show import Found, column, compared, more_of, timeline_of


@pytest.fixture(scope="module")
def shown(cluster_file: Path) -> ShownCluster:
    schedule = read_document(Schedule, cluster_file)
    cluster = load_cluster("h100_dgx")
    machine = machine_of(cluster)
    line = simulate(schedule, machine, cluster)
    return ShownCluster("mine.json", schedule, line, machine)


def test_headlines_are_those_that_simulate_prints(shown, cluster_file):
    printed = call("simulate", cluster_file).out
    assert shown.lines()[1] in printed
    page = str(clusters_part([shown]))
    assert all(line in page for line in shown.lines())


def test_the_report_is_one_link_away(shown):
    client = explorer(Answers({}, {}), [shown]).server.test_client()
    answer = client.get("/cluster/0")
    assert answer.status_code == 200 and "tiny on 16 GPUs of h100_dgx" in answer.text
    assert client.get("/cluster/1").status_code == 404


def test_the_page_draws_the_lanes_below_the_plans(shown):
    with served(explorer(Answers({}, {}), [shown])) as address, browser_page() as opened:
        opened.page.goto(address + TINY.url)
        opened.page.wait_for_selector("#cluster-0 .main-svg")
        assert "stage 1" in opened.page.inner_text("#cluster-0")
        assert opened.page.inner_text("#clusters h2") == "mine.json"
        assert complaints(opened) == []


def test_one_device_s_schedule_is_shown_as_a_mesh_of_one(files):
    shown = ShownCluster(
        "mine.json",
        files.read_schedule(),
        read_document(Timeline, files.predicted),
        load_machine("cpu"),
    )
    speed = rate_text(call("simulate", files.schedule, "--json").json()["tokens_per_s"])
    assert f"{speed} tokens/s" in str(clusters_part([shown]))
    client = explorer(Answers({}, {}), [shown]).server.test_client()
    assert client.get("/cluster/0").status_code == 200


def test_a_file_without_a_schedule_is_refused(files):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said = error_of("explore", files.predicted, "--port", port)
    assert "is a timeline, not a schedule" in said


ON_GPUS = State(
    model="1b", machines="h100_dgx", seq_len="512", tokens_per_step="8,192", gpus="8"
)  # fmt: skip


def test_a_cluster_is_answered_with_the_layout_of_the_command_shown():
    answers = Answers({}, {})
    assert {"h100", "h100_dgx"} <= set(answers.machines)
    found = answers.answer(ON_GPUS, "h100_dgx")
    _, *arguments = shlex.split(answers.command(ON_GPUS, "h100_dgx"))
    assert arguments[:3] == ["plan", "--model", "1b"]
    (best, *_) = call(*arguments, "--json").json()["layouts"]
    assert (found.layout_text, found.tokens_per_s) == (best["layout_text"], best["tokens_per_s"])
    shown = Found("h100_dgx", ON_GPUS, found)
    page = str(column(shown, 1, "the command"))
    assert best["layout_text"] in page and f"{best['tokens_per_s']:,.0f}" in page
    assert "h100_dgx" in str(compared([shown] * 4))
    assert "timeline-h100_dgx" in str(timeline_of("h100_dgx", found))
    assert more_of({"h100_dgx": found}).children is None  # its bound has no prices


def test_the_report_of_a_layout_is_one_link_away():
    client = explorer(Answers({}, {})).server.test_client()
    answer = client.get(f"/report{ON_GPUS.url}&machine=h100_dgx")
    assert answer.status_code == 200 and "1b on 8 GPUs of h100_dgx" in answer.text


def test_a_cap_is_of_each_gpu_of_a_cluster():
    found = Answers({}, {}).answer(replace(ON_GPUS, device_mem="30GiB"), "h100_dgx")
    assert isinstance(found, Answer)
    assert found.room_bytes[0] == 30 * 2**30 >= found.device_bytes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": ""}, "gpus is missing"),
        ({"gpus": "0"}, "GPUs needs a whole number from 1"),
        ({"tokens_per_step": "100"}, "a step is whole sequences"),
        ({"device_mem": "200GiB"}, "is more than"),
    ],
)
def test_what_a_cluster_cannot_be_asked_is_an_error(changes, said):
    found = Answers({}, {}).answer(replace(ON_GPUS, **changes), "h100_dgx")
    assert isinstance(found, TwinstreamError)
    assert said in str(found)
