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
from benchmarks.gpu.jobs.results import SuiteFound
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

    The smoke tests leave to the whole suite what they did not reach. What pytest prints is in the
    folder as it comes, so that a call that is cut off loses nothing.
    """
    printed = store.folder / f"{key}.txt"
    before = _found_before(store, key, printed)
    begun = store.results.outcomes.get(key)
    if begun is not None:
        store.put(key, begun.model_copy(update={"found": before}))
    done = run_gpu_tests(tests, before, limit_s, printed)
    printed.unlink()
    if done.found.failures or not done.found.complete:
        store.log(done.printed[-200_000:])
    return done.found.model_copy(update={"complete": True}) if key == SMOKE else done.found


def _found_before(store: Store, key: str, printed: Path) -> SuiteFound:
    """What earlier calls found of this suite, one that was killed too; else the smoke tests."""
    found, smoke = store.results.found(key), store.results.found(SMOKE)
    if not isinstance(found, SuiteFound):
        reached = smoke.reached if isinstance(smoke, SuiteFound) else ()
        found = SuiteFound(reached=reached)
    if store.results.attempts(key) > 1 and printed.exists():
        return suite_found(printed.read_text("utf-8", "replace"), found, complete=False)
    return found


def run_gpu_tests(paths: Sequence[str], before: SuiteFound, limit_s: float, log: Path) -> SuiteRun:
    """Run the tests marked gpu under some paths that were not reached before, printing to a file.

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
        printed, code = run_within(_command(paths), limit_s, names, log)
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
    command: Sequence[str], limit_s: float, names: Mapping[str, str], log: Path
) -> tuple[str, int | None]:
    """(what a command printed into the file, its exit code or None if it was ended).

    `names` are variables of its environment.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True, env={**os.environ, **names},
        )  # fmt: skip
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            code = None
        except BaseException:
            _end(process)
            raise
    return log.read_text("utf-8", "replace"), code


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the process and all that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(printed: str) -> str:
    lines = printed.strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"
