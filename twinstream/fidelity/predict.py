"""Predicted speeds of the seed system's schedules, timed as their source times them."""

import math
from dataclasses import dataclass

from twinstream.fidelity.cells import Cell, cell_of
from twinstream.fidelity.seed_system.policy import timed_ns
from twinstream.hardware_profiles.link import LINK_FIELDS
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.overrides import override
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.ops import Compute
from twinstream.schedule.timeline import PassSpans
from twinstream.simulator.costs import MachineCosts
from twinstream.simulator.replay import replay_passes

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


@dataclass(frozen=True)
class Phases:
    """Seconds of the parts of a round in the middle (of the last one, where there are few rounds),
    of what follows the last round, and of the whole step."""

    forward_s: float
    head_s: float
    backward_s: float
    round_s: float
    optimizer_s: float
    step_s: float


def predict_row(row: MeasuredRow, machine: Machine) -> Prediction:
    """Predict one row of a measured table on a machine.

    Raises:
        SizingRefused: the seed system would not run the row.
        MissingNumberError: the profile lacks a number.
    """
    return predict_cell(cell_of(row), machine)


def predict_cell(cell: Cell, machine: Machine) -> Prediction:
    """Predict a step of a schedule on a machine; two simulations."""
    seconds = step_s(cell, machine)
    return Prediction(cell.tokens_per_step / seconds, seconds, free_link_step_s(cell, machine))


def step_s(cell: Cell, machine: Machine) -> float:
    """Seconds of a step, from compute's start to the end of the last outbound copy.

    Steps are apart from each other by a barrier, so that one pass from empty queues is a step. Its
    rounds but the first and the last repeat exactly: each further one adds the middle one's time.
    """
    spans = _one_pass(cell, machine)
    return _step_ns(cell, spans) / 1e9


def free_link_step_s(cell: Cell, machine: Machine) -> float:
    """The same with infinitely fast links and host memory."""
    return step_s(cell, override(machine, dict.fromkeys(_FREE, math.inf)))


def phases(cell: Cell, machine: Machine) -> Phases:
    """Where a step's time goes, by the starts and ends of compute tasks."""
    spans = _one_pass(cell, machine)
    starts, ends = _round_marks(cell, spans)
    middle = min(1, len(starts) - 1)
    mark, end = starts[middle], ends[middle]
    after = ends[-1]["embed_backward"]
    return Phases(
        forward_s=(mark["head_loss"] - mark["embed_forward"]) / 1e9,
        head_s=(mark["block_backward"] - mark["head_loss"]) / 1e9,
        backward_s=(end["embed_backward"] - mark["block_backward"]) / 1e9,
        round_s=(end["embed_backward"] - mark["embed_forward"]) / 1e9,
        optimizer_s=(timed_ns(cell.schedule, spans) + starts[0]["embed_forward"] - after) / 1e9,
        step_s=_step_ns(cell, spans) / 1e9,
    )


def _one_pass(cell: Cell, machine: Machine) -> PassSpans:
    (spans,) = replay_passes(cell.timed, MachineCosts(cell.timed, machine), 1)
    return spans


def _step_ns(cell: Cell, spans: PassSpans) -> int:
    simulated_ns = timed_ns(cell.schedule, spans)
    more = cell.rounds_per_step - cell.schedule.workload.rounds_per_step
    if not more:
        return simulated_ns
    starts, _ = _round_marks(cell, spans)
    middle_ns = starts[-1]["embed_forward"] - starts[-2]["embed_forward"]
    return simulated_ns + more * middle_ns


def _round_marks(cell: Cell, spans: PassSpans) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """Per round: when the first task of each kind starts, and when the last one ends.

    A recompute before the first backward counts as backward.
    """
    rounds = cell.schedule.workload.rounds_per_step
    starts: list[dict[str, int]] = [{} for _ in range(rounds)]
    ends: list[dict[str, int]] = [{} for _ in range(rounds)]
    for op, start_ns, end_ns in zip(cell.schedule.ops, spans.start_ns, spans.end_ns, strict=True):
        if isinstance(op, Compute) and op.label.round is not None:
            kind = "block_backward" if op.label.kind == "block_recompute" else op.label.kind
            starts[op.label.round].setdefault(kind, start_ns)
            ends[op.label.round][kind] = end_ns
    return starts, ends
