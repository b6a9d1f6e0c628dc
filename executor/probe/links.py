"""Time copies between the two host arenas, one way and both ways, and a wake-up across threads."""

import queue
import threading
import time
from collections.abc import Callable

import torch

from twinstream.executor.probe.timing.fit import Line, fit_line
from twinstream.executor.probe.timing.timing import median_ns

_SIZES = tuple(2**exponent for exponent in (14, 16, 18, 20, 22, 24))


def copy_line() -> Line:
    """One thread copying within host memory, by size in bytes."""
    return fit_line(_SIZES, [median_ns(_copy(size)) for size in _SIZES])


def duplex_bytes_per_s() -> float:
    """Bytes per second of two threads that copy at the same time, both counted."""
    size, repeats = _SIZES[-1], 8
    copies = [_copy(size), _copy(size)]

    def many(copy: Callable[[], object]) -> None:
        torch.set_num_threads(1)
        for _ in range(repeats):
            copy()

    threads = [threading.Thread(target=many, args=(copy,)) for copy in copies]
    start_ns = time.perf_counter_ns()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 2 * repeats * size / (time.perf_counter_ns() - start_ns) * 1e9


def wake_up_ns() -> float:
    """Measure the time from an event set in one thread until another, waiting for it, goes on."""
    there: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
    back: queue.SimpleQueue[int] = queue.SimpleQueue()

    def serve() -> None:
        for _ in range(rounds):
            there.get().wait()
            back.put(time.perf_counter_ns())

    rounds = 100
    thread = threading.Thread(target=serve)
    thread.start()
    delays_ns = []
    for _ in range(rounds):
        event = threading.Event()
        there.put(event)
        time.sleep(0.0003)
        start_ns = time.perf_counter_ns()
        event.set()
        delays_ns.append(back.get() - start_ns)
    thread.join()
    return float(sorted(delays_ns)[rounds // 2])


def _copy(size_bytes: int) -> Callable[[], object]:
    source = torch.randint(0, 255, (size_bytes,), dtype=torch.uint8)
    destination = torch.empty_like(source)
    return lambda: destination.copy_(source)
