"""A run on a GPU: warm up, check the memory, put the state in place, then the passes."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from twinstream.executor.backends.cuda import CudaBackend
from twinstream.executor.backends.gpu import Gpu, TorchGpu
from twinstream.executor.memory.arenas import Arenas, DeviceArena
from twinstream.executor.memory.device_memory import (
    DeviceMemoryError,
    DeviceMeter,
    fix_library_workspaces,
    read_device_memory,
)
from twinstream.executor.program.compiled import Program, Work
from twinstream.executor.program.options import RunOptions
from twinstream.executor.replay.dispatch import Passes, PassOptions, run_passes
from twinstream.executor.replay.graph_classes import contents
from twinstream.executor.replay.graph_replay import GraphReplay, graphs_pay
from twinstream.executor.replay.warm_up import KernelTime, kernels_compiled, warm_up
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.sizes import gib
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.timeline import DeviceMemory, Provenance

DEFAULT_TIMED_PASSES = 1
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


@dataclass(frozen=True)
class CudaJob:
    """A schedule to be run on a GPU, compiled and bound to memory.

    `fill` puts the state in place once all is warm.
    """

    schedule: RankSchedule
    program: Program
    arenas: Arenas
    works: Sequence[Work]
    fill: Callable[[], None]


def run_on_cuda(job: CudaJob, options: RunOptions) -> tuple[Passes, Provenance]:
    """The passes on this process's GPU, and where and with what they were measured.

    Raises:
        DeviceMemoryError: context and libraries take more than the caps leave; nothing was filled.
    """
    fix_library_workspaces()
    meter = DeviceMeter(
        job.schedule.caps,
        arena_bytes(job.schedule, DEVICE),
        read_device_memory,
        refuses_excess=options.refuses_excess,
    )
    gpu = _gpu_of(job.arenas)
    with torch.cuda.stream(torch.cuda.current_stream()):  # which is current again afterwards
        try:
            passes, graphs = run_on_gpu(gpu, job, options, meter)
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            if getattr(error, "error_code", _OUT_OF_MEMORY) != _OUT_OF_MEMORY:
                raise
            raise DeviceMemoryError(_no_room(error, meter.report())) from error
    return passes, Provenance(
        kind="measured",
        where=torch.cuda.get_device_name(),
        detail=f"torch {torch.__version__}, {graphs}",
        device_memory=meter.report(),
    )


def _gpu_of(arenas: Arenas) -> Gpu:
    """Of all runs in the same device arena."""
    arena = arenas.memory[DEVICE]
    if not isinstance(arena, DeviceArena):
        return TorchGpu()
    if arena.gpu is None:
        arena.gpu = TorchGpu()
    return arena.gpu


def _no_room(error: Exception, memory: DeviceMemory) -> str:
    return (
        f"beside the arena of {gib(memory.arena_bytes)} the device has no room for what kernels' "
        f"libraries allocate (the driver counts {gib(memory.peak_bytes)} in use): "
        f"{str(error).splitlines()[0]} Plan with a smaller --device-mem."
    )


def run_on_gpu(
    gpu: Gpu, job: CudaJob, options: RunOptions, meter: DeviceMeter
) -> tuple[Passes, str]:
    """The passes, and in a phrase whether they ran as graphs and why."""
    timed_passes = options.timed_passes
    pass_options = PassOptions(
        options.num_passes,
        DEFAULT_TIMED_PASSES if timed_passes is None else timed_passes,
        options.between,
    )
    if options.nvtx:
        named = zip(job.program.launches, job.works, strict=True)
        works = [partial(_in_range, gpu, launch.op.op_id, work) for launch, work in named]
        job = replace(job, works=works)
    backend = CudaBackend(job.program, job.works, gpu, options.zero_ns)
    replay = None
    try:
        if options.in_place:
            why = "no graphs (the state is in place: nothing is warmed up)"
        else:
            replay, why = _warm(job, options, backend, meter, all_timed=pass_options.times_all())
            job.arenas.follows_packs = replay is None  # no note follows what a graph copies
        job.fill()
        gpu.synchronize()
        with gpu.libraries_pool(), kernels_compiled() as late:
            passes = run_passes(
                job.program, backend, pass_options, replay.replay if replay else None
            )
        if late:
            options.tell(
                f"{len(late)} Triton kernels were compiled during the passes, which stood "
                f"still meanwhile: {', '.join(late)}"
            )
        return replace(passes, clock_error_ns=backend.clock_error_ns), why
    finally:
        backend.abort()
        if replay is not None:
            replay.close()


def _warm(
    job: CudaJob, options: RunOptions, backend: CudaBackend, meter: DeviceMeter, *, all_timed: bool
) -> tuple[GraphReplay | None, str]:
    """Every kernel has run, and graphs are there or not; the arenas hold garbage."""
    gpu = backend.gpu
    with torch.no_grad(), gpu.libraries_pool():
        timed = options.graphs == "auto" and not all_timed  # what decides
        times = warm_up(job.program, job.arenas, job.works, backend, timed=timed)
    is_over = meter.warm({call: found.allocated_bytes for call, found in times.items()})
    if all_timed:
        return None, "no graphs (every step is timed op by op)"
    with torch.no_grad():
        replay, why = _graphs(job, options, backend, times)
    if replay is not None and not is_over and meter.is_over():
        replay.close()
        gpu.release_unused()
        return None, "no graphs (their memory would exceed the cap)"
    return replay, why


def _graphs(
    job: CudaJob, options: RunOptions, backend: CudaBackend, times: Mapping[str, KernelTime]
) -> tuple[GraphReplay | None, str]:
    if options.graphs == "off":
        return None, "no graphs (not asked for)"
    if options.graphs == "auto" and not graphs_pay(job.program, times):
        return None, "no graphs (ops are long enough without)"
    content: list[Hashable] = contents(job.schedule)
    if options.poison:  # what is filled differs from op to op
        content = [op.op_id for op in job.schedule.ops]
    replay = GraphReplay(job.program, job.works, content, backend, named=options.nvtx)
    refused = ""
    if replay.refused:
        refused = f", {len(replay.refused)} refused"
        where, why = next(iter(replay.refused.items()))
        options.tell(
            f"{len(replay.refused)} CUDA graphs were refused, and their ops are launched one by "
            f"one: {where}: {why}"
        )
    return replay, (
        f"{replay.num_graphs} graphs for {replay.num_captured_ops} of "
        f"{len(job.program.launches)} ops{refused}"
    )


def _in_range(gpu: Gpu, name: str, work: Work, pass_index: int) -> None:
    with gpu.named_range(name):
        work(pass_index)
