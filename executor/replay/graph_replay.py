"""Passes as CUDA graphs: segments captured once, then launched pass after pass."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter_ns

from twinstream.executor.backends.cuda import CudaBackend, CudaEvent, HostEvent
from twinstream.executor.backends.gpu import GpuEvent, GpuGraph
from twinstream.executor.backends.protocol import PASSES_AHEAD
from twinstream.executor.program.compiled import Launch, Program, Work
from twinstream.executor.replay.dispatch import Events, enqueue
from twinstream.executor.replay.graph_classes import NUM_PARITIES, GraphClasses, classify
from twinstream.executor.replay.graph_segments import Segment, cut_segments
from twinstream.executor.replay.host_cost import CostMeter
from twinstream.executor.replay.warm_up import KernelTime
from twinstream.schedule.ops import Copy

SAFETY_FACTOR = 3.0
"""Graphs pay where the median op is shorter than so many times what enqueueing one takes."""


def graphs_pay(program: Program, times: Mapping[str, KernelTime]) -> bool:
    """Whether the host might not keep ahead of the device op by op.

    Compares, over the compute ops of a pass, the median time on the device with the median time
    to enqueue, which also has to do for the copies and events between them.
    """
    calls = [times[x.kernel_call] for x in program.launches if x.kernel_call is not None]
    if not calls:
        return False
    enqueue_ns = median(found.enqueue_ns for found in calls)
    return median(found.device_ns for found in calls) < SAFETY_FACTOR * enqueue_ns


@dataclass(frozen=True)
class _Step:
    """A segment as a pass launches it: its graph, or None to go op by op."""

    segment: Segment
    launches: tuple[Launch, ...]
    graph: GpuGraph | None
    host_waits: tuple[tuple[int, int], ...]
    """(position of a host op waited for, passes ago)"""


class GraphReplay:
    """The segments of a pass, each with its executable for either parity."""

    def __init__(
        self,
        program: Program,
        works: Sequence[Work],
        content: Sequence[Hashable],
        backend: CudaBackend,
        *,
        named: bool = False,
    ) -> None:
        """Capture what can be. The kernels must be warm; nothing runs, nothing is changed.

        `content` says of every op what it does and on which bytes: equal content, equal graph.
        With `named`, every launch of a graph has a range for profilers.
        """
        self._program = program
        self._works = works
        self._backend = backend
        self._named = named
        self.refused: dict[str, str] = {}
        self._graphs: dict[int, GpuGraph | None] = {}
        self._steps: list[list[_Step]] = []
        try:
            self._capture_all(content)
        except BaseException:  # also Ctrl-C
            self.close()
            raise

    @property
    def num_graphs(self) -> int:
        """Executables that were captured."""
        return sum(graph is not None for graph in self._graphs.values())

    @property
    def num_captured_ops(self) -> int:
        """Ops of a pass that are part of graphs."""
        return sum(len(step.launches) for step in self._steps[0] if step.graph is not None)

    def close(self) -> None:
        """Give the graphs' memory back; nothing must be running."""
        for graph in self._graphs.values():
            if graph is not None:
                graph.reset()
        self._graphs.clear()
        self._steps = []

    def replay(
        self, number: int, previous: Events[CudaEvent], meter: CostMeter
    ) -> Events[CudaEvent]:
        """Enqueue pass `number`."""
        parity = number % PASSES_AHEAD
        done: Events[CudaEvent] = list(self._backend.events[parity])
        events = (done, previous)
        for step in self._steps[parity]:
            waited_ns, before_ns = self._backend.waited_ns, perf_counter_ns()
            for wait, ago in step.host_waits:
                if ago == 0 or previous:
                    happened = events[ago][wait]
                    assert isinstance(happened, HostEvent)
                    self._backend.await_host(happened)
            if step.graph is not None:
                self._backend.use(step.segment.stream)
                name = f"graph {_name(step.launches)}"
                with self._backend.gpu.named_range(name) if self._named else nullcontext():
                    step.graph.replay()
            else:
                for launch in step.launches:
                    enqueue(self._backend, launch, done, previous)
            kind = step.launches[0].op.kind if step.graph is None else "graph"
            waited_ns = self._backend.waited_ns - waited_ns
            meter.add(kind, perf_counter_ns() - before_ns - waited_ns)
        return done

    def _capture_all(self, content: Sequence[Hashable]) -> None:
        segments = cut_segments(self._program, self._capturable())
        classes = classify(self._program, segments, content)
        self._share_events(classes)
        self._steps = [
            [self._step(segment, (q, s), classes) for s, segment in enumerate(segments)]
            for q in range(NUM_PARITIES)
        ]

    def _capturable(self) -> list[bool]:
        """By op; every kernel call is tried once, alone."""
        tried: dict[str, bool] = {}
        found = []
        for launch in self._program.launches:
            call = launch.kernel_call
            if call is None:
                found.append(isinstance(launch.op, Copy) and not launch.on_host)
                continue
            if call not in tried:
                work = self._works[launch.position]
                graph = self._captured(launch.stream, partial(work, 0), call)
                tried[call] = graph is not None
                if graph is not None:
                    graph.reset()
            found.append(tried[call])
        return found

    def _share_events(self, classes: GraphClasses) -> None:
        """Have ops record their shared events in every pass, however it is enqueued."""
        made: dict[int, GpuEvent] = {}
        for row, numbers in zip(self._backend.events, classes.events, strict=True):
            for position, number in enumerate(numbers):
                event = row[position]
                if number is not None and event is not None:
                    row[position] = made.setdefault(number, event)
        for row in self._backend.events:
            for launch, event in zip(self._program.launches, row, strict=True):
                if event is not None:
                    # torch makes an event when it is first recorded, and until then waits for
                    # it are nothing, in a graph for good.
                    event.record(self._backend.streams[launch.stream])
        self._backend.gpu.synchronize()

    def _step(self, segment: Segment, instance: tuple[int, int], classes: GraphClasses) -> _Step:
        launches = tuple(self._program.launches[position] for position in segment.positions)
        graph = None
        if segment.captured:
            parity, number = instance
            key = classes.executables[parity][number]
            if key not in self._graphs:
                self._graphs[key] = self._capture(segment, launches, parity)
            graph = self._graphs[key]
        host_waits = [
            (wait, ago)
            for launch in launches
            for ago, waits in enumerate((launch.waits, launch.waits_previous))
            for wait in waits
            if self._program.launches[wait].on_host
        ]
        return _Step(segment, launches, graph, tuple(host_waits) if graph is not None else ())

    def _capture(
        self, segment: Segment, launches: Sequence[Launch], parity: int
    ) -> GpuGraph | None:
        """The segment with its wait and record nodes, for passes of this parity."""
        rows = self._backend.events
        own, before = rows[parity], rows[(parity + 1) % NUM_PARITIES]
        stream = self._backend.streams[segment.stream]

        def body() -> None:
            for launch in launches:
                events = [own[p] for p in launch.waits] + [before[p] for p in launch.waits_previous]
                for event in events:
                    if event is not None:  # host ops have none: the dispatching thread waits
                        event.wait(stream)
                self._works[launch.position](0)
                if (record := own[launch.position]) is not None:
                    record.record(stream)

        return self._captured(segment.stream, body, _name(launches))

    def _captured(self, stream: int, body: Callable[[], None], name: str) -> GpuGraph | None:
        """What `body` enqueues; None, and why, where the driver or a library refuses."""
        try:
            return self._backend.gpu.capture(self._backend.use(stream), body)
        except RuntimeError as error:
            self.refused[name] = str(error).splitlines()[0]
            return None
        finally:
            self._backend.forget_current()


def _name(launches: Sequence[Launch]) -> str:
    return f"{launches[0].op.op_id} to {launches[-1].op.op_id}"
