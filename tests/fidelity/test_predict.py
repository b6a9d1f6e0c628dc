"""Predicted steps of recorded cells: short schedules stand for long ones, timed as their source."""

from pathlib import Path

import pytest

from twinstream.fidelity.seed_system.cells import Cell, cell_of, key_of, sizing_of
from twinstream.fidelity.seed_system.kernels import with_its_kernels
from twinstream.fidelity.seed_system.policy import emit_seed, seed_chain, timed_ns
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.measured_table import MeasuredRow, read_measured
from twinstream.hardware_profiles.overrides import override
from twinstream.models.presets import load_preset
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank
from twinstream.simulator.costs import MachineCosts
from twinstream.simulator.replay import replay_passes

FEW = Path(__file__).parents[1] / "data" / "measured_few.csv"
H100 = load_machine("h100")


@pytest.fixture(scope="module")
def rows() -> tuple[MeasuredRow, ...]:
    return read_measured(FEW)


@pytest.fixture(scope="module")
def cell(rows: tuple[MeasuredRow, ...]) -> Cell:
    return cell_of(rows[0])


def test_a_recorded_cell_is_a_safe_schedule_of_its_model(rows, cell):
    spec = load_preset(rows[0].preset)
    assert cell.schedule.workload.rounds_per_step == 3
    assert verify_rank(cell.schedule) == []
    assert conforms(cell.schedule, seed_chain(spec, cell.schedule.workload)) == []


@pytest.mark.parametrize("slower", [1.0, 4.0])
def test_further_rounds_take_as_long_as_the_middle_one(rows, cell, slower):
    """A whole step of eight rounds against three of them, also where the link is the limit."""
    machine = override(
        H100, {field: H100.number(field) / slower for field in
               ("pcie_h2d_bytes_per_s", "pcie_d2h_bytes_per_s", "pcie_duplex_bytes_per_s")}
    )  # fmt: skip
    row = rows[0].model_copy(update={"rounds_per_step": 8})
    sizing, spec = sizing_of(row), load_preset(row.preset)
    emitted = emit_seed(spec, seed_chain(spec, sizing.workload), sizing, cell.schedule.machine)
    whole = with_its_kernels(emitted, spec)
    (spans,) = replay_passes(whole, MachineCosts(whole, machine), 1)
    assert cell_of(row).step_s(machine) * 1e9 == pytest.approx(timed_ns(whole, spans), abs=8)


def test_rounds_are_the_recorded_ones(rows):
    row = rows[0].model_copy(update={"rounds_per_step": 5})
    assert key_of(row).plan.rounds_per_step == 5
    bare = row.model_copy(update={"rounds_per_step": None})
    assert key_of(bare).plan.rounds_per_step == 24  # by rule v1
    assert cell_of(row).tokens_per_step == 5 * 16384


def test_rounds_follow_from_step_time_where_nothing_else_tells_them(rows):
    tokens = 7 * 16384
    bare = {"rounds_per_step": None, "rounds_rule": "", "tokens_per_s": 1000.0}
    row = rows[0].model_copy(update={**bare, "step_time_s": tokens / 1000.0 * 1.004})
    assert key_of(row).plan.rounds_per_step == 7
    untold = row.model_copy(update={"step_time_s": None})
    assert key_of(untold) == key_of(untold.model_copy(update={"rounds_rule": "v2"}))


def test_caps_that_change_nothing_give_the_same_schedule(rows):
    assert key_of(rows[1]) == key_of(rows[2])
    assert key_of(rows[0]) != key_of(rows[1])


def test_a_slow_link_stalls_the_step_and_infinite_ones_do_not(cell):
    fast = cell.predicted(H100)
    slow = cell.predicted(override(H100, {"pcie_h2d_bytes_per_s": 4e9}))
    assert fast.step_s < slow.step_s
    assert slow.stall > 1.0 > fast.stall >= 0.0
    fast_s, slow_s = (found.step_s / (1 + found.stall) for found in (fast, slow))
    assert fast_s == pytest.approx(slow_s)
    assert fast.tokens_per_s == pytest.approx(cell.tokens_per_step / fast.step_s)
