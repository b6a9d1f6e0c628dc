"""A call on a lent machine: the campaign outlives it, and its results come back in time."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.gpu.jobs.results import Outcome
from benchmarks.gpu.jobs.store import Store, read_results
from benchmarks.gpu.lent import call as call_module
from benchmarks.gpu.lent.call import Call, Times, times
from benchmarks.gpu.tests.stand_ins import WHERE

# What stands for the campaign: it holds the folder, says a line, and ends when it is told to.
CAMPAIGN = """
import sys, time
from pathlib import Path
from benchmarks.gpu.jobs.store import only_campaign
folder = Path(sys.argv[sys.argv.index("--out") + 1])
print("begun with", *sys.argv[1:], flush=True)
with only_campaign(folder):
    for _ in range(3000):
        if (folder / "end").exists():
            break
        time.sleep(0.02)
"""


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def call(tmp_path, monkeypatch, told):
    program = tmp_path / "campaign.py"
    program.write_text(CAMPAIGN)
    real = call_module.subprocess.Popen

    def popen(command, **options):
        assert command[:3] == (sys.executable, "-m", "benchmarks.gpu")
        env = {**os.environ, "PYTHONPATH": str(Path.cwd())}  # as -m has it
        return real((sys.executable, str(program), *command[3:]), env=env, **options)

    monkeypatch.setattr(call_module.subprocess, "Popen", popen)
    monkeypatch.setattr(call_module, "_POLL_S", 0.02)
    made = Call(tmp_path / "own", tmp_path / "out", tmp_path / "earlier", told.append)
    yield made
    (made.folder / "end").touch()


def test_a_call_returns_in_time_and_the_next_finds_the_same_campaign(call, told):
    call.run(["--jobs", "4"], Times(call_s=1.0, campaign_s=90.0))
    assert told[0] == f"begun with --out {call.folder} --anew --minutes 1.50 --jobs 4"
    assert told[-1] == "the campaign runs on: call again, at once"
    pid = (call.folder / "pid").read_text()
    assert os.getsid(int(pid)) == int(pid), "or it would be killed with the call"
    store = Store(call.folder, WHERE, "tiny")
    store.put("facts", Outcome(status="done", attempts=1))
    told.clear()
    soon = threading.Timer(0.5, (call.folder / "end").touch)
    soon.start()
    call.run(["--jobs", "4"], Times(call_s=60.0, campaign_s=90.0))
    soon.join()
    assert told[-1] == "the campaign has ended"
    assert sum(line.startswith("begun") for line in told) == 1, "the first one's, told again"
    assert (call.folder / "pid").read_text() == pid
    assert read_results(call.to).is_done("facts")
    assert "# Campaign on stand-in" in (call.to / "table.md").read_text()
    assert len(list(call.to.iterdir())) <= 8, "no more come back"


def test_on_a_fresh_machine_it_goes_on_from_what_was_carried(call, tmp_path):
    (tmp_path / "earlier").mkdir()
    Store(tmp_path / "earlier", WHERE, "tiny").put("facts", Outcome(status="done", attempts=1))
    call.run([], Times(call_s=0.5, campaign_s=90.0))
    assert read_results(call.folder).is_done("facts")
    store = Store(call.folder, WHERE, "tiny")
    store.put("probe", Outcome(status="done", attempts=1))
    call.run([], Times(call_s=0.1, campaign_s=90.0))
    assert read_results(call.to).is_done("probe"), "later results are not overwritten"


def test_a_campaign_can_be_ended_for_one_with_other_code(call, told):
    call.run([], Times(call_s=0.5, campaign_s=90.0))
    pid = int((call.folder / "pid").read_text())
    call.stop()
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text():
            break
        time.sleep(0.02)
    else:
        pytest.fail("it still runs")
    call.stop()
    told.clear()
    call.run([], Times(call_s=0.5, campaign_s=90.0))
    assert int((call.folder / "pid").read_text()) != pid


def test_other_arguments_are_heard(call, told):
    call.run(["--stage", "facts"], Times(call_s=0.5, campaign_s=90.0))
    pid = (call.folder / "pid").read_text()
    store = Store(call.folder, WHERE, "tiny")
    store.put("facts", Outcome(status="done", attempts=1))
    told.clear()
    call.run(["--stage", "cells"], Times(call_s=0.5, campaign_s=90.0))
    assert told[0] == (
        "the campaign that runs was asked for `--stage facts`: it is ended, and goes on as "
        "`--stage cells`"
    )
    assert any(line.endswith("--minutes 1.50 --stage cells") for line in told)
    assert (call.folder / "pid").read_text() != pid
    assert read_results(call.folder).is_done("facts")


def test_what_comes_back_is_what_there_is_now(call):
    """Of files of jobs in flight none stays that has ended: eight come back at most."""
    for name in ("results.json", "profile.toml", "timelines.json.gz", "log.txt", "printed.txt"):
        call.folder.mkdir(exist_ok=True)
        (call.folder / name).write_text(name)
    call.to.mkdir()
    for name in ("smoke.txt", "samples.jsonl", "tests.txt"):
        (call.folder / name).write_text(name)
        call_module._copy_kept(call.folder, call.to)
        assert (call.to / name).read_text() == name
        assert len(list(call.to.iterdir())) == 6, "and two tables"
        (call.folder / name).unlink()


def test_a_campaign_that_cannot_begin_says_why(call, told):
    (call.folder.parent / "campaign.py").write_text("raise SystemExit('no device here')")
    call.run([], Times(call_s=60.0, campaign_s=90.0))
    assert "no device here" in told
    assert told[-1] == "the campaign has ended"


@pytest.mark.parametrize(
    ("left_s", "fresh", "gone_s", "expected"),
    [
        (1800.0, True, 30.0, (558.0, 1625.0)),  # the tool's limit of 600 s
        (1000.0, False, 5.0, (583.0, 970.0)),
        (400.0, False, 5.0, (358.0, 370.0)),  # the time that is left
        (400.0, True, 5.0, (238.0, 250.0)),  # of which a new machine takes two minutes
        (30.0, False, 10.0, (0.0, 0.0)),
    ],
)
def test_a_call_takes_what_the_time_left_allows(left_s, fresh, gone_s, expected):
    found = times(left_s, fresh=fresh, gone_s=gone_s)
    assert (found.call_s, found.campaign_s) == expected


def test_a_command_with_a_shorter_limit_ends_before_it_and_the_campaign_goes_on():
    assert times(1000.0, fresh=False, gone_s=5.0, limit_s=60.0) == Times(43.0, 970.0)


def test_three_calls_fit_in_half_an_hour_with_starts_and_transfers():
    left_s = 1800.0 - 120.0 - 45.0 - 25.0  # machine, facts, back
    for _ in range(3):
        found = times(left_s, fresh=False, gone_s=3.0)
        left_s -= 3.0 + found.call_s + 12.0 + 25.0  # wheels, the call, its tables, on their way
    assert 0.0 <= left_s < 60.0


def test_no_time_is_a_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        call_module.main(["--to", str(tmp_path), "--left-s", "20", "--folder", str(tmp_path)])
    assert caught.value.code == 2
    assert "20 s of device time leave none" in capsys.readouterr().err
