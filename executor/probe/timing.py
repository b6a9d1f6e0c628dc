"""Time a call: warm, repeated, the median."""

import statistics
import time
from collections.abc import Callable

_MIN_REPEATS = 5
_MAX_REPEATS = 50
_BUDGET_S = 0.08


def median_ns(call: Callable[[], object]) -> float:
    """Median time of one call after a warm-up, repeated for about a tenth of a second."""
    call()
    times_ns: list[int] = []
    deadline = time.perf_counter() + _BUDGET_S
    while len(times_ns) < _MIN_REPEATS or (
        time.perf_counter() < deadline and len(times_ns) < _MAX_REPEATS
    ):
        start_ns = time.perf_counter_ns()
        call()
        times_ns.append(time.perf_counter_ns() - start_ns)
    return statistics.median(times_ns)
