"""The few calls on a GPU that the CUDA backend makes, and torch's implementation of them.

The backend's logic is tested on a GPU of the tests that runs its streams in any order they allow.
"""

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal


class GpuEvent(Protocol):
    """The part of `torch.cuda.Event` that is used; a stream is whatever `Gpu.stream` gave."""

    def record(self, stream: Any) -> None:
        """The event happens when what is on the stream so far has completed."""

    def wait(self, stream: Any) -> None:
        """Let what is enqueued next on the stream wait for the latest record of the event."""

    def synchronize(self) -> None:
        """Block the calling thread until the latest record has happened."""

    def query(self) -> bool:
        """Whether the latest record has happened."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to a later one; both must have happened."""


class GpuGraph(Protocol):
    """A captured and instantiated graph."""

    def replay(self) -> None:
        """Launch it on the current stream."""

    def reset(self) -> None:
        """Give its memory back."""


class Gpu(Protocol):
    """A device that runs streams."""

    def stream(self, name: str) -> Any:
        """The stream of this name; beside all others."""

    def new_event(self, *, timing: bool = False, blocking: bool = False) -> GpuEvent:
        """An event.

        Captured in a graph it makes a record or a wait node, never an edge within the graph.
        With `blocking`, a thread that waits for it sleeps.
        """

    def enter_thread(self) -> None:
        """Make it the device of this thread; a new one has the first of the machine."""

    def use(self, stream: Any) -> None:
        """Make a stream the current one of this thread."""

    def capture(self, stream: Any, body: Callable[[], None]) -> GpuGraph:
        """Capture what `body` enqueues on the stream as a graph; nothing of it runs.

        Raises:
            RuntimeError: something in it cannot be captured.
        """

    def named_range(self, name: str) -> AbstractContextManager[None]:
        """While open, what this thread does has a name in NVIDIA's profilers (NVTX)."""

    def synchronize(self) -> None:
        """Block until the whole device is idle."""

    def libraries_pool(self) -> AbstractContextManager[None]:
        """While open, what kernels of this thread allocate comes from a pool of their own."""

    def begin_allocation_count(self) -> None:
        """Begin to note the most that is allocated at a time."""

    def allocated_bytes(self) -> int:
        """Return how much more was allocated at a time, since the count began, than is now."""

    def release_unused(self) -> None:
        """Give memory that is cached and not in use back to the driver."""


class TorchGpu:
    """The CUDA device of this process, through torch; by default the current one.

    Runs that follow or interrupt one another share it: torch keeps a workspace of cuBLAS for every
    stream that has multiplied, for good, and a pool of its own for each would keep more.
    """

    def __init__(self, index: int | None = None) -> None:
        self._index = torch.cuda.current_device() if index is None else index
        self._device = torch.device("cuda", self._index)
        self._pool = torch.cuda.MemPool()
        self._pool_is_open = False
        self._streams: dict[str, Any] = {}

    def stream(self, name: str) -> Any:
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._streams[name]

    def new_event(self, *, timing: bool = False, blocking: bool = False) -> GpuEvent:
        event: GpuEvent = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=timing, blocking=blocking, external=True
        )
        return event

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def use(self, stream: Any) -> None:
        torch.cuda.set_stream(stream)

    def capture(self, stream: Any, body: Callable[[], None]) -> GpuGraph:
        """All graphs share the pool: blocks in it belong to streams, and those run in order."""
        graph = torch.cuda.CUDAGraph()
        # Only this thread must keep to what may be captured: others may be at work meanwhile.
        mode = "thread_local"
        pool: Any = self._pool.id
        users = self._pool.use_count()
        try:
            with (
                _no_collection(),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode),
            ):
                body()
        except RuntimeError:
            self._take_pool_back(graph, stream, users)
            raise
        return graph

    def abandon(self) -> None:
        """Never free the pool: torch would end the process, since the device has failed."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))

    def _take_pool_back(self, graph: Any, stream: Any, users: int) -> None:
        """End a refused capture's hold on the pool, which had so many users before it.

        torch (2.11) leaves the pool recording, in its allocator of pinned memory too, and counts
        the graph among its users for good: the pool could not be captured into again, and its
        memory never be given back. Only an end of the capture that succeeds ends all of that, so
        it is ended once more within another, of which torch does not know.
        """
        with contextlib.suppress(RuntimeError, OSError):
            self._end_again(graph, stream)
        graph.reset()
        with contextlib.suppress(RuntimeError):  # it was not recording; no call tells
            torch._C._cuda_endAllocateToPool(self._index, self._pool.id)
        for _ in range(self._pool.use_count() - users):
            torch._C._cuda_releasePool(self._index, self._pool.id)

    def _end_again(self, graph: Any, stream: Any) -> None:
        """End a capture that was refused within another one."""
        number = torch.zeros(1, device=self._device)
        torch.cuda.synchronize(self._device)
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
        where = ctypes.c_void_p(stream.cuda_stream)
        with torch.cuda.stream(stream):
            if runtime.cudaStreamBeginCapture(where, _THREAD_LOCAL) == 0:
                number.add_(1)  # torch warns of a capture of nothing
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
            if torch.cuda.is_current_stream_capturing():
                runtime.cudaStreamEndCapture(where, ctypes.byref(ctypes.c_void_p()))

    @contextlib.contextmanager
    def named_range(self, name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    @contextlib.contextmanager
    def libraries_pool(self) -> Iterator[None]:
        if self._pool_is_open:  # by the run that this one interrupts; torch would refuse it
            yield
            return
        self._pool_is_open = True
        try:
            with torch.cuda.use_mem_pool(self._pool, self._device):
                yield
        finally:
            self._pool_is_open = False

    def begin_allocation_count(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated_bytes(self) -> int:
        now = torch.cuda.memory_allocated(self._device)
        return torch.cuda.max_memory_allocated(self._device) - now

    def release_unused(self) -> None:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A pool among the garbage would be freed during the capture, at which torch aborts."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
