"""Memory of a process that plans 8B 200 times.

`pytest -m bench -s -o faulthandler_timeout=0 tests/bench/test_bench_memory.py`, for half an hour.
What a `Planner` keeps from plan to plan, and the explorer's last answers, fill up first.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.presets import load_model
from twinstream.planner.choices import Choices
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep, caps_of
from twinstream.schedule.document import Caps
from twinstream.simulator.replay import steady_state
from twinstream.study.answer import Answer
from twinstream.study.explore.answers import Answers, State
from twinstream.study.one_device import DeviceQuery
from twinstream.study.sweep.cells import OK, Cell, run_cell

pytestmark = pytest.mark.bench
NUM_PLANS, WARM_UP, MIB = 200, 100, 2**20
QUICK, STEP = Choices(effort="quick"), TrainingStep(8192)
H100, SPEC = load_machine("h100"), load_model("8b")
ANSWERS, PLANNER = Answers({}, {}), Planner(steady_state)


def of_a_sweep(caps: Caps) -> bool:
    values = {"model": "8b", "machine": "h100", "device_mem": caps.device_bytes or 0}
    request = PlanRequest(SPEC, STEP, H100, caps, choices=QUICK)
    return run_cell(Cell(values, DeviceQuery(request)), PLANNER)["status"] == OK


def of_the_explorer(caps: Caps) -> bool:
    state = State(tokens_per_step="", device_mem=str(caps.device_bytes), host_mem="")
    return isinstance(ANSWERS.answer(state, "h100"), Answer)


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MIB


@pytest.mark.parametrize("planned", [of_a_sweep, of_the_explorer])
def test_memory_is_flat(planned: Callable[[Caps], bool]):
    rng, seen = random.Random(1), [resident_mib()]
    for number in range(NUM_PLANS):
        caps = caps_of(H100, round(rng.uniform(9, 76) * 2**30), None)
        assert planned(caps)
        seen.append(resident_mib())
        if number % 10 == 9:
            print(f"{planned.__name__}: {number + 1} plans, {seen[-1]:.0f} MiB", flush=True)
    assert max(seen[WARM_UP:]) < 1.1 * max(seen[:WARM_UP])
