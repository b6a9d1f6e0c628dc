"""A smoke test of whatever versions are installed, through the installed command; `make newest`.

Not collected by pytest: it runs in an environment of its own, without constraints and torch.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COMMAND = Path(sys.executable).with_name("twinstream")
STEP = ("--model", "tiny", "--machine", "h100", "--seq-len", "64", "--tokens-per-step", "256")
SWEEP = """
[axes]
device_mem = ["16MiB", "12MiB"]

[fixed]
model = "tiny"
machine = "cpu"
seq_len = 64
tokens_per_step = 256
effort = "quick"
"""
PYTHON = """
import twinstream as ts
step = ts.TrainingStep(64, 256)
schedule = ts.plan("tiny", "h100", step=step)
assert ts.verify(schedule) == [] and ts.simulate(schedule, "h100").step_ns > 0
"""


def output_of(*command: str | Path, cwd: Path) -> str:
    """All of its standard output; what goes wrong ends this with all that it said."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    if done.returncode or "Warning" in done.stderr:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def document_of(*arguments: str | Path, cwd: Path) -> Any:
    return json.loads(output_of(COMMAND, *arguments, "--json", cwd=cwd))


def main(folder: Path) -> None:
    planned = document_of("plan", *STEP, "-o", "schedule.json", cwd=folder)
    simulated = document_of("simulate", "schedule.json", cwd=folder)
    assert planned["tokens_per_s"] == simulated["tokens_per_s"] > 0
    output_of(COMMAND, "report", "schedule.json", "-o", "page.html", cwd=folder)
    assert "<html" in (folder / "page.html").read_text()
    (folder / "two.toml").write_text(SWEEP)
    assert document_of("sweep", "two.toml", cwd=folder)["num_cells"]["ok"] == 2
    assert output_of(sys.executable, "-I", "-c", PYTHON, cwd=folder) == ""
    assert "plan" in output_of(COMMAND, "--help", cwd=folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
    print("plan, simulate, report, sweep and Python run with the newest versions")
