"""What is wrong in a fleet's file is one line: what, where, and what to do."""

import pytest

from tests.fleet.small_fleets import speed
from tests.front_door.command_line import error_of
from twinstream.fleet.jobs import FleetError, load_fleet
from twinstream.fleet.plan import plan_fleet
from twinstream.fleet.rates import tasks_of
from twinstream.schedule.errors import TwinstreamError

JOB = {
    "name": '"a"', "model": '"8b"', "tokens": '"1B"', "seq_len": '"4k"', "global_batch": "128",
}  # fmt: skip
TOP = {"cluster": '"h100_dgx"', "nodes": "2"}


def text(top=None, job=None, jobs: int = 1) -> str:
    """A file with these values instead; None: left out."""
    found = {**TOP, **(top or {})}, {**JOB, **(job or {})}
    lines = [[f"{k} = {v}" for k, v in each.items() if v is not None] for each in found]
    return "\n".join([*lines[0], *["[[jobs]]", *lines[1]] * jobs])


@pytest.mark.parametrize(
    ("top", "job", "said"),
    [
        ({"node": "2"}, {}, "unknown 'node': did you mean 'nodes'?"),
        ({}, {"deadline": "2"}, "job 'a': unknown 'deadline': did you mean 'deadline_hours'?"),
        ({"nodes": None}, {}, "nodes is missing"),
        ({}, {"name": None}, "job 1: name is missing"),
        ({"nodes": "0"}, {}, "nodes needs to be greater than 0"),
        ({}, {"tokens": "-5"}, "job 'a': tokens needs to be greater than 0"),
        ({}, {"tokens": '"lots"'}, "job 'a': tokens needs to be a valid integer"),
        ({}, {"seq_len": "0"}, "job 'a': seq_len needs to be greater than 0"),
        ({}, {"elastic": '"yes"'}, "job 'a': elastic needs to be a valid boolean"),
        ({}, {"deadline_hours": "-1"}, "job 'a': deadline_hours needs to be greater than"),
        ({}, {"deadline_hours": "nan"}, "job 'a': deadline_hours needs to be"),
        ({}, {"arrives_hours": "5", "deadline_hours": "4"}, "is not after arrives_hours = 5"),
        ({}, {"global_batch": None}, "job 'a' needs global_batch or tokens_per_step"),
        ({}, {"tokens_per_step": "8192"}, "job 'a' needs global_batch or tokens_per_step"),
        ({}, {"nodes": "[1, 4]"}, "job 'a': nodes = 4 are more than the 2 of the cluster"),
        ({}, {"nodes": "[]"}, "job 'a': nodes"),
        ({"price_per_gpu_hour": "-1"}, {}, "price_per_gpu_hour needs to be a price from 0"),
        ({"failures_per_node_hour": "-1"}, {}, "failures_per_node_hour needs to be"),
        ({"checkpoint_interval_s": "0"}, {}, "checkpoint_interval_s needs to be greater than 0"),
        ({"failures_per_node_hour": "100"}, {}, "is a failure of 2 nodes every 18 s"),
        ({"objective": '"fast"'}, {}, "objective needs to be 'deadlines' or 'makespan'"),
    ],
)
def test_a_wrong_value_is_told(tmp_path, top, job, said):
    file = tmp_path / "jobs.toml"
    file.write_text(text(top, job))
    with pytest.raises(FleetError) as error:
        load_fleet(file)
    told = str(error.value)
    assert told.startswith(str(file)) and said in told and "\n" not in told


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"nodes = ", "is not valid TOML"),
        (b"\xff\xfe", "is not valid TOML"),
        (b"", "cluster is missing"),
        (b"jobs = 5\ncluster = 'a'\nnodes = 1\n", "job 1"),
        (b"jobs = []\ncluster = 'a'\nnodes = 1\n", "jobs"),
    ],
)
def test_a_file_that_is_none_is_told(tmp_path, content, said):
    file = tmp_path / "jobs.toml"
    file.write_bytes(content)
    assert said in error_of("fleet", file)


def test_two_jobs_of_one_name_are_told(tmp_path):
    (tmp_path / "jobs.toml").write_text(text(jobs=2))
    with pytest.raises(FleetError, match="job 'a': 2 jobs have this name"):
        load_fleet(tmp_path / "jobs.toml")


def test_what_is_not_there_is_told(tmp_path):
    assert "cannot read" in error_of("fleet", tmp_path / "no.toml")
    for top, job, said in (
        ({"cluster": '"h1000_dgx"'}, {}, "h1000_dgx"),
        ({"nodes": "3000"}, {}, "nodes = 3000 of h100_dgx, which has 2,048"),
        ({}, {"model": '"8bb"'}, "8bb"),
        ({}, {"layout": "{ tpp = 2 }"}, "tpp is nothing that can be changed"),
        ({}, {"layout": "{ tp = -2 }"}, "tp needs to be"),
        ({}, {"layout": "{ gpus = 8 }"}, "layout.gpus is no part of a layout"),
        ({"price_per_gpu_hour": "{ b200 = 6 }"}, {}, "price_per_gpu_hour is of b200"),
    ):
        (tmp_path / "jobs.toml").write_text(text(top, job))
        assert said in error_of("fleet", tmp_path / "jobs.toml")


def test_a_deadline_that_no_count_of_nodes_reaches_is_told(tmp_path):
    (tmp_path / "jobs.toml").write_text(text(job={"deadline_hours": "0.1"}))
    fleet = load_fleet(tmp_path / "jobs.toml")
    with pytest.raises(
        FleetError, match=r"deadline_hours = 0.1 cannot be reached: alone on 2 nodes"
    ):
        plan_fleet(fleet, speed, source="jobs.toml")
    assert plan_fleet(fleet, speed, may_be_late=True).deadlines_met == 0


def test_a_job_that_fits_nowhere_is_told_why(tmp_path):
    def refuse(job, nodes):
        raise TwinstreamError(f"needs 5 GiB more on {nodes} nodes")

    (tmp_path / "jobs.toml").write_text(text())
    fleet = load_fleet(tmp_path / "jobs.toml")
    with pytest.raises(
        FleetError, match="job 'a' runs on none of 1, 2 nodes: needs 5 GiB more on 2"
    ):
        tasks_of(fleet, refuse, "jobs.toml")


def test_numbers_are_read_as_people_write_them(tmp_path):
    (tmp_path / "jobs.toml").write_text(text({"price_per_gpu_hour": '"$2.50"'}))
    fleet = load_fleet(tmp_path / "jobs.toml")
    assert (fleet.jobs[0].tokens, fleet.jobs[0].seq_len) == (10**9, 4096)
    assert fleet.price_per_gpu_hour == 2.5
