"""A clock instead of a machine: every op takes a given time, no tensors."""

from collections.abc import Callable

from twinstream.executor.backends.protocol import MeasuredPass
from twinstream.executor.program.compiled import Launch, Program
from twinstream.schedule.ops import Op
from twinstream.schedule.timeline import PassSpans


class VirtualBackend:
    """Streams are clocks; an op that the schedule has wait for others pays `wait_ns` once.

    It pays as in the simulator, whether or not the compiled program still has it wait.
    """

    def __init__(
        self, program: Program, duration_ns: Callable[[Op], int], wait_ns: int = 0
    ) -> None:
        self.waited_ns = 0
        self._program = program
        self._duration_ns = duration_ns
        self._wait_ns = wait_ns
        self._free_ns = [0] * len(program.streams)
        self._ready_ns = 0
        self._spans: list[list[tuple[int, int]]] = []

    def begin_pass(self, number: int, *, timed: bool) -> None:
        self._spans.append([])

    def wait(self, launch: Launch, event: int) -> None:
        self._ready_ns = max(self._ready_ns, event)

    def launch(self, launch: Launch) -> None:
        start_ns = max(self._free_ns[launch.stream], self._ready_ns)
        self._ready_ns = 0
        if launch.op.waits or (launch.op.waits_previous and len(self._spans) > 1):
            start_ns += self._wait_ns
        end_ns = start_ns + self._duration_ns(launch.op)
        self._free_ns[launch.stream] = end_ns
        self._spans[-1].append((start_ns, end_ns))

    def record(self, launch: Launch) -> int:
        return self._free_ns[launch.stream]

    def synchronize(self) -> None:
        return

    def finish(self) -> list[MeasuredPass]:
        last = self._program.last_compute()
        return [MeasuredPass(spans[last][1], spans_of(spans)) for spans in self._spans]

    def abort(self) -> None:
        return


def spans_of(spans: list[tuple[int, int]]) -> PassSpans:
    """The (start, end) of every op of a pass, in ns."""
    return PassSpans(start_ns=tuple(s for s, _ in spans), end_ns=tuple(e for _, e in spans))
