"""What a run and a probe count on a machine that others use: the time that a thread had a core."""

import time

from tests.helpers.plans import MACHINE, planned
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.backends.cpu import CpuBackend
from twinstream.executor.program.compiled import Work, compile_program
from twinstream.executor.replay import dispatch
from twinstream.schedule.document import Caps
from twinstream.schedule.ops import Compute


def work_for(core_ms: float, idle_ms: float) -> None:
    """So long on a core, then off it."""
    until = time.thread_time() + core_ms / 1e3
    while time.thread_time() < until:
        pass
    time.sleep(idle_ms / 1e3)


def test_a_run_says_how_much_of_their_time_its_kernels_had_a_core():
    schedule = planned(tiny_chain("one chunk"), MACHINE, Caps(), "resident")

    def core_share(num_passes: int, idle_ms: float) -> float | None:
        works: list[Work] = [
            (lambda number: work_for(0.5, idle_ms))
            if isinstance(op, Compute)
            else lambda number: None
            for op in schedule.ops
        ]
        backend = CpuBackend(compile_program(schedule), works)
        dispatch.run_passes(compile_program(schedule), backend, dispatch.PassOptions(num_passes))
        return backend.processor_share

    assert core_share(1, 0.0) is None  # the first pass is not counted
    share = core_share(3, 1.5)
    assert share is not None
    assert 0 < share < 0.5  # a quarter by itself; a busy machine adds to both parts
