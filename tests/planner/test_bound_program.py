"""Linear programs: what satisfies no rows, and optima found from another one."""

import highspy
import numpy as np
import pytest

from twinstream.planner.bound import program as program_module
from twinstream.planner.bound.program import LinearProgram


def knapsack(seed: int, rows: int = 6, columns: int = 9) -> tuple[LinearProgram, dict[int, float]]:
    """Shares of things with worths and weights, at least half a share of them all in all."""
    rng = np.random.default_rng(seed)
    program = LinearProgram()
    things = [program.column() for _ in range(columns)]
    for _ in range(rows):
        weights = rng.uniform(0.1, 1.0, columns)
        program.at_most(list(zip(things, weights, strict=True)), rng.uniform(0.5, 1.5))
    program.equal([(thing, 1.0) for thing in things], 0.5)
    return program, {thing: -rng.uniform(0.1, 1.0) for thing in things}


@pytest.mark.parametrize("seed", range(20))
def test_from_another_optimum_it_comes_to_the_same(seed):
    program, costs = knapsack(seed)
    with program.extended():
        program.at_most([(0, 1.0), (1, 1.0)], 0.1)
        start = program.minimise(costs)
    with program.extended():
        program.at_most([(0, 1.0), (1, 0.5)], 0.2)
        alone = program.minimise(costs)
        assert start is not None and alone is not None
        again = program.minimise(costs, start.basis)
    assert again is not None
    assert again.dual_objective == pytest.approx(alone.dual_objective, rel=1e-9)
    np.testing.assert_allclose(again.values, alone.values, atol=1e-7)
    reached = sum(cost * again.values[column] for column, cost in costs.items())
    assert reached == pytest.approx(again.dual_objective, rel=1e-7)


@pytest.mark.parametrize("seed", range(20))
def test_interior_points_come_to_the_optimum_of_the_simplex_with_a_basis_to_go_on_from(
    seed, monkeypatch
):
    program, costs = knapsack(seed)
    by_simplex = program.minimise(costs)
    monkeypatch.setattr(program_module, "_LARGE_ROWS", 0)
    told = options_told(monkeypatch)
    found = program.minimise(costs)
    assert told == ["simplex", "ipm"]
    assert by_simplex is not None and found is not None
    assert found.dual_objective == pytest.approx(by_simplex.dual_objective, rel=1e-9)
    reached = sum(cost * found.values[column] for column, cost in costs.items())
    assert reached == pytest.approx(found.dual_objective, rel=1e-7)
    again = program.minimise(costs, found.basis)
    assert again is not None
    assert again.dual_objective == pytest.approx(by_simplex.dual_objective, rel=1e-9)
    assert told[2:] == ["simplex"]


def test_what_interior_points_leave_open_the_simplex_decides(monkeypatch):
    program, costs = knapsack(0)
    alone = program.minimise(costs)
    monkeypatch.setattr(program_module, "_LARGE_ROWS", 0)
    status, open_at = highspy.Highs.getModelStatus, [highspy.HighsModelStatus.kUnknown]
    monkeypatch.setattr(
        highspy.Highs, "getModelStatus", lambda self: open_at.pop() if open_at else status(self)
    )
    told = options_told(monkeypatch)
    found = program.minimise(costs)
    assert told == ["simplex", "ipm", "simplex"] and not open_at
    assert found is not None and alone is not None
    assert found.dual_objective == pytest.approx(alone.dual_objective, rel=1e-9)


@pytest.mark.parametrize("large_rows", [0, 10**9])
def test_contradictions_are_found_by_both_solvers(large_rows, monkeypatch):
    monkeypatch.setattr(program_module, "_LARGE_ROWS", large_rows)
    program, costs = knapsack(0)
    program.at_most([(thing, 1.0) for thing in costs], 0.2)
    assert program.minimise(costs) is None


def options_told(monkeypatch) -> list[str]:
    """The solvers that HiGHS is told, as they come."""
    told: list[str] = []
    before = highspy.Highs.setOptionValue

    def tell(self, name, value):
        if name == "solver":
            told.append(value)
        return before(self, name, value)

    monkeypatch.setattr(highspy.Highs, "setOptionValue", tell)
    return told


def test_only_a_basis_of_the_same_size_is_begun_with(monkeypatch):
    begun = []
    begin = highspy.Highs.setBasis

    def noted(solver, basis):
        begun.append(basis)
        return begin(solver, basis)

    monkeypatch.setattr(highspy.Highs, "setBasis", noted)
    program, costs = knapsack(1)
    first = program.minimise(costs)
    assert first is not None
    assert begun == []
    program.minimise(costs, first.basis)
    assert begun == [first.basis.statuses]
    with program.extended():
        program.at_most([(0, 1.0)], 0.5)
        larger = program.minimise(costs, first.basis)
    assert len(begun) == 1
    assert larger is not None
    program.minimise(costs, larger.basis)
    assert len(begun) == 1


def test_no_values_satisfy_rows_that_contradict_each_other():
    program, costs = knapsack(1)
    start = program.minimise(costs)
    assert start is not None
    with program.extended():
        program.at_most([(thing, 1.0) for thing in costs], 0.4)
        assert program.minimise(costs) is None
    with program.extended():
        program.at_most([(0, -1.0)], -1.0)
        assert program.minimise(costs, start.basis) is None
    again = program.minimise(costs)
    assert again is not None
    assert again.dual_objective == start.dual_objective


def test_where_going_on_from_a_basis_ends_nowhere_it_begins_anew(monkeypatch):
    program, costs = knapsack(2)
    first = program.minimise(costs)
    assert first is not None
    status, asked = highspy.Highs.getModelStatus, []

    def astray(solver):
        asked.append(solver)
        return highspy.HighsModelStatus.kUnknown if len(asked) == 1 else status(solver)

    monkeypatch.setattr(highspy.Highs, "getModelStatus", astray)
    again = program.minimise(costs, first.basis)
    assert again is not None
    assert again.dual_objective == first.dual_objective
    assert len(asked) == 2


def test_a_solver_is_silent_before_its_callbacks_are_enabled(monkeypatch):
    """From highspy 1.16 on that prints a banner of two lines to standard output."""
    enable, loud = highspy.Highs.enableCallbacks, []

    def noted(solver: highspy.Highs) -> None:
        loud.append(solver.getOptionValue("output_flag")[1])
        enable(solver)

    monkeypatch.setattr(highspy.Highs, "enableCallbacks", noted)
    program = LinearProgram()
    assert program.minimise({program.column(): 1.0}) is not None
    assert loud == [False]
