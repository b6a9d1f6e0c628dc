"""The command `fleet`: screen, JSON, CSV and page say the same plan."""

import csv
import io
import json

import pytest

from tests.fleet.small_fleets import speed
from tests.fleet.test_jobs_file import text
from tests.front_door.command_line import call
from twinstream.fleet import rates
from twinstream.fleet.jobs import FleetJob
from twinstream.schedule.errors import TwinstreamError

TWO = text({"price_per_gpu_hour": "{ h100 = 2.5 }", "failures_per_node_hour": "0.05"},
           {"deadline_hours": "30", "elastic": "true"}) + """
[[jobs]]
name = "b<i>"
model = "8b"
tokens = "2B"
seq_len = 4096
tokens_per_step = 524288
deadline_hours = 30
"""  # fmt: skip


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "predicted_speed", lambda cluster, job, nodes: slowed(job, nodes))
    file = tmp_path / "jobs.toml"
    file.write_text(TWO)
    return file


def slowed(job, nodes):
    """Data parallelism alone is half as fast."""
    found = speed(job, nodes)
    factor = 0.5 if job.layout.get("tp") == 1 else 1.0
    return found.model_copy(update={"tokens_per_s": found.tokens_per_s * factor})


def test_all_outputs_say_the_same(jobs, tmp_path):
    table, page = tmp_path / "plan.csv", tmp_path / "plan.html"
    found = call("fleet", jobs, "-o", table, "--html", page, "--plays", 5, "--json").json()["plan"]
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [float(row["end_s"]) for row in rows] == [one["end_s"] for one in found["calendar"]]
    assert found["makespan_s"] == max(job["end_s"] for job in found["jobs"])
    hours = sum((b["end_s"] - b["start_s"]) * len(b["nodes"]) * 8 / 3600 for b in found["calendar"])
    assert found["gpu_hours"] == pytest.approx(hours)
    assert found["money"] == pytest.approx(2.5 * hours)
    assert found["played"]["plays"] == 5
    html = page.read_text()
    assert "Calendar" in html and "b<i>" not in html.split("<script", 1)[0]
    screen = call("fleet", jobs).out
    assert f"{found['makespan_s'] / 3600:,.2f} h" in screen
    assert f"no plan ends before {found['bounds']['makespan_s'] / 3600:,.2f} h" in screen
    assert "a GPU-hour" in screen and "20 plays" in screen


def test_data_parallelism_alone_stands_beside_it(jobs):
    found = call("fleet", jobs, "--against", "dp", "--json").json()
    beside = found["beside"]["data parallel alone"]
    assert beside["makespan_s"] == pytest.approx(2 * found["plan"]["makespan_s"], rel=0.05)
    screen = call("fleet", jobs, "--against", "dp").out
    assert "layouts searched" in screen and "data parallel alone" in screen


def test_what_data_parallelism_alone_cannot_run_is_told(jobs, monkeypatch):
    def refuse(cluster, job, nodes):
        if job.layout.get("tp") == 1:
            raise TwinstreamError("needs 5 GiB more")
        return speed(job, nodes)

    monkeypatch.setattr(rates, "predicted_speed", refuse)
    told = call("fleet", jobs, "--against", "dp")
    assert told.code == 0 and "job 'a' runs on none of 1, 2 nodes: needs 5 GiB more" in told.out
    assert "beside" in call("fleet", jobs, "--against", "dp", "--json").json()


def test_the_calendar_leaves_room_for_the_toolbar(jobs, tmp_path):
    page = tmp_path / "plan.html"
    call("fleet", jobs, "--html", page)
    figure = page.read_text().split('data-figure="figure0">')[1].split("</script>")[0]
    layout = json.loads(figure.replace("<\\/", "</"))["layout"]
    assert layout["legend"]["y"] < 0 and layout["margin"]["t"] >= 40


def test_a_job_is_as_fast_as_plan_says():
    step = {"seq_len": 1024, "global_batch": 8}
    fixed = {"tp": 1, "pp": 1, "cp": 1, "zero": 1, "recompute": "none", "offload": False}
    job = FleetJob(name="a", model="1b", tokens=10**9, layout=fixed, **step)
    found = rates.predicted_speed("rtx4090_ethernet", job, 1)
    flags = ("--tp", 1, "--pp", 1, "--cp", 1, "--zero", 1, "--recompute", "none", "--no-offload")
    where = ("--cluster", "rtx4090_ethernet", "--gpus", 2, "--seq-len", 1024, "--global-batch", 8)
    plan = call("plan", *where, "--model", "1b", *flags, "--json").json()
    assert found.tokens_per_s == pytest.approx(plan["layouts"][0]["tokens_per_s"])
    assert found.error == plan["uncertainty"]["mean"]
