"""The command line as a process: start-up, progress on terminals, Ctrl-C."""

import io
import json
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tests.contract.run_python import run_python
from tests.front_door.command_line import TINY_STEP, call
from twinstream.cli import _QUESTIONS
from twinstream.commands import output

NO_TORCH = """
import sys
from twinstream.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    assert not stop.code, stop.code
assert "torch" not in sys.modules, "torch was imported"
"""
LIGHT = """
import sys
from twinstream.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {"torch", "plotly", "dash", "scipy.optimize"}
heavy |= {"twinstream.commands.whatif"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
INTERRUPTED = """
import signal, sys, threading
from twinstream.commands.runs import run as running
from twinstream.cli import main
from twinstream.commands.output import Stage
# A shell starts what runs in its background with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
class InterruptOnce:
    sent = False
    def __enter__(self):
        return Stage("training", 2000, self.advance)
    def __exit__(self, *raised):
        return False
    def advance(self):
        if not self.sent:
            self.sent = True
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
progress = running.progress
running.progress = lambda what, total=None, quiet=False: (
    InterruptOnce() if total == 2000 else progress(what, total, quiet=quiet)
)
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


def test_progress_is_a_bar_on_a_terminal_and_on_stderr(monkeypatch):
    monkeypatch.setattr(output, "_FIRST_LINE_S", 1e6)
    plan = ("plan", *TINY_STEP, "--machine", "cpu", "--effort", "quick")
    assert call(*plan).err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich take any stream for a terminal
    outcome = call(*plan)
    assert "planning tiny on cpu" in outcome.err
    assert "planning" not in outcome.out
    as_json = call(*plan, "--json")
    assert as_json.err == ""
    assert as_json.json()["policy"]


_MOST_LINES = 3000  # some seconds


def lines_of(monkeypatch, shown: AbstractContextManager[Callable[[], object]]) -> list[str]:
    """What is told beside a block that goes on twice, until that is told."""
    told: queue.Queue[str] = queue.Queue()

    class Stderr(io.StringIO):
        def write(self, text: str) -> int:
            if text.strip():
                told.put(text)
            return len(text)

    monkeypatch.setattr(output, "_FIRST_LINE_S", 0.001)
    monkeypatch.setattr(output, "_LINES_S", 0.001)
    monkeypatch.setattr(sys, "stderr", Stderr())
    with shown as advance:
        first = told.get(timeout=60)
        advance()
        advance()
        seen = [first]
        while ": 2 of " not in seen[-1] and len(seen) < _MOST_LINES:  # lines of before may wait
            seen.append(told.get(timeout=60))
    return seen


def test_without_a_terminal_progress_is_a_line_every_few_seconds(monkeypatch):
    first, *_, last = lines_of(monkeypatch, output.progress("searching", 3))
    assert first.startswith("searching: 0 of 3, ")
    assert last.startswith("searching: 2 of 3, ")


def test_without_a_terminal_a_run_tells_its_steps_and_what_is_pinned(monkeypatch):
    @contextmanager
    def running() -> Iterator[Callable[[], None]]:
        with output.progress("training tiny", 4) as stage:
            stage.pinned(2**30, 2**31)
            yield stage

    first, *_, last = lines_of(monkeypatch, running())
    pinned = ", 1.00 GiB of 2.00 GiB of host memory pinned"
    assert last.startswith(f"training tiny: 2 of 4{pinned}, ")
    assert first.startswith("training tiny: 0 of 4")


def test_help_names_every_command_and_planning_imports_no_other(tmp_path):
    told = call("--help").out
    assert all(f" {name} " in told for names in _QUESTIONS.values() for name in names)
    plan = ("plan", *TINY_STEP, "--machine", "cpu", "--effort", "quick")
    run_python("-c", LIGHT, *plan, cwd=tmp_path)
