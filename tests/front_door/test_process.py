"""The command line as a process: start-up, progress on terminals, Ctrl-C."""

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
