"""Which rows of a measured table are meant: by machine, by column, by a list of cells."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from twinstream.fidelity.cells import CellKey
from twinstream.fidelity.matching import class_named, class_of, nothing_left, planned
from twinstream.hardware_profiles.calibration.cells import candidate_cells
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.measured_table import MeasuredRow, read_cells
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.seed_system.classes import UnknownMachineClass

_COLUMNS: Mapping[str, Callable[[MeasuredRow], str | float]] = {
    "machine": lambda row: row.machine.lower(),
    "model": lambda row: row.model.lower(),
    "seq_len": lambda row: float(row.seq_len),
    "host_mem_gib": lambda row: row.host_mem_gib,
    "dev_mem_gib": lambda row: row.dev_mem_gib,
}
_CAPS = ("seq_len", "host_mem_gib", "dev_mem_gib")


def rows_that(rows: Sequence[MeasuredRow], only: Sequence[str]) -> list[MeasuredRow]:
    """The rows that fit all conditions `column=value`.

    Raises:
        CalibrationError: nothing is left, or a condition cannot be read.
    """
    left = list(rows)
    for condition in only:
        column, _, text = condition.partition("=")
        wanted = _value(column, text, condition)
        left = [row for row in left if _COLUMNS[column](row) == wanted]
    if not left:
        raise CalibrationError(f"no row of the table has {' and '.join(only)}")
    return left


def rows_of(
    rows: Sequence[MeasuredRow], profile: Machine, only: Sequence[str]
) -> list[MeasuredRow]:
    """The rows of one machine that fit all conditions.

    Where the table has several machines and no condition names one, it is the machine that the
    profile is called after (`h100`, `h100_datasheet` and `my-H100` mean `H100`), or has its
    datasheet from.

    Raises:
        CalibrationError: nothing is left, a condition cannot be read, or the machine is not clear.
    """
    left = rows_that(rows, only)
    machines = sorted({row.machine for row in left})
    if len(machines) == 1:
        return left
    try:
        named = [name for name in machines if class_named(name) == class_of(profile)]
    except UnknownMachineClass:
        named = []
    if len(named) != 1:
        raise CalibrationError(
            f"the table has rows of {', '.join(machines)}, and the profile is called "
            f"'{profile.name}'; say which to take: --only machine={machines[0]}"
        )
    return [row for row in left if row.machine == named[0]]


def candidate_rows(
    rows: Sequence[MeasuredRow], on_row: Callable[[], None] = lambda: None
) -> tuple[MeasuredRow, ...]:
    """The rows among which `informative_rows` chooses, each of a schedule of its own.

    Only rows that can be predicted; `on_row` is called when that is known of each, which takes
    milliseconds.

    Raises:
        CalibrationError: no row both ran and can be planned.
    """
    known = planned(rows, on_row)
    first: dict[CellKey, MeasuredRow] = {}
    for row in rows:
        if row.status == "ok" and row.line in known.keys:
            first.setdefault(known.keys[row.line], row)
    if not first:
        raise CalibrationError(nothing_left(known))
    return candidate_cells(first.values())


def listed_rows(rows: Sequence[MeasuredRow], cells: Path) -> tuple[MeasuredRow, ...]:
    """The successful rows that a file lists.

    The file is a CSV with a header that has at least seq_len, host_mem_gib and dev_mem_gib, and
    machine and model where the table has several; other columns are not read.

    Raises:
        MeasuredTableError: the file cannot be read or is no list of cells.
        CalibrationError: it lists what is not in the table, or in it more than once.
    """
    found: dict[int, MeasuredRow] = {}
    for number, line in read_cells(cells, _CAPS):
        where = f"{cells}, line {number}"
        told = {name: line[name].strip() for name in _COLUMNS if name in line}
        if empty := [name for name, text in told.items() if not text]:
            raise CalibrationError(f"{where} has no {', '.join(empty)}; each cell needs one")
        wanted = {name: _value(name, text, where) for name, text in told.items()}
        match = [row for row in rows if all(_COLUMNS[n](row) == v for n, v in wanted.items())]
        row = next((row for row in match if row.status == "ok"), None)
        shown = ", ".join(f"{name} {text}" for name, text in told.items())
        if row is None:
            failed = f" (line {match[0].line} failed)" if match else ""
            raise CalibrationError(f"{where}: no successful row of the table has {shown}{failed}")
        if len(several := sorted({f"{row.machine} {row.model}" for row in match})) > 1:
            raise CalibrationError(
                f"{where}: rows of {', '.join(several)} have {shown}; give the list a column "
                "machine or model"
            )
        found[id(row)] = row
    return tuple(found.values())


def _value(column: str, text: str, where: str) -> str | float:
    if column not in _COLUMNS or not text.strip():
        raise CalibrationError(
            f"'{where}' is no condition: write column=value with one of {', '.join(_COLUMNS)}"
        )
    if column in ("machine", "model"):
        return text.strip().lower()
    try:
        return float(text)
    except ValueError:
        raise CalibrationError(f"{where}: {column} needs a number, got '{text}'") from None
