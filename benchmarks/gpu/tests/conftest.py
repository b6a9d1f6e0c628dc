"""Cells are planned once for all tests."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.cells import plans
from benchmarks.gpu.cells.plans import PlannedCell, PlanRequest, Refused


@pytest.fixture(scope="session")
def planned_cells(tmp_path_factory: pytest.TempPathFactory) -> dict[object, object]:
    return {"folder": tmp_path_factory.mktemp("plans")}


@pytest.fixture(autouse=True)
def _planned_once(monkeypatch: pytest.MonkeyPatch, planned_cells: dict[object, object]) -> None:
    plan, folder = plans.plan_cell, planned_cells["folder"]
    assert isinstance(folder, Path)

    def planned(request: PlanRequest) -> PlannedCell | Refused:
        key = (request.cell, request.machine.content_hash)
        if key not in planned_cells:
            planned_cells[key] = plan(replace(request, folder=folder))
        found = planned_cells[key]
        assert isinstance(found, PlannedCell | Refused)
        return found

    monkeypatch.setattr(plans, "plan_cell", planned)
