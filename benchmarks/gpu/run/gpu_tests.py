"""The tests marked gpu, in a process of their own and within a time limit; they can be resumed.

Tests whose file cannot be imported count as one that failed; the others run.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.jobs.campaign import SMOKE
from benchmarks.gpu.jobs.results import Results, SuiteFound
from benchmarks.gpu.jobs.store import Store
from benchmarks.gpu.run.reached_tests import REACHED
from twinstream.executor.probe.process import JobFailed, JobRefused

_OUTCOME = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
_SHORT = re.compile(r"^((?:FAILED|ERROR) (.+))$", re.MULTILINE)
_UNREAD = re.compile(r"^ERROR [^:\s]+( - .*)?$")  # a file, of which no test was reached
_BEGUN = re.compile(r"^(\S+::.*?) *\Z", re.MULTILINE)
_MOST_FAILURES = 40


@dataclass(frozen=True)
class SuiteRun:
    """What the tests came to, with those reached before, and all that they printed now."""

    found: SuiteFound
    printed: str


def tested(store: Store, key: str, tests: Sequence[str], limit_s: float) -> SuiteFound:
    """One suite, from where an earlier call left it; what a test that failed printed is logged.

    The smoke tests leave to the whole suite what they did not reach.
    """
    done = run_gpu_tests(tests, _found_before(store.results, key), limit_s)
    if done.found.failures or not done.found.complete:
        store.log(done.printed[-200_000:])
    return done.found.model_copy(update={"complete": True}) if key == SMOKE else done.found


def _found_before(results: Results, key: str) -> SuiteFound:
    """What an earlier call found of this suite; else only what the smoke tests reached."""
    found, smoke = results.found(key), results.found(SMOKE)
    if isinstance(found, SuiteFound):
        return found
    return SuiteFound(reached=smoke.reached) if isinstance(smoke, SuiteFound) else SuiteFound()


def run_gpu_tests(paths: Sequence[str], before: SuiteFound, limit_s: float) -> SuiteRun:
    """Run the tests marked gpu under some paths that were not reached before.

    One that is cut off by the limit twice counts as failed.

    Raises:
        JobRefused: the paths are not here.
        JobFailed: pytest could not run them.
    """
    if missing := [path for path in paths if not Path(path.split("::")[0]).exists()]:
        raise JobRefused(
            f"there is no {', '.join(missing)} in {Path.cwd()}; run the campaign from the "
            "checkout, or say where tests are with --tests"
        )
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as reached:
        json.dump(before.reached, reached)
        reached.flush()
        names = {"COLUMNS": "200", "TWINSTREAM_CAMPAIGN": "1", REACHED: reached.name}
        printed, code = run_within(_command(paths), limit_s, names)
    if code not in (0, 1, 5, None):  # passed, some failed, none selected, out of time
        raise JobFailed(f"pytest ended with code {code}: {_last_line(printed)}", printed[-20_000:])
    return SuiteRun(suite_found(printed, before, complete=code is not None), printed)


def suite_found(printed: str, before: SuiteFound, *, complete: bool) -> SuiteFound:
    """What was found before and, from what `pytest -v -rfE` printed, now."""
    outcomes = dict(_OUTCOME.findall(printed))
    counts = list(outcomes.values())
    failed = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    told = _SHORT.findall(printed)
    failed += [name for line, name in told if _UNREAD.match(line) and name not in before.failures]
    failures = [name for _, name in told if name not in before.failures] or list(failed)
    begun = _BEGUN.search(printed.rstrip("\n"))
    in_flight = begun[1] if begun and not complete else ""
    if in_flight and in_flight == before.in_flight:
        outcomes[in_flight] = "FAILED"
        failed.append(in_flight)
        failures.append(f"{in_flight} - twice it had not ended when time was up")
    return SuiteFound(
        passed=before.passed + counts.count("PASSED"),
        failed=before.failed + len(failed),
        skipped=before.skipped + counts.count("SKIPPED"),
        failures=(*before.failures, *failures)[:_MOST_FAILURES],
        reached=(*before.reached, *outcomes),
        in_flight=in_flight,
        complete=complete,
    )


def _command(paths: Sequence[str]) -> Sequence[str]:
    options = (
        "-m", "gpu", "-v", "-rfE", "--tb=short", "-W", "default", "-p", "no:cacheprovider",
        "-p", "benchmarks.gpu.run.reached_tests", "--continue-on-collection-errors",
    )  # fmt: skip
    return (sys.executable, "-m", "pytest", *options, *paths)


def run_within(
    command: Sequence[str], limit_s: float, names: Mapping[str, str]
) -> tuple[str, int | None]:
    """(what a command printed, its exit code or None if it was ended); `names` are variables."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, **names},
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
