"""The options of a run: where and how a schedule is executed."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast, get_args

from twinstream.executor.program.module_programs import ModulePrograms
from twinstream.schedule.errors import TwinstreamError

if TYPE_CHECKING:
    from twinstream.executor.weights.disk_reader import DiskFiles

BackendName = Literal["cpu", "cuda"]
Graphs = Literal["auto", "on", "off"]
Progress = Callable[[int, int], None]
"""Called with how many bytes are done, of how many."""
Between = Callable[[int, Callable[[], None]], bool]
"""Called between passes with how many have begun, and with a function that returns when all of them
have completed; only after that the state may be read or written. It returns whether to go on."""


def _say_nothing(line: str) -> None:
    """A default that can be sent to another process."""


@dataclass(frozen=True)
class DevicePool:
    """Where the device arena is allocated: torch's own pool."""

    def allocating(self) -> AbstractContextManager[None]:
        """What is allocated meanwhile lies in the pool."""
        return nullcontext()

    def release(self) -> None:
        """Nothing is left in it."""


@dataclass(frozen=True)
class RunOptions:
    """Where and how to run: `num_passes` training steps, the first of them cold.

    `timed_passes`: of how many of the last passes, beside the first, every op is timed; by
    default all on the CPU, where it costs nothing, and one on CUDA. `graphs`: whether passes that
    are not timed run as CUDA graphs; `auto` does so where that pays. `on_pinned` is told how much
    of the host arena is populated and pinned. `nvtx` names what every op and graph enqueues, for
    NVIDIA's profilers (CUDA). Without `refuses_excess` a run whose context and libraries take more
    of the device than the cap leaves goes on, and reports by how much. `between` is asked before
    every pass but the first.

    `in_place`: the state lies in the arenas already, as `between` passes of another schedule of
    the same slots. So nothing is filled, and nothing done before the first pass that would write to
    them: no warm-up, no graphs, no poison but what `poison` does during the passes.

    `on_filled` is called when the state is in place, before the first pass. `tell` takes a line
    about what slows the run down: graphs that were refused, kernels that were not warm.

    `check` is called before every op, in the thread that calls it; what it raises ends the run.

    `on_error` is called with what an op raises, at once: the run itself ends when its streams have,
    which may wait for ranks that wait for this one.

    `modules`: what a traced model's parts run by, made once for all that happens in the run.

    `disk`: the files of what is at home on a disk.

    `pool`: where the device arena is allocated (CUDA).

    `zero_ns`: the reading of `perf_counter_ns` that the timeline counts from, by default when the
    backend is made.
    """

    backend: BackendName = "cpu"
    num_passes: int = 3
    poison: bool = False
    timed_passes: int | None = None
    graphs: Graphs = "auto"
    on_pinned: Progress | None = None
    nvtx: bool = False
    refuses_excess: bool = True
    between: Between | None = None
    in_place: bool = False
    on_filled: Callable[[], None] | None = None
    tell: Callable[[str], None] = _say_nothing
    check: Callable[[], None] | None = None
    on_error: Callable[[Exception], None] | None = None
    zero_ns: int | None = None
    disk: "DiskFiles | None" = None
    modules: ModulePrograms = field(default_factory=ModulePrograms)
    pool: DevicePool = field(default_factory=DevicePool)


def choose_graphs(name: str, backend: BackendName) -> Graphs:
    """Whether to use CUDA graphs, as asked for.

    Raises:
        TwinstreamError: it is none of auto, on and off, or `on` without CUDA.
    """
    if name not in get_args(Graphs):
        raise TwinstreamError(f"unknown choice of graphs '{name}'; known: auto, on, off")
    if name == "on":
        _require_cuda("CUDA graphs", "--graphs", backend)
    return cast(Graphs, name)


def choose_nvtx(backend: BackendName, *, requested: bool) -> bool:
    """Whether to name ranges for NVIDIA's profilers, as asked for.

    Raises:
        TwinstreamError: it is asked for without CUDA.
    """
    if requested:
        _require_cuda("NVTX ranges", "--nvtx", backend)
    return requested


def _require_cuda(what: str, option: str, backend: BackendName) -> None:
    if backend != "cuda":
        raise TwinstreamError(
            f"{what} need CUDA, and this runs on the backend '{backend}': leave {option} away"
        )
