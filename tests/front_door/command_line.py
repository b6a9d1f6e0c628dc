"""Call the command line in this process, as its entry point does."""

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any

from twinstream.cli import main

TINY_STEP = ("--model", "tiny", "--seq-len", "64", "--tokens-per-step", "256")
SUMMARY_KEYS = {
    "step_time_s",
    "tokens_per_s",
    "mfu",
    "hfu",
    "device_peak_bytes",
    "host_peak_bytes",
    "h2d_bytes",
    "d2h_bytes",
    "recompute_fraction",
    "plan_seconds",
}


@dataclass(frozen=True)
class Outcome:
    """Exit code and both outputs of one command."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """What stdout holds; it must be one JSON document and nothing else."""
        assert self.code == 0, self.err
        return json.loads(self.out)


def call(*arguments: object) -> Outcome:
    """Run `twinstream ARGUMENTS`; what is not a clean exit is raised here."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
    assert isinstance(code, int | None)
    return Outcome(code or 0, out.getvalue(), err.getvalue())


def error_of(*arguments: object) -> str:
    """The message of a user error: exit code 2, nothing on stdout, no traceback."""
    outcome = call(*arguments)
    assert outcome.code == 2, outcome.out + outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    return outcome.err
