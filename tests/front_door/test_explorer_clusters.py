"""Schedules of clusters on the explorer's page are those of the command line."""

import socket
from pathlib import Path

import pytest

pytest.importorskip("dash", reason="Dash is not installed")

from tests.front_door.command_line import call, error_of
from tests.front_door.test_explorer import TINY, complaints, served
from tests.helpers.browser import browser_page
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.files import read_document
from twinstream.simulator.replay import simulate_cluster
from twinstream.study.explore.answers import Answers
from twinstream.study.explore.app import explorer
from twinstream.study.explore.clusters import ShownCluster, clusters_part


@pytest.fixture(scope="module")
def shown(cluster_file: Path) -> ShownCluster:
    schedule = read_document(ClusterSchedule, cluster_file)
    cluster = load_cluster("h100_dgx")
    machine = machine_of(cluster)
    line = simulate_cluster(schedule, cluster, machine)
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


def test_a_file_without_a_cluster_s_schedule_is_refused(files):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said = error_of("explore", files.schedule, "--port", port)
    assert "is a schedule, not a cluster schedule" in said
