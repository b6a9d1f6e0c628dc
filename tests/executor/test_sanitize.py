"""The sanitizer's run says what it did not check."""

import subprocess
import sys

from tests.contract.package_tree import REPO
from tests.executor import sanitize


def test_without_the_tool_nothing_counts_as_clean(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    assert sanitize.main([]) == 2
    assert "nothing was checked: there is no compute-sanitizer" in capsys.readouterr().err


def test_a_tool_that_finds_something_fails_the_run(monkeypatch, capsys):
    """A stand-in for compute-sanitizer that finds a race, and nothing else."""
    monkeypatch.setattr(sanitize, "sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    seen = []

    def run(command, env):
        tool = command[command.index("--tool") + 1]
        seen.append((tool, env["PYTORCH_NO_CUDA_MEMORY_CACHING"], "TRITON_INTERPRET" in env))
        return subprocess.CompletedProcess(command, 1 if tool == "racecheck" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert sanitize.main([]) == 1
    assert seen == [(tool, "1", False) for tool in sanitize.TOOLS]
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "memcheck: clean",
        "racecheck: exit code 1",
        "synccheck: clean",
    ]
    assert sanitize.main(["memcheck"]) == 0


def test_its_tests_are_there():
    files = [REPO / path for path in sanitize.TESTS]
    assert all(path.exists() for path in files)
    assert sanitize.command("memcheck", "x")[5:8] == ["--print-limit", "20", sys.executable]


def test_warnings_of_another_machines_packages_do_not_stop_it():
    pytest_line = " ".join(sanitize.command("memcheck", "x"))
    assert "-m pytest -W default " in pytest_line
    assert " -p no:cacheprovider " in pytest_line
