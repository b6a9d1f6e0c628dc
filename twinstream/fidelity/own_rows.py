"""Measured rows that twinstream ran itself: planned as `plan` would, simulated on many profiles."""

from dataclasses import dataclass
from functools import cache

from twinstream.fidelity.seed_system.cells import TimedCell
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.presets import is_preset
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.python_file import split_name
from twinstream.schedule.sizes import parse_number
from twinstream.simulator.replay import steady_state
from twinstream.study.query import Loader
from twinstream.study.questions import device_query
from twinstream.study.values import NAMES, STEP_COUNTS, Value, fault_of

_GIB = 2**30
_OWN_FIELDS = ("policy", "machine", "model", "seq_len", "device_mem", "host_mem")
_PLANNED_FOR = "planned_for"


@dataclass(frozen=True)
class OwnKey:
    """The machine's name, the profile that the plan was made for where the row says it, and the
    values of a query: rows of equal ones are one schedule."""

    machine: str
    planned_for: str | None
    values: tuple[tuple[str, Value], ...]

    @property
    def plan(self) -> "OwnKey":
        """Return what distinct schedules are told apart by."""
        return self


@dataclass(frozen=True)
class OwnCell(TimedCell):
    """The schedule of a row, planned for one profile and timed on any."""

    key: OwnKey
    schedule: RankSchedule
    tokens_per_step: int

    @property
    def timed(self) -> RankSchedule:
        """Return the schedule with the kernels that ran, which are those of the plan."""
        return self.schedule

    def step_s(self, machine: Machine) -> float:
        """Return the seconds of a step in the steady state."""
        return steady_state(self.schedule, machine).step_ns / 1e9


def own_key(row: MeasuredRow) -> OwnKey:
    """Return what decides the row's schedule, beside the profile.

    Raises:
        UnknownModelError: there is no such model.
        CalibrationError: a column says what `plan` does not know.
    """
    values, columns = _values(row), _columns(row)
    _loader().model(str(values["model"]), row.seq_len)
    return OwnKey(row.machine.lower(), columns.get(_PLANNED_FOR), tuple(sorted(values.items())))


def own_cell(row: MeasuredRow, machine: Machine) -> OwnCell:
    """Plan the row's schedule as `plan` does, for this profile or for the one that the row says.

    Raises:
        InfeasiblePlan: it does not fit the row's caps.
        CalibrationError: it cannot be planned; says which line.
    """
    values, named = _values(row), _columns(row).get(_PLANNED_FOR)
    try:
        profile = machine if named is None else _loader().machine(named)
        named_machine = {**values, "machine": profile.name}
        schedule = device_query(named_machine, _loader().on(profile)).planned(advises=False)
    except InfeasiblePlan:
        raise
    except TwinstreamError as error:
        raise _at(row, str(error)) from None
    return OwnCell(own_key(row), schedule.only, schedule.workload.tokens_per_step)


@cache
def _loader() -> Loader:
    return Loader()


def _values(row: MeasuredRow) -> dict[str, Value]:
    """The row as values of a query, without the machine."""
    if row.rounds_per_step is not None or row.rounds_rule:
        raise _at(
            row,
            f"rounds_per_step and rounds_rule are of ml_dataflow, and this is a run of "
            f"'{row.policy}': give tokens_per_step",
        )
    found: dict[str, Value] = {
        "policy": row.policy,
        "model": row.preset if is_preset(row.preset) else row.model,
        "seq_len": row.seq_len,
        "device_mem": str(round(row.dev_mem_gib * _GIB)),
        "host_mem": str(round(row.host_mem_gib * _GIB)),
    }
    if row.tokens_per_s is not None and row.step_time_s is not None:
        sequences = max(1, round(row.tokens_per_s * row.step_time_s / row.seq_len))
        found["tokens_per_step"] = sequences * row.seq_len
    for name, text in _columns(row).items():
        if name in NAMES["device"] and name not in _OWN_FIELDS:
            found[name] = _value(name, text)
    for name, value in found.items():
        if isinstance(value, str) and split_name(value) is not None:
            raise _at(row, f"{name} '{value}' is of a Python file, and a table runs none")
        if (fault := fault_of("device", name, value)) is not None:
            raise _at(row, f"{name} {fault}")
    return found


def _columns(row: MeasuredRow) -> dict[str, str]:
    """Further columns that have a value, named as options are."""
    named = {n.strip().lower().replace("-", "_"): text.strip() for n, text in row.columns.items()}
    return {name: text for name, text in named.items() if text}


def _value(name: str, text: str) -> Value:
    number = parse_number(text) if name in STEP_COUNTS else None
    return text if number is None else number


def _at(row: MeasuredRow, told: str) -> CalibrationError:
    return CalibrationError(f"line {row.line} of the table: {told}")
