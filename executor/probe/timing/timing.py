"""Time a call the way a training step makes it: its operands are not in the caches."""

import statistics
import time
from collections.abc import Callable

import torch

_MIN_REPEATS = 5
_MAX_REPEATS = 30
_BUDGET_S = 0.12
_EVICTING_BYTES = 48 * 2**20


def median_ns(call: Callable[[], object]) -> float:
    """Median time of one call after a warm-up, caches emptied before each.

    Of a call in one thread only the time that it had a core counts: what else runs on a busy
    machine is no part of it.
    """
    clock_ns = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    call()
    evicting = torch.empty(_EVICTING_BYTES, dtype=torch.uint8)
    times_ns: list[int] = []
    deadline = time.perf_counter() + _BUDGET_S
    while len(times_ns) < _MIN_REPEATS or (
        time.perf_counter() < deadline and len(times_ns) < _MAX_REPEATS
    ):
        evicting.fill_(len(times_ns))
        start_ns = clock_ns()
        call()
        times_ns.append(clock_ns() - start_ns)
    return statistics.median(times_ns)
