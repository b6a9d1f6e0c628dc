"""Time a CUDA device's memory and links: pinned copies one way and both, HBM, fixed costs.

Pinned memory is the executor's own, an anonymous mapping registered with the driver.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from twinstream.executor.memory.arena_memory import arena_pinning
from twinstream.executor.memory.pinned import pinned_arena
from twinstream.executor.probe.timing.device_timing import DeviceTimer
from twinstream.executor.probe.timing.fit import Line, UnsteadyLinkError, fit_link

_SIZES_BYTES = tuple(2**exponent for exponent in (16, 18, 20, 22, 24, 26, 28))
_HBM_BYTES = 2**31
_TRIES = 3
_BOTH_COPIES = 8  # of the largest size, each way
# Fewer than the driver lets wait on a stream before it blocks the host.
_NUM_LAUNCHES = 600
_NUM_WAITS = 200


@dataclass(frozen=True)
class Copies:
    """Copies of H2D and D2H: their lines alone, what each reaches while both are busy, and
    (direction, bytes, GB/s) of every size."""

    lines: tuple[Line, Line]
    both_bytes_per_s: tuple[float, float]
    rates: tuple[tuple[str, int, float], ...] = ()

    @property
    def alone_bytes_per_s(self) -> tuple[float, float]:
        """Return the bytes/s of H2D and of D2H, each alone."""
        h2d, d2h = self.lines
        return 1e9 / h2d.ns_per_unit, 1e9 / d2h.ns_per_unit

    @property
    def duplex_bytes_per_s(self) -> float:
        """Return the bytes/s of both at once: at least the faster alone, at most their sum."""
        alone = self.alone_bytes_per_s
        return min(sum(alone), max(*alone, sum(self.both_bytes_per_s)))

    @property
    def h2d_share(self) -> float:
        """Return H2D's share of the bytes/s of both directions at once."""
        return self.both_bytes_per_s[0] / sum(self.both_bytes_per_s)


@dataclass(frozen=True)
class Links:
    """The measured rates of copies and the fixed costs of launches and event waits."""

    copies: Copies
    hbm_copy_bytes_per_s: float
    launch_ns: float
    event_wait_ns: float


def measure_links(device: torch.device) -> Links:
    """Everything about copies and launches, on random data; takes some seconds.

    Raises:
        UnsteadyLinkError: something else uses the link meanwhile.
    """
    return Links(
        copies=measure_copies(device),
        hbm_copy_bytes_per_s=_hbm_copy_bytes_per_s(DeviceTimer(device)),
        launch_ns=_launch_ns(device),
        event_wait_ns=_event_wait_ns(device),
    )


def measure_copies(device: torch.device) -> Copies:
    """Copies between pinned memory and the device; takes a second, or three where it is unsteady.

    Raises:
        UnsteadyLinkError: something else uses the link, every time.
    """
    for _ in range(_TRIES - 1):
        try:
            return _measured_once(device)
        except UnsteadyLinkError:
            continue  # a neighbour's burst; the last time counts
    return _measured_once(device)


def _measured_once(device: torch.device) -> Copies:
    timer = DeviceTimer(device)
    half = _SIZES_BYTES[-1]
    with pinned_arena(2 * half, (), arena_pinning()) as arena:
        on_host = arena[0:half], arena[half : 2 * half]
        on_device = tuple(
            torch.empty(half, dtype=torch.uint8, device=device).random_(0, 256) for _ in range(2)
        )
        on_host[0].copy_(on_device[0])
        on_host[1].copy_(on_device[1])
        h2d = _times_ns(timer, on_device[0], on_host[0])
        d2h = _times_ns(timer, on_host[1], on_device[1])
        both = _both_ns(device, (on_device[0], on_host[0]), (on_host[1], on_device[1]))
        torch.cuda.synchronize(device)
    sizes = [float(size) for size in _SIZES_BYTES]
    lines = fit_link("H2D", sizes, h2d), fit_link("D2H", sizes, d2h)
    rates = tuple(
        (direction, size, size / ns)
        for direction, times in (("h2d", h2d), ("d2h", d2h))
        for size, ns in zip(_SIZES_BYTES, times, strict=True)
    )
    return Copies(lines, rates_of_both(_BOTH_COPIES * half, both, lines), rates)


def _times_ns(
    timer: DeviceTimer, destination: torch.Tensor, source: torch.Tensor
) -> Sequence[float]:
    def copy(size: int) -> Callable[[], object]:
        return lambda: destination[:size].copy_(source[:size], non_blocking=True)

    return [timer.mean_ns(copy(size)) for size in _SIZES_BYTES]


def _both_ns(
    device: torch.device,
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
) -> tuple[float, float]:
    """How long both directions take for equal bytes, begun together, each on its own stream."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    events[2].record(streams[0])
    streams[1].wait_event(events[2])
    for _ in range(_BOTH_COPIES):
        for stream, (destination, source) in zip(streams, (first, second), strict=True):
            with torch.cuda.stream(stream):
                destination.copy_(source, non_blocking=True)
    for stream, event in zip(streams, events, strict=False):
        event.record(stream)
    torch.cuda.synchronize(device)
    return events[2].elapsed_time(events[0]) * 1e6, events[2].elapsed_time(events[1]) * 1e6


def rates_of_both(
    size_bytes: float, times_ns: tuple[float, float], alone: tuple[Line, Line]
) -> tuple[float, float]:
    """Bytes per second of each of two copies of equal size while both run.

    The one that ends first ran beside the other all the time; what the other had left then, it
    copied as fast as alone.

    >>> line = Line(0.0, 1 / 50, 0.0)  # 50 bytes a ns
    >>> rates_of_both(4000.0, (100.0, 90.0), (line, line))[0] / 1e9
    38.888888888888886
    """
    until_ns = min(times_ns)
    done = [
        size_bytes - min((took - until_ns) / line.ns_per_unit, size_bytes)
        for took, line in zip(times_ns, alone, strict=True)
    ]
    return done[0] / until_ns * 1e9, done[1] / until_ns * 1e9


def _hbm_copy_bytes_per_s(timer: DeviceTimer) -> float:
    """Bytes read plus bytes written per second by a large copy inside the device."""
    source = torch.empty(_HBM_BYTES, dtype=torch.uint8, device=timer.device).random_(0, 256)
    destination = torch.empty_like(source)
    return 2 * _HBM_BYTES / timer.mean_ns(lambda: destination.copy_(source)) * 1e9


def _launch_ns(device: torch.device) -> float:
    """Device time from kernel to kernel when the host is ahead.

    The host is put ahead by a long kernel before the short ones.
    """
    small = torch.zeros(32, device=device)
    long = torch.randn(8192, 8192, device=device)
    product = torch.empty_like(long)
    small.add_(1.0)
    torch.mm(long, long, out=product)
    torch.cuda.synchronize(device)
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    for _ in range(4):
        torch.mm(long, long, out=product)
    start.record()
    for _ in range(_NUM_LAUNCHES):
        small.add_(1.0)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) * 1e6 / _NUM_LAUNCHES)


def _event_wait_ns(device: torch.device) -> float:
    """What an event across streams costs: a ping-pong of two, less the kernels it orders."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    small = [torch.zeros(32, device=device) for _ in streams]
    long = torch.randn(8192, 8192, device=device)
    product = torch.empty_like(long)
    alone_ns = _ping_pong_ns(streams[:1] * 2, small, lambda: torch.mm(long, long, out=product))
    across_ns = _ping_pong_ns(streams, small, lambda: torch.mm(long, long, out=product))
    return max(0.0, across_ns - alone_ns)


def _ping_pong_ns(
    streams: Sequence[torch.cuda.Stream],
    small: Sequence[torch.Tensor],
    busy: Callable[[], object],
) -> float:
    """Mean time of one small kernel that waits for the other stream's."""
    torch.cuda.synchronize()
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(streams[0]):
        for _ in range(4):
            busy()
        start.record()
    before = start
    for number in range(_NUM_WAITS):
        stream = streams[number % 2]
        stream.wait_event(before)
        with torch.cuda.stream(stream):
            small[number % 2].add_(1.0)
            before = torch.cuda.Event()  # type: ignore[no-untyped-call]
            before.record()
    with torch.cuda.stream(streams[(_NUM_WAITS - 1) % 2]):
        end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end) * 1e6 / _NUM_WAITS)
