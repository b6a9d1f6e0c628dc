"""Run Python in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest


def run_python(*arguments: str | Path, cwd: Path) -> str:
    """What it prints; the calling test fails with its whole output if it exits non-zero."""
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(f"exit code {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout
