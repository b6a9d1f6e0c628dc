"""A GPU of the tests: its streams run in any order that they allow, as late as they can.

It keeps to CUDA's rules that matter for the backend: a wait takes the record of the moment it is
enqueued, or of the moment its graph is launched; an event never recorded is no wait, and captured
so, is none for good; what is captured does not run.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from twinstream.executor.memory.arenas import ArenaMemory, Arenas
from twinstream.executor.program.compiled import Program, Work
from twinstream.schedule.tensors import DEVICE, HOST


class Refused(RuntimeError):
    """What the driver says of a capture."""


class HostWriteError(AssertionError):
    """What runs on a stream of the device has the host write, which CUDA does not defer."""


class _InTurn(TorchDispatchMode):
    """While open, only copies from the device write to the host's arena.

    Whatever else does would, on CUDA, when it is enqueued: before what the stream has yet to do.
    """

    def __init__(self, arenas: Arenas) -> None:
        super().__init__()
        tiers = (tier for tier in (HOST, DEVICE) if tier in arenas.memory)
        self._of = {_storage(arenas.memory[tier]): tier for tier in tiers}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            used = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            tiers = [self._of.get(x.untyped_storage().data_ptr()) for x in used]
            if HOST in tiers and DEVICE not in tiers:
                raise HostWriteError(f"{func} writes to the host's arena out of its turn")
        return func(*args, **kwargs)


def _storage(memory: ArenaMemory) -> int:
    return memory[0:0].untyped_storage().data_ptr()


@dataclass(eq=False)
class Moment:
    """One record of an event."""

    time_ns: int | None = None


@dataclass(eq=False)
class FakeStream:
    items: deque[Callable[[], bool]] = field(default_factory=deque)
    captured: list[tuple[str, Any]] | None = None


class FakeEvent:
    def __init__(self, gpu: "FakeGpu", *, timing: bool, blocking: bool) -> None:
        self._gpu, self.timing, self.blocking = gpu, timing, blocking
        self.latest: Moment | None = None

    def record(self, stream: FakeStream) -> None:
        with self._gpu.lock:
            if stream.captured is not None:
                stream.captured.append(("record", self))
            else:
                self.latest = self._gpu.put_record(stream)

    def wait(self, stream: FakeStream) -> None:
        with self._gpu.lock:
            if stream.captured is not None:
                if self.latest is not None:
                    stream.captured.append(("wait", self))
            elif self.latest is not None:
                self._gpu.put_wait(stream, self.latest)

    def synchronize(self) -> None:
        with self._gpu.lock:
            moment = self.latest
            assert self.blocking, "the host would spin"
            while moment is not None and moment.time_ns is None:
                self._gpu.step()

    def query(self) -> bool:
        return self.latest is None or self.latest.time_ns is not None

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        assert self.timing
        assert end_event.timing
        assert self.latest is not None
        assert end_event.latest is not None
        start_ns, end_ns = self.latest.time_ns, end_event.latest.time_ns
        assert start_ns is not None, "the event has not happened"
        assert end_ns is not None, "the event has not happened"
        assert end_ns >= start_ns, "times are measured from an earlier event"
        return (end_ns - start_ns) / 1e6


class FakeGraph:
    def __init__(self, gpu: "FakeGpu", stream: FakeStream, nodes: list[tuple[str, Any]]) -> None:
        self._gpu, self._stream, self._nodes = gpu, stream, nodes
        self.num_launches = 0
        self.alive = True

    def replay(self) -> None:
        assert self.alive
        assert self._gpu.current is self._stream, "it could overlap itself"
        with self._gpu.lock:
            self.num_launches += 1
            waits = iter([event.latest for kind, event in self._nodes if kind == "wait"])
            for kind, what in self._nodes:
                if kind == "work":
                    self._gpu.put_work(self._stream, what)
                elif kind == "record":
                    what.latest = self._gpu.put_record(self._stream)
                else:
                    self._gpu.put_wait(self._stream, next(waits))

    def reset(self) -> None:
        self.alive = False


class FakeGpu:
    """`eager`: how likely the device does something whenever the host enqueues."""

    def __init__(self, seed: int = 0, eager: float = 0.3, refused: frozenset[str] = frozenset()):
        self.lock = threading.RLock()
        self.current: FakeStream | None = None
        self.streams: list[FakeStream] = []
        self._by_name: dict[str, FakeStream] = {}
        self.events: list[FakeEvent] = []
        self.graphs: list[FakeGraph] = []
        self.now_ns = 0
        self.threads: set[int] = set()
        self.num_captured_waits = 0
        self.num_releases = 0
        self.allocated = 0
        self.named: list[str] = []
        self.refused = refused
        self._rng = Random(seed)
        self._eager = eager

    # --- what the backend calls

    def stream(self, name: str) -> FakeStream:
        if name not in self._by_name:
            self._by_name[name] = FakeStream()
            self.streams.append(self._by_name[name])
        return self._by_name[name]

    def new_event(self, *, timing: bool = False, blocking: bool = False) -> FakeEvent:
        self.events.append(FakeEvent(self, timing=timing, blocking=blocking))
        return self.events[-1]

    def enter_thread(self) -> None:
        self.threads.add(threading.get_ident())

    def use(self, stream: FakeStream) -> None:
        self.current = stream

    def capture(self, stream: FakeStream, body: Callable[[], None]) -> FakeGraph:
        stream.captured = []
        self.current = stream
        try:
            body()
            self.graphs.append(FakeGraph(self, stream, stream.captured))
            self.num_captured_waits += sum(kind == "wait" for kind, _ in stream.captured)
        finally:
            stream.captured = None
        return self.graphs[-1]

    def synchronize(self) -> None:
        with self.lock:
            while any(stream.items for stream in self.streams):
                self.step()

    @contextmanager
    def libraries_pool(self) -> Iterator[None]:
        yield

    @contextmanager
    def named_range(self, name: str) -> Iterator[None]:
        self.named.append(name)
        yield

    def begin_allocation_count(self) -> None:
        self.allocated = 0

    def allocated_bytes(self) -> int:
        return self.allocated

    def release_unused(self) -> None:
        self.num_releases += 1

    # --- what runs on it

    def works(
        self, program: Program, works: list[Work], arenas: Arenas | None = None
    ) -> list[Work]:
        """The works of a program; those of the device run when their turn on it comes.

        Raises:
            HostWriteError: then, one of them writes to the host's arena by itself.
        """
        in_turn = nullcontext() if arenas is None else _InTurn(arenas)

        def on_device(name: str, enqueued: Work) -> Work:
            def work(pass_index: int) -> None:
                with in_turn:
                    enqueued(pass_index)

            def enqueue(pass_index: int) -> None:
                stream = self.current
                assert stream is not None
                if stream.captured is None:
                    with self.lock:
                        self.put_work(stream, lambda: work(pass_index))
                    return
                if name in self.refused:
                    raise Refused(f"operation not permitted when stream is capturing: {name}")
                stream.captured.append(("work", lambda: work(pass_index)))

            return enqueue

        return [
            work if launch.on_host else on_device(getattr(launch.op, "call", launch.op.op_id), work)
            for launch, work in zip(program.launches, works, strict=True)
        ]

    def put_work(self, stream: FakeStream, work: Callable[[], None]) -> None:
        def run() -> bool:
            self.now_ns += self._rng.choice([1, 1000, 50_000])
            with torch.no_grad():
                work()
            return True

        self.put(stream, run)

    def put_record(self, stream: FakeStream) -> Moment:
        moment = Moment()

        def run() -> bool:
            moment.time_ns = self.now_ns
            return True

        self.put(stream, run)
        return moment

    def put_wait(self, stream: FakeStream, moment: Moment | None) -> None:
        self.put(stream, lambda: moment is None or moment.time_ns is not None)

    def step(self) -> None:
        """Run the next item of some stream that can go on."""
        order = [stream for stream in self.streams if stream.items]
        self._rng.shuffle(order)
        for stream in order:
            if stream.items[0]():
                stream.items.popleft()
                return
        raise AssertionError("the device is stuck")

    def put(self, stream: FakeStream, item: Callable[[], bool]) -> None:
        """The item is tried until it is through."""
        stream.items.append(item)
        while self._rng.random() < self._eager and any(s.items for s in self.streams):
            self.step()
