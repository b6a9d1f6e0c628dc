"""Which machine of a table a profile is of, and which rows can be predicted at all."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from twinstream.fidelity.cells import CellKey, key_of
from twinstream.fidelity.seed_system.classes import (
    UnknownMachineClass,
    machine_class,
)
from twinstream.fidelity.seed_system.sizing import SizingRefused, UnsuitableModel
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.schema import Machine
from twinstream.hardware_profiles.shipped import machine_names
from twinstream.models.presets import UnknownModelError

_DATASHEET = (
    "peak_bf16_flop_per_s",
    "peak_fp32_flop_per_s",
    "hbm_bytes_per_s",
    "device_memory_bytes",
    "pcie_h2d_bytes_per_s",
)


@dataclass(frozen=True)
class Known:
    """What the seed system would make of rows, by their lines, and what is beyond what is known.

    `unknown` counts the rows whose model nobody here knows, by the reason.
    """

    keys: Mapping[int, CellKey]
    refused: Mapping[int, str]
    unknown: Mapping[str, int]


def planned(rows: Iterable[MeasuredRow], on_row: Callable[[], None] = lambda: None) -> Known:
    """By line: what decides the schedule, or why the policy refuses the row.

    `on_row` is called after each.
    """
    keys: dict[int, CellKey] = {}
    refused: dict[int, str] = {}
    unknown: Counter[str] = Counter()
    for row in rows:
        try:
            keys[row.line] = key_of(row)
        except SizingRefused as error:
            refused[row.line] = error.reason
        except (UnknownModelError, UnsuitableModel) as error:
            unknown[str(error)] += 1
        on_row()
    return Known(keys, refused, unknown)


def nothing_left(known: Known) -> str:
    """What to say where no row is left to predict."""
    why = "".join(f"; {count} rows: {reason}" for reason, count in known.unknown.items())
    return f"no row of the table both ran and can be planned, so there is nothing to compare{why}"


def profiles_of(names: Sequence[str], machines: Sequence[Machine]) -> dict[str, Machine]:
    """The profile of each machine of a table that has one, by the machine's name in the table.

    A profile is of the class that its name contains; where it contains none, of the shipped
    machine that it has its datasheet from. A single profile takes a table of a single machine,
    whatever they are called.

    Raises:
        UnknownMachineClass: nothing tells what machine a profile is of.
    """
    if len(names) == len(machines) == 1:
        return {names[0]: machines[0]}
    by_class = {class_of(machine): machine for machine in machines}
    classes = {name: class_named(name) for name in names}
    return {name: by_class[found] for name, found in classes.items() if found in by_class}


def class_of(machine: Machine) -> str:
    """Name of the class of a profile's machine; see `profiles_of`."""
    found = class_named(machine.name) or next(
        filter(None, map(class_named, _relatives(machine))), None
    )
    if found is None:
        return machine_class(machine.name).name  # raises, and says what there is
    return found


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
