"""The tests marked gpu, in a process of their own and within a time limit."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twinstream.campaign.results import SuiteFound
from twinstream.campaign.worker import JobFailed, JobRefused

_OUTCOME = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
_SHORT = re.compile(r"^(?:FAILED|ERROR) (.+)$", re.MULTILINE)
_MOST_FAILURES = 40


@dataclass(frozen=True)
class SuiteRun:
    """What the tests came to, and all that they printed."""

    found: SuiteFound
    printed: str
    timed_out: bool


def run_gpu_tests(paths: Sequence[str], report: Path, limit_s: float) -> SuiteRun:
    """Run the tests marked gpu under some paths; those not reached in time are not counted.

    Raises:
        JobRefused: the paths are not here.
        JobFailed: pytest could not run them.
    """
    if missing := [path for path in paths if not Path(path.split("::")[0]).exists()]:
        raise JobRefused(
            f"there is no {', '.join(missing)} in {Path.cwd()}; run the campaign from the "
            "checkout, or say where tests are with --tests"
        )
    printed, code = _run(_command(paths, report), limit_s)
    found = suite_found(printed)
    if code in (0, 1, 5, None):  # passed, some failed, none selected, out of time
        return SuiteRun(found, printed, timed_out=code is None)
    raise JobFailed(f"pytest ended with code {code}: {_last_line(printed)}", printed[-20_000:])


def suite_found(printed: str) -> SuiteFound:
    """Counts and failures from what `pytest -v -rfE` printed."""
    outcomes = dict(_OUTCOME.findall(printed))
    counts = list(outcomes.values())
    short = _SHORT.findall(printed)
    failed = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    return SuiteFound(
        passed=counts.count("PASSED"),
        failed=len(failed),
        skipped=counts.count("SKIPPED"),
        failures=tuple((short or failed)[:_MOST_FAILURES]),
    )


def _command(paths: Sequence[str], report: Path) -> Sequence[str]:
    options = ("-m", "gpu", "-v", "-rfE", "--tb=short", "-W", "default", "-p", "no:cacheprovider")
    return (sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *paths)


def _run(command: Sequence[str], limit_s: float) -> tuple[str, int | None]:
    """(what it printed, exit code or None if it was ended)."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, "COLUMNS": "200", "TWINSTREAM_CAMPAIGN": "1"},
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=limit_s)
        return printed, process.returncode
    except subprocess.TimeoutExpired:
        return _ended(process), None
    except BaseException:
        _ended(process)
        raise


def _ended(process: "subprocess.Popen[str]") -> str:
    """End the process and all that it started; what they had printed."""
    os.killpg(process.pid, signal.SIGKILL)
    printed, _ = process.communicate()
    return printed


def _last_line(printed: str) -> str:
    lines = printed.strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"
