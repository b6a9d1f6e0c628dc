"""Memory of a process that plans 8B 200 times.

`pytest -m bench -s -o faulthandler_timeout=0 tests/bench/test_bench_memory.py`, for half an hour.
What is kept from plan to plan (`planner/reuse.py`, the explorer's last answers) fills up first.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from twinstream import Choices, Planner, PlanRequest, TrainingStep, steady_state
from twinstream.explorer.answers import Answer, Answers
from twinstream.explorer.state import State
from twinstream.sweep.cell import OK, run_cell
from twinstream.sweep.config import Cell

pytestmark = pytest.mark.bench
NUM_PLANS, WARM_UP, MIB = 200, 100, 2**20
ANSWERS, PLANNER = Answers({}, {}), Planner(steady_state)


def of_a_sweep(request: PlanRequest) -> bool:
    device_bytes = request.caps.device_bytes
    values = {"model": "8b", "machine": "h100", "device_mem": device_bytes or 0}
    return run_cell(Cell(values, request), PLANNER)["status"] == OK


def of_the_explorer(request: PlanRequest) -> bool:
    device_mem = str(request.caps.device_bytes)
    state = State(tokens_per_step="", device_mem=device_mem, host_mem="")
    return isinstance(ANSWERS.answer(state, "h100"), Answer)


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MIB


@pytest.mark.parametrize("planned", [of_a_sweep, of_the_explorer])
def test_memory_is_flat(planned: Callable[[PlanRequest], bool]):
    rng, seen = random.Random(1), [resident_mib()]
    for number in range(NUM_PLANS):
        device_mem = round(rng.uniform(9, 76) * 2**30)
        request = PlanRequest.of(
            "8b", "h100", step=TrainingStep(8192), device_mem=device_mem,
            choices=Choices(effort="quick"),
        )  # fmt: skip
        assert planned(request)
        seen.append(resident_mib())
        if number % 10 == 9:
            print(f"{planned.__name__}: {number + 1} plans, {seen[-1]:.0f} MiB", flush=True)
    assert max(seen[WARM_UP:]) < 1.1 * max(seen[:WARM_UP])
