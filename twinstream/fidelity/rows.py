"""Lines of a table of measured speeds as rows, and the choice of them: by machine, by conditions,
by a list of cells.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinstream.fidelity.measured import Predicted
from twinstream.fidelity.own_rows import OwnCell, OwnKey, own_cell, own_key
from twinstream.fidelity.seed_system.cells import Cell, CellKey, cell_of, key_of
from twinstream.fidelity.seed_system.classes import UnknownMachineClass, machine_class
from twinstream.fidelity.seed_system.sizing import SizingRefused, UnsuitableModel
from twinstream.hardware_profiles.calibration.cells import candidate_cells
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.hardware_profiles.measured_table import MeasuredRow, read_cells
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.presets import UnknownModelError
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.schedule.errors import TwinstreamError

RowKey = CellKey | OwnKey


@dataclass(frozen=True)
class TableRow:
    """A line of a table of measured speeds, predicted on the profile of its machine."""

    line: MeasuredRow

    @property
    def identity(self) -> int:
        return id(self.line)

    @property
    def measured(self) -> float | None:
        """Return the measured tokens/s; None where the run failed."""
        return self.line.tokens_per_s if self.line.status == "ok" else None

    @property
    def effort(self) -> float:
        """Return the length of a sequence: chunks, and so ops, grow with it."""
        return self.line.seq_len

    def value_in(self, predicted: Predicted) -> float | None:
        return predicted.tokens_per_s

    def key(self) -> RowKey:
        """Return what decides the schedule; raises as `key_of` and `own_key`."""
        return own_key(self.line) if self.line.is_ours else key_of(self.line)

    def ready(self, profile: Machine) -> Cell | OwnCell:
        """Make the schedule; one of ours is planned for the machine. Raises as they do."""
        return own_cell(self.line, profile) if self.line.is_ours else cell_of(self.line)

    def refusal(self, error: TwinstreamError) -> str | None:
        """Return the cap that a plan of ours exceeds, as the tables call it."""
        if not isinstance(error, InfeasiblePlan):
            return None
        return "failed_dev_mem" if error.shortage.cap == "device" else "failed_host_mem"


def known_of(
    rows: Iterable[MeasuredRow], on_row: Callable[[], None] = lambda: None
) -> list[RowKey | Predicted]:
    """Find what decides each row's schedule, or why none is made: refused or beyond what is known.

    Whether our planner refuses a row is only known by planning. `on_row` is called after each.
    """
    found: list[RowKey | Predicted] = []
    for row in rows:
        try:
            found.append(TableRow(row).key())
        except SizingRefused as error:
            found.append(Predicted(refused=error.reason))
        except (UnknownModelError, UnsuitableModel) as error:
            found.append(Predicted(unknown=str(error)))
        on_row()
    return found


def unknown_of(found: Iterable[object]) -> dict[str, int]:
    """Count the rows that are beyond what is known, by the reason."""
    predicted = (each for each in found if isinstance(each, Predicted))
    return dict(Counter(each.unknown for each in predicted if each.unknown))


def nothing_left(known: Iterable[object]) -> str:
    """Say that no row is left to predict, and why."""
    why = "".join(f"; {count} rows: {reason}" for reason, count in unknown_of(known).items())
    return f"no row of the table both ran and can be planned, so there is nothing to compare{why}"


_COLUMNS: Mapping[str, Callable[[MeasuredRow], str | float]] = {
    "machine": lambda row: row.machine.lower(),
    "policy": lambda row: row.policy.lower(),
    "model": lambda row: row.model.lower(),
    "seq_len": lambda row: float(row.seq_len),
    "host_mem_gib": lambda row: row.host_mem_gib,
    "dev_mem_gib": lambda row: row.dev_mem_gib,
}
_CAPS = ("seq_len", "host_mem_gib", "dev_mem_gib")
_DATASHEET = (
    "peak_bf16_flop_per_s",
    "peak_fp32_flop_per_s",
    "hbm_bytes_per_s",
    "device_memory_bytes",
    "pcie_h2d_bytes_per_s",
)


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
    profile is called as (`rtx4090` means `RTX 4090`) or after (`h100`, `h100_datasheet` and
    `my-H100` mean `H100`), or has its datasheet from.

    Raises:
        CalibrationError: nothing is left, a condition cannot be read, or the machine is not clear.
    """
    left = rows_that(rows, only)
    machines = sorted({row.machine for row in left})
    if len(machines) == 1:
        return left
    named = [name for name in machines if is_called(profile, name)]
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
    known = known_of(rows, on_row)
    first: dict[RowKey, MeasuredRow] = {}
    for row, key in zip(rows, known, strict=True):
        if row.status == "ok" and not isinstance(key, Predicted):
            first.setdefault(key, row)
    if not first:
        raise CalibrationError(nothing_left(known))
    return candidate_cells(first.values())


def listed_rows(rows: Sequence[MeasuredRow], cells: Path) -> tuple[MeasuredRow, ...]:
    """The successful rows that a file lists.

    The file is a CSV with a header that has at least seq_len, host_mem_gib and dev_mem_gib, and
    machine, model and policy where the table has several; other columns are not read.

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
        if len(several := sorted({f"{row.machine} {row.planned_model}" for row in match})) > 1:
            raise CalibrationError(
                f"{where}: rows of {', '.join(several)} have {shown}; give the list a column "
                "machine, model or policy"
            )
        found[id(row)] = row
    return tuple(found.values())


def _value(column: str, text: str, where: str) -> str | float:
    if column not in _COLUMNS or not text.strip():
        raise CalibrationError(
            f"'{where}' is no condition: write column=value with one of {', '.join(_COLUMNS)}"
        )
    if column in ("machine", "model", "policy"):
        return text.strip().lower()
    try:
        return float(text)
    except ValueError:
        raise CalibrationError(f"{where}: {column} needs a number, got '{text}'") from None


def profiles_of(names: Sequence[str], machines: Sequence[Machine]) -> dict[str, Machine]:
    """The profile of each machine of a table that has one, by the machine's name in the table.

    A profile is of the machine of its own name, or of the class that its name contains; where it
    contains none, of the shipped machine that it has its datasheet from. A single profile takes a
    table of a single machine, whatever they are called.
    """
    if len(names) == len(machines) == 1:
        return {names[0]: machines[0]}
    return {name: machine for machine in machines for name in names if is_called(machine, name)}


def is_called(machine: Machine, name: str) -> bool:
    """Return whether a table's name is of a profile's machine; see `profiles_of`."""
    if _plain(name) == _plain(machine.name):
        return True
    found = class_named(name)
    return found is not None and found == class_of(machine)


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def class_of(machine: Machine) -> str | None:
    """Name of the class of a profile's machine, None where nothing tells; see `profiles_of`."""
    return class_named(machine.name) or next(
        filter(None, map(class_named, _relatives(machine))), None
    )


def class_named(name: str) -> str | None:
    """Name of the class of a machine of this name, None where the policy knows none."""
    try:
        return machine_class(name).name
    except UnknownMachineClass:
        return None


def _relatives(machine: Machine) -> Iterable[str]:
    """Shipped profiles with the same datasheet."""
    for name in machine_names():
        if _datasheet(load_machine(name)) == _datasheet(machine):
            yield name


def _datasheet(machine: Machine) -> list[float | None]:
    numbers = [getattr(machine, field) for field in _DATASHEET]
    return [None if number is None else number.value for number in numbers]
