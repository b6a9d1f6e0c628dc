"""Speed of the simulator on a pipeline of loads, tasks and stores.

pytest tests/bench/test_bench_simulate.py -m bench -s
"""

import time

import pytest

from tests.helpers.flat_machine import (
    COPY_NS,
    FLOP_PER_NS,
    LAUNCH_NS,
    WAIT_NS,
    flat_machine,
)
from tests.helpers.sketches import op, sketch
from twinstream.schedule.cost import Work
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import KernelCall, Op
from twinstream.simulator.replay import simulate_rank

RING = 4
TASK_NS = 1000


def pipeline(num_tasks: int) -> RankSchedule:
    """Every task waits for its load, its store for the task, and the load for a free place."""
    ops: list[Op] = []
    for i in range(num_tasks):
        earlier = i - RING
        free = (f"store{earlier % num_tasks}",)
        ops += [
            op(f"load{i}", "h2d", free if earlier >= 0 else (), free if earlier < 0 else ()),
            op(f"task{i}", "compute", (f"load{i}",)),
            op(f"store{i}", "d2h", (f"task{i}",)),
        ]
    flops = TASK_NS * FLOP_PER_NS
    work = Work(unit="matmul", shape=(), flops=flops, hbm_bytes=1000, launches=1)
    call = KernelCall(kernel="nothing/eager", attributes={}, cost=(work,))
    return sketch(ops, calls={"call": call})


@pytest.mark.bench
@pytest.mark.parametrize("num_ops", [1_000, 10_000])
def test_bench_simulate(num_ops, capsys):
    num_tasks = num_ops // 3
    schedule = pipeline(num_tasks)
    begun = time.perf_counter()
    timeline = simulate_rank(schedule, flat_machine())
    seconds = time.perf_counter() - begun
    # the copies of 1 KiB hide under the tasks, and take none of what these need
    assert timeline.step_ns == num_tasks * (WAIT_NS + LAUNCH_NS + TASK_NS)
    assert timeline.period_passes == 1
    first, last = COPY_NS + -(-1024 // 50), WAIT_NS + COPY_NS + -(-1024 // 40)
    assert timeline.cold_ns == first + timeline.step_ns + last
    passes = 2 + 1  # until the state repeats, and the cold one
    with capsys.disabled():
        print(
            f"\nsimulate: {len(schedule.ops)} ops, {seconds:.2f} s for {passes} passes, "
            f"{passes * len(schedule.ops) / seconds:,.0f} ops/s"
        )
