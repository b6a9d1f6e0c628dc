"""Ctrl-C in the middle of a run: a real SIGINT to a real process, on the CPU backend."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twinstream.commands.sweep import sweep
from twinstream.study.sweep import sweep as runner

REPOSITORY = Path(__file__).parents[2]
# Says `step` once two steps are done, so that the signal comes in the middle of training.
# A shell starts what runs in its background with SIGINT ignored, and children inherit that.
HEEDED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND_LINE = (
    f"{HEEDED}\n"
    + """
import contextlib, sys
from twinstream import cli
from twinstream.commands.runs import run as running
from twinstream.commands import output

@contextlib.contextmanager
def said(what, total=None, *, quiet=False):
    seen = []
    def advance():
        seen.append(1)
        if len(seen) == 2:
            print("step", flush=True)
    yield output.Stage(what, total, advance)

running.progress = said
cli.main(sys.argv[1:])
"""
)
LIBRARY = (
    f"{HEEDED}\n"
    + """
import sys, threading
import twinstream as ts
from twinstream import api

schedule = ts.plan("tiny", "cpu", step=ts.TrainingStep(seq_len=128, tokens_per_step=512))
losses = []
def on_loss(loss):
    losses.append(loss)
    if len(losses) == 2:
        print("step", flush=True)
try:
    api.execute(schedule, api.RunSettings("cpu", num_steps=100_000, on_loss=on_loss))
except KeyboardInterrupt:
    print("interrupted with", threading.active_count(), "thread", flush=True)
    done = len(losses)
    assert done < 100_000
"""
)


def interrupted(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that gets SIGINT after its second step."""
    process = subprocess.Popen(
        [sys.executable, "-c", *arguments],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "step\n", process.communicate()[1]
        process.send_signal(signal.SIGINT)
        printed, complained = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, printed, complained


@pytest.fixture
def arguments(files, tmp_path) -> list[str]:
    return [
        *("run", str(files.schedule), "--steps", "100000", "--backend", "cpu"),
        *("-o", str(tmp_path / "measured.json")),
    ]


def test_ctrl_c_ends_a_run_with_130_and_leaves_no_file_and_no_traceback(tmp_path, arguments):
    code, printed, complained = interrupted(COMMAND_LINE, *arguments, cwd=tmp_path)
    assert code == 130
    assert printed == ""
    told, losses = complained.splitlines()
    assert told.startswith("stopped after ") and "of 100,000 steps; no timeline is" in told
    assert losses.startswith("loss of ")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_the_library_returns_when_nothing_runs_any_more(tmp_path):
    code, printed, complained = interrupted(LIBRARY, cwd=tmp_path)
    assert (code, printed, complained) == (0, "interrupted with 1 thread\n", "")


WORKERS = (
    f"{HEEDED}\n"
    + """
import sys, time
from tests.front_door.test_interrupt import busy, done_or_busy
from twinstream.schedule.worker_processes import in_processes

try:
    for item in in_processes(*{work}):
        print("step", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
)


def busy(_: int, planner: object) -> None:
    """Work of many minutes; says that it has begun."""
    print("step", flush=True)
    time.sleep(600)


def done_or_busy(item: int, planner: object) -> None:
    """The first is done at once, so that its row is at work when the signal comes."""
    if item > 1:
        time.sleep(600)


@pytest.mark.parametrize("work", ["(busy, [1, 2, 3], 2)", "(done_or_busy, [1, 2, 3], 2)"])
def test_ctrl_c_of_work_in_processes_ends_them_at_once_and_quietly(tmp_path, work):
    script = tmp_path / "workers.py"
    script.write_text(WORKERS.replace("{work}", work))
    with subprocess.Popen(
        [sys.executable, script], env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "step\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        printed, complained = process.communicate(timeout=60)
    assert printed.replace("step\n", "") == "interrupted\n"
    assert (process.returncode, complained) == (0, "")


def test_a_sweep_that_is_stopped_says_where_its_rows_are(tmp_path, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    file, folder = tmp_path / "one.toml", tmp_path / "rows"
    file.write_text(
        '[fixed]\nmodel = "tiny"\nmachine = "cpu"\nseq_len = 64\n[axes]\ndevice_mem = ["16MiB"]\n'
    )
    monkeypatch.setattr(runner, "run_sweep", stopped)
    with pytest.raises(KeyboardInterrupt):
        sweep(file, folder)
    assert str(folder) in capsys.readouterr().err
