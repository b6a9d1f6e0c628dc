"""A campaign as half a page: what measured, what ran, what did not, and where its figures are."""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.gpu.jobs.results import CheckFound, ProbeFound, Results, SuiteFound
from benchmarks.gpu.report.table import CellRow, JobRow, Table

_LISTED = 8  # of one reason; the table of jobs has the others


def summary_of(results: Results, table: Table, files: Mapping[str, str]) -> str:
    """The page, with a link to each file and what it holds."""
    where = results.where
    rows = [f"| [{name}]({name}) | {told} |" for name, told in files.items()]
    lines = [
        f"# Campaign on {where.device}, {where.date}",
        "",
        "What ran, what failed, and where are its figures?",
        "",
        f"Driver {where.driver}, torch {where.torch}, commit {where.commit or 'not given'}, size "
        f"`{results.size}`: `{where.command}`.",
        "",
        *(f"- {line}" for line in (*_ran(results, table), *_failed(table))),
        "",
        "| file | what |",
        "|---|---|",
        *rows,
        "",
        "`error`: the step time as predicted before the run over the measured one, - 1; "
        "`of_bound`: the plan's lower bound over the measured one (above 1 the profile has the "
        "device too slow); `spread`: standard deviation of a step extended from short passes; "
        "`extension_error`, `whole_error`: what extending adds to the prediction and to the "
        "measurement; `floor_ns`: FLOPs or bytes at the best rate probed, whichever is longer; "
        "`ratio`: measured over fitted.",
    ]
    return "\n".join(lines) + "\n"


def _ran(results: Results, table: Table) -> Iterator[str]:
    done = [outcome.seconds for outcome in results.outcomes.values() if outcome.found is not None]
    whole = sum(name.endswith(" whole") for name in results.outcomes)
    yield (
        f"Ran: {len(done)} jobs in {sum(done):,.0f} s (cells {len(table.cells)}, whole steps "
        f"{whole}, peers {len(table.peers)})."
    )
    if table.cells:
        yield _error_line(table.cells)
    if table.check is not None:
        yield from _check_lines(table.check)
    if table.probe is not None:
        yield _probe_line(table.probe)
    for what, tests in (("First tests", table.smoke), ("Tests", table.tests)):
        if tests is not None:
            yield _tests_line(what, tests)


def _error_line(cells: Sequence[CellRow]) -> str:
    worst = max(cells, key=lambda row: abs(row.error))
    mean = sum(abs(row.error) for row in cells) / len(cells)
    at_worst = f"{worst.error:+.1%} at worst ({worst.cell})"
    return f"Predicted step time: {mean:.1%} off on average, {at_worst}."


def _check_lines(check: CheckFound) -> Iterator[str]:
    tried = [one for one in check.attention if one.same_bits is not None]
    same = sum(one.same_bits is True for one in tried)
    yield (
        f"Check: attention ran {len(tried)} of {len(check.attention)} times, {same} with the same "
        "bits twice."
    )
    if check.unsteady:
        yield f"Links have no figures: {_one_line(check.unsteady)}"


def _probe_line(probe: ProbeFound) -> str:
    off = sorted(abs(sample.ratio - 1.0) for sample in probe.samples)
    fit = f", the fit {off[len(off) // 2]:.1%} off (median), {off[-1]:.1%} at worst" if off else ""
    rate = probe.sustained_flop_per_s
    kept = "" if rate is None else f"; {rate / 1e12:,.0f} TFLOP/s kept up"
    return (
        f"Profile `{probe.machine}`: {len(off)} kernels timed{fit}{kept}; vector kernels "
        f"{probe.kernels.vector}, attention {probe.kernels.attention}."
    )


def _tests_line(what: str, tests: SuiteFound) -> str:
    left = "" if tests.complete else "; not all were reached"
    return (
        f"{what} marked gpu: {tests.passed} passed, {tests.failed} failed, "
        f"{tests.skipped} skipped{left}."
    )


def _failed(table: Table) -> Iterator[str]:
    """Failures of tests, and jobs without figures by their reason."""
    for tests in (table.smoke, table.tests):
        for failure in () if tests is None else tests.failures:
            yield f"Failed: {_one_line(failure)}"
    by_reason: dict[tuple[str, str], list[JobRow]] = {}
    for row in table.without:
        by_reason.setdefault((row.status, row.reason), []).append(row)
    for (status, reason), rows in by_reason.items():
        jobs = ", ".join(row.job for row in rows[:_LISTED])
        more = f" and {len(rows) - _LISTED} more" if len(rows) > _LISTED else ""
        yield f"Without figures, {status} ({_one_line(reason)}): {jobs}{more}."


def _one_line(text: str) -> str:
    return " ".join(text.split())
