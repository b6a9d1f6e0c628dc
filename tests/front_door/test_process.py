"""The command line as a process: start-up, progress on terminals, Ctrl-C."""

import json
import subprocess
import sys

from tests.contract.run_python import run_python
from tests.front_door.command_line import TINY_STEP, call

NO_TORCH = """
import sys
from twinstream.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    assert not stop.code, stop.code
assert "torch" not in sys.modules, "torch was imported"
"""
INTERRUPTED = """
import signal, sys, threading
from twinstream.commands import running
from twinstream.cli import main
from twinstream.commands.output import RunBars
# A shell starts what runs in its background with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
class InterruptOnce:
    sent = False
    def __enter__(self):
        return RunBars(self.advance, lambda done, total: None)
    def __exit__(self, *raised):
        return False
    def advance(self):
        if not self.sent:
            self.sent = True
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
assert running.run_progress
running.run_progress = lambda what, total, quiet: InterruptOnce()
main(sys.argv[1:])
"""


def test_help_and_planning_need_no_torch(files, tmp_path):
    for command in (
        ("--help",),
        ("plan", "--help"),
        ("run", "--help"),
        ("machines", "--json"),
        ("plan", *TINY_STEP, "--machine", "cpu", "--json"),
        ("simulate", str(files.schedule), "--json"),
        ("compare", str(files.schedule), str(files.predicted), str(files.measured), "--json"),
    ):
        run_python("-c", NO_TORCH, *command, cwd=tmp_path)


def test_standard_output_of_a_process_is_the_json_document_and_nothing_else(tmp_path):
    """Libraries write to the process's own stdout, past Python's."""
    call_main = "from twinstream.cli import main; main()"
    plan = ("plan", *TINY_STEP, "--machine", "cpu", "--effort", "quick", "--json")
    assert json.loads(run_python("-c", call_main, *plan, cwd=tmp_path))["model"] == "tiny"


def test_ctrl_c_in_a_run_has_no_traceback_and_exits_130(files, tmp_path):
    """The signal itself, in a process of its own: streams' threads are at work when it ends."""
    run = ("run", files.schedule, "--backend", "cpu", "--steps", "2000")
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *run],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.startswith("stopped after ")
    assert "Traceback" not in done.stderr


def test_progress_is_shown_on_a_terminal_only_and_on_stderr(monkeypatch):
    plan = ("plan", *TINY_STEP, "--machine", "cpu")
    assert call(*plan).err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich take any stream for a terminal
    outcome = call(*plan)
    assert "planning tiny for cpu" in outcome.err
    assert "planning" not in outcome.out
    as_json = call(*plan, "--json")
    assert as_json.err == ""
    assert as_json.json()["policy"]


def test_the_version_is_told():
    assert call("--version").out.startswith("twinstream ")
