"""Run every kernel of a program once before the first pass, on zeros.

What is done only once (modules loaded, kernels compiled, workspaces of libraries allocated) is
then neither in the first pass nor in a graph that is being captured, and the memory it takes is
known before the training begins.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any

from twinstream.executor.backends.cuda import CudaBackend
from twinstream.executor.kernels.operand import KernelOperand
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.program.compiled import Launch, Program, Work
from twinstream.schedule.ops import Compute


@dataclass(frozen=True)
class KernelTime:
    """A kernel call alone on the device: time on the device, and to enqueue it.

    `allocated_bytes` is the most that was allocated at a time during it and is free after it:
    temporaries, and not workspaces, which stay.
    """

    device_ns: int
    enqueue_ns: int
    allocated_bytes: int = 0


def warm_up(
    program: Program, arenas: Arenas, works: Sequence[Work], backend: CudaBackend, *, timed: bool
) -> dict[str, KernelTime]:
    """Every call of the schedule once, and if `timed` once more with a clock; by call.

    A call with operands of several sizes, modes or alignments is run with each: Triton compiles a
    kernel for every such variant. The arenas hold garbage afterwards.
    Zeros are a valid input of every kernel: token 0, label 0. Times on zeros are short of those
    on data, since they draw less power; those of a first run hold what is done only once.
    """
    found: dict[str, KernelTime] = {}
    seen: set[tuple[object, ...]] = set()
    for launch in program.launches:
        if launch.kernel_call is None:
            continue
        assert isinstance(launch.op, Compute)
        operands = arenas.operands(launch.op).values()
        variant = (launch.op.call, *((o.mode, o.bytes.numel(), _is_aligned(o)) for o in operands))
        if variant in seen:
            continue
        seen.add(variant)
        backend.gpu.begin_allocation_count()
        time = _run_on_zeros(launch, arenas, works, backend)
        allocated_bytes = backend.gpu.allocated_bytes()
        if timed:
            time = _run_on_zeros(launch, arenas, works, backend)
        if launch.op.call in found:
            allocated_bytes = max(allocated_bytes, found[launch.op.call].allocated_bytes)
        found[launch.op.call] = replace(time, allocated_bytes=allocated_bytes)
    return found


@contextlib.contextmanager
def kernels_compiled() -> Iterator[list[str]]:
    """Names of the Triton kernels that are compiled while open; none where there is no Triton."""
    names: list[str] = []
    if "triton" not in sys.modules:
        yield names
        return
    import triton

    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook

    def compiled(**compilation: Any) -> Any:
        names.append(compilation["fn"].name.rpartition(".")[2])
        return None if before is None else before(**compilation)

    runtime.jit_post_compile_hook = compiled
    try:
        yield names
    finally:
        runtime.jit_post_compile_hook = before


def _is_aligned(operand: KernelOperand) -> bool:
    """As Triton tells pointers apart."""
    return operand.bytes.data_ptr() % 16 == 0


def _run_on_zeros(
    launch: Launch, arenas: Arenas, works: Sequence[Work], backend: CudaBackend
) -> KernelTime:
    assert isinstance(launch.op, Compute)
    stream = backend.use(launch.stream)
    for operand in arenas.operands(launch.op).values():
        if operand.mode in ("read", "update"):
            operand.bytes.zero_()
    start, end = (backend.gpu.new_event(timing=True) for _ in range(2))
    start.record(stream)
    before_ns = perf_counter_ns()
    works[launch.position](0)
    enqueue_ns = perf_counter_ns() - before_ns
    end.record(stream)
    backend.gpu.synchronize()
    return KernelTime(round(start.elapsed_time(end) * 1e6), enqueue_ns)
