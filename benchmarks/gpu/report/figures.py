"""A campaign's figures as two CSV tables: a row a cell, and a row a figure of every other job."""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.gpu.jobs.results import CellFound, Outcome, Results
from benchmarks.gpu.report.table import CellRow, Table

_Row = tuple[str, str, str, str]  # job, part, figure, value
# Elsewhere: of a cell its row has the figures, of the device's state results.json has all readings.
_IN_CELLS = frozenset(CellFound.model_fields) - {"kinds"}
_NAMES = ("name", "direction")  # by which parts of one sort are told apart


def cells_csv(table: Table) -> str:
    """A row a cell: its figures, without the times of its kinds, and the device's mean state."""
    names = [name for name in CellRow.model_fields if name not in ("kinds", "state")]
    state = ("sm_clock_mhz", "power_w", "temperature_c", "held_back")
    rows = [
        [
            *(_text(getattr(row, name)) for name in names),
            *(_text(getattr(row.state, name, None)) for name in state),
        ]
        for row in table.cells
    ]
    return _csv([*names, *state], rows)


def jobs_csv(results: Results, table: Table) -> str:
    """A row a figure: of every job its outcome, and what it found that is no figure of a cell."""
    peers = {row.peer: row for row in table.peers}
    rows: list[_Row] = []
    for job, outcome in results.outcomes.items():
        rows += _outcome_rows(job, outcome)
        if job in peers:
            told = peers[job].model_dump(include={"tokens_per_s", "beside", "ours_over_peer"})
            rows += [(job, *row) for row in _figures(told)]
    for row in table.without:
        rows += [(row.job, "", "status", row.status), (row.job, "", "reason", row.reason)]
    return _csv(("job", "part", "figure", "value"), rows)


def _outcome_rows(job: str, outcome: Outcome) -> Iterator[_Row]:
    found = outcome.found
    if found is None:  # among those without figures, which have a reason
        return
    yield job, "", "status", outcome.status
    yield job, "", "seconds", _text(outcome.seconds)
    left_out = _IN_CELLS if isinstance(found, CellFound) else {"kind", "states"}
    for row in _figures(found.model_dump(exclude=set(left_out))):
        yield job, *row


def _figures(values: Mapping[str, object], part: str = "") -> Iterator[tuple[str, str, str]]:
    """Part, figure and value of everything that is said, in its order."""
    for name, value in values.items():
        within = f"{part}/{name}".strip("/")
        if isinstance(value, Mapping):
            yield from _figures(value, within)
        elif isinstance(value, tuple) and value and isinstance(value[0], Mapping):
            for told, one in zip(_names_of(value), value, strict=True):
                figures = {key: one[key] for key in one if key not in _NAMES}
                yield from _figures(figures, f"{within}/{told}")
        elif isinstance(value, tuple):
            yield from ((part, name, _text(one)) for one in value)
        elif value is not None:
            yield part, name, _text(value)


def _names_of(values: Sequence[Mapping[str, object]]) -> list[str]:
    """What tells parts of one sort apart: the name, and which one of that name it is."""
    names = [" ".join(str(one[name]) for name in _NAMES if name in one) for one in values]
    often, met = Counter(names), Counter[str]()
    told = []
    for name in names:
        met[name] += 1
        told.append(f"{name} #{met[name]}" if often[name] > 1 else name)
    return told


def _text(value: object) -> str:
    """As a CSV has it: six digits of what is measured, nothing where nothing is known."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    return "; ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _csv(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue()
