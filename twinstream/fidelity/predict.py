"""Predicted speeds of rows' schedules; the seed system's are timed as their source times them."""

import math
from dataclasses import dataclass

from twinstream.fidelity.cells import Cell, CellKey, cell_of, key_of
from twinstream.fidelity.own_rows import OwnCell, OwnKey, own_cell, own_key
from twinstream.fidelity.seed_system.policy import timed_ns
from twinstream.hardware_profiles.link import LINK_FIELDS
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.overrides import override
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.ops import Compute
from twinstream.schedule.timeline import PassSpans
from twinstream.simulator.costs import MachineCosts
from twinstream.simulator.replay import replay_passes, steady_state

RowKey = CellKey | OwnKey
RowCell = Cell | OwnCell
_FREE = (*LINK_FIELDS, "host_dram_bytes_per_s")  # where a step waits for no copy


@dataclass(frozen=True)
class Prediction:
    """A step as predicted, and as it would be were links and host memory infinitely fast."""

    tokens_per_s: float
    step_s: float
    free_link_step_s: float

    @property
    def stall(self) -> float:
        """How much slower than with infinite links, a fraction."""
        return self.step_s / self.free_link_step_s - 1.0


def key_of_row(row: MeasuredRow) -> RowKey:
    """What the row's schedule is decided by; raises as `key_of` and `own_key`."""
    return own_key(row) if row.is_ours else key_of(row)


def cell_of_row(row: MeasuredRow, machine: Machine) -> RowCell:
    """The row's schedule; one of ours is planned for the machine. Raises as they do."""
    return own_cell(row, machine) if row.is_ours else cell_of(row)


def predict_row(row: MeasuredRow, machine: Machine) -> Prediction:
    """Predict one row of a measured table on a machine.

    Raises:
        SizingRefused: the seed system would not run the row.
        InfeasiblePlan: no plan of ours fits the row's caps.
        MissingNumberError: the profile lacks a number.
    """
    return predict_cell(cell_of_row(row, machine), machine)


def predict_cell(cell: RowCell, machine: Machine) -> Prediction:
    """Predict a step of a schedule on a machine; two simulations."""
    seconds = step_s(cell, machine)
    return Prediction(cell.tokens_per_step / seconds, seconds, free_link_step_s(cell, machine))


def step_s(cell: RowCell, machine: Machine) -> float:
    """Seconds of a step: of ours in the steady state, of the seed system's as it times them."""
    if isinstance(cell, OwnCell):
        return steady_state(cell.schedule, machine).step_ns / 1e9
    return _seed_step_s(cell, machine)


def _seed_step_s(cell: Cell, machine: Machine) -> float:
    """From compute's start to the end of the last outbound copy.

    Steps are apart from each other by a barrier, so that one pass from empty queues is a step. Its
    rounds but the first and the last repeat exactly: each further one adds the middle one's time.
    """
    (spans,) = replay_passes(cell.timed, MachineCosts(cell.timed, machine), 1)
    step_ns = timed_ns(cell.schedule, spans)
    if more := cell.rounds_per_step - cell.schedule.workload.rounds_per_step:
        starts_ns = _round_starts_ns(cell, spans)
        step_ns += more * (starts_ns[-1] - starts_ns[-2])
    return step_ns / 1e9


def free_link_step_s(cell: RowCell, machine: Machine) -> float:
    """The same with infinitely fast links and host memory."""
    return step_s(cell, override(machine, dict.fromkeys(_FREE, math.inf)))


def _round_starts_ns(cell: Cell, spans: PassSpans) -> list[int]:
    """When each round's first task starts."""
    found: dict[int | None, int] = {}
    for op, start_ns in zip(cell.schedule.ops, spans.start_ns, strict=True):
        if isinstance(op, Compute) and op.label.kind == "embed_forward":
            found.setdefault(op.label.round, start_ns)
    return list(found.values())
