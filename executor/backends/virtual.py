"""A clock instead of a machine: every op takes a given time, no tensors."""

from collections.abc import Callable

from twinstream.schedule.ops import Compute, Copy, Feed, Fetch, Op, Stream


class VirtualBackend:
    """Streams are clocks; an op that waits for others pays `wait_ns` once before it starts."""

    def __init__(self, duration_ns: Callable[[Op], int], wait_ns: int = 0) -> None:
        self._duration_ns = duration_ns
        self._wait_ns = wait_ns
        self._free_ns: dict[Stream, int] = {}
        self._waited_ns: dict[Stream, int] = {}
        self._spans: list[tuple[int, int]] = []

    def wait(self, stream: Stream, event: int) -> None:
        self._waited_ns[stream] = max(event, self._waited_ns.get(stream, 0))

    def compute(self, op: Compute) -> None:
        self._run(op)

    def copy(self, op: Copy) -> None:
        self._run(op)

    def host(self, op: Feed | Fetch) -> None:
        self._run(op)

    def record(self, stream: Stream) -> int:
        return self._free_ns[stream]

    def finish(self) -> list[tuple[int, int]]:
        return self._spans

    def _run(self, op: Op) -> None:
        start_ns = self._free_ns.get(op.stream, 0)
        waited_ns = self._waited_ns.pop(op.stream, None)
        if waited_ns is not None:
            start_ns = max(start_ns, waited_ns) + self._wait_ns
        end_ns = start_ns + self._duration_ns(op)
        self._free_ns[op.stream] = end_ns
        self._spans.append((start_ns, end_ns))
