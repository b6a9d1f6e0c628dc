"""Run a schedule, verbatim, and say when every op ran."""

import contextlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from twinstream.executor.arenas import Arenas
from twinstream.executor.backends.cpu import CpuBackend
from twinstream.executor.backends.cuda import CudaBackend
from twinstream.executor.dispatch import run_passes
from twinstream.executor.host_work import HostWork
from twinstream.executor.kernels.attention.canary import check_attention
from twinstream.executor.kernels.availability import require_kernels
from twinstream.executor.pinned import PinnedArena, check_host_memory, host_limits
from twinstream.executor.state import State, fill_carried, read_carried
from twinstream.executor.work import OpRunner
from twinstream.models.lowering import lower_again
from twinstream.schedule.conforms import require_conforming
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Compute
from twinstream.schedule.periodic import PassBoundaries
from twinstream.schedule.tensors import DEVICE, HOST, Tier
from twinstream.schedule.timeline import PassSpans, Provenance, Timeline
from twinstream.schedule.verify import require_safe

BackendName = Literal["cpu", "cuda"]


class HostKernelError(TwinstreamError):
    """A schedule has the host CPU compute, which only the simulator does so far."""


class NoCudaError(TwinstreamError):
    """CUDA was asked for and there is none."""


@dataclass(frozen=True)
class Execution:
    """The measured timeline and the state after the last pass."""

    timeline: Timeline
    state: State


@dataclass(frozen=True)
class RunOptions:
    """Where and how to run: `num_passes` training steps, the first of them cold."""

    backend: BackendName = "cpu"
    num_passes: int = 3
    compute_threads: int = 1
    poison: bool = False


def choose_backend(name: str) -> BackendName:
    """`cpu` or `cuda` as asked for; `auto` is CUDA where there is one.

    Raises:
        NoCudaError: CUDA was asked for and there is none.
        TwinstreamError: there is no backend of that name.
    """
    if name == "cpu":
        return "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise NoCudaError(
                "there is no CUDA device here; run on the CPU with --backend cpu "
                "(small models), or plan and simulate without one"
            )
        return "cuda"
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    raise TwinstreamError(f"unknown backend '{name}'; known: auto, cpu, cuda")


def execute(
    schedule: Schedule, state: Mapping[str, torch.Tensor], host_work: HostWork, options: RunOptions
) -> Execution:
    """Prove the schedule safe and conforming, then run it.

    Raises:
        HostKernelError: the schedule has kernels of the host CPU, which cannot be run yet.
        KernelsUnavailableError: it names kernels that cannot run on this backend.
        UnsafeSchedule: the proof fails; nothing has run.
        AttentionCanaryError: its attention gives NaN on a shape of the schedule.
        NoCudaError: CUDA was asked for and there is none.
        HostMemoryError: the arenas do not fit this machine's memory.
    """
    _require_device_kernels(schedule)
    require_kernels(schedule, options.backend)
    require_safe(schedule)
    require_conforming(schedule, lower_again(schedule))
    check_attention(schedule, options.backend)
    with _memory(schedule, options.backend) as memory:
        arenas = Arenas(schedule, memory)
        if options.poison:
            arenas.poison()
        fill_carried(schedule, arenas, state)
        runner = OpRunner(schedule, arenas, host_work, poison=options.poison)
        passes = _run(schedule, runner, options)
        after = read_carried(schedule, arenas, state)
    return Execution(_timeline(schedule, passes, options.backend), after)


def _require_device_kernels(schedule: Schedule) -> None:
    on_host = sorted({c.kernel for c in schedule.calls.values() if c.processor == "host"})
    if on_host:
        raise HostKernelError(
            f"policy '{schedule.policy}' has the host CPU run {', '.join(on_host)}, and there are "
            "no such kernels yet: simulate the schedule, or plan with another policy to run it"
        )


def _run(schedule: Schedule, runner: OpRunner, options: RunOptions) -> list[PassSpans]:
    num_ops = len(schedule.ops)
    if options.backend == "cuda":
        device = torch.device("cuda")
        return run_passes(schedule, CudaBackend(runner, num_ops, device), options.num_passes)
    backend = CpuBackend(runner, num_ops, options.compute_threads)
    return run_passes(schedule, backend, options.num_passes)


@contextlib.contextmanager
def _memory(schedule: Schedule, backend: BackendName) -> Iterator[dict[Tier, torch.Tensor]]:
    """One arena per tier: slab and pinned memory on CUDA, two host arenas on the CPU."""
    sizes = Arenas.sizes(schedule)
    if backend == "cpu":
        check_host_memory(sum(sizes.values()), host_limits(), pinned=False)
        yield {tier: torch.empty(size, dtype=torch.uint8) for tier, size in sizes.items()}
        return
    choose_backend(backend)
    pinned = PinnedArena(sizes.get(HOST, 0))
    try:
        slab = torch.empty(sizes[DEVICE], dtype=torch.uint8, device="cuda")
        yield {DEVICE: slab, HOST: pinned.bytes}
    finally:
        torch.cuda.synchronize()
        pinned.close()


def _timeline(schedule: Schedule, passes: list[PassSpans], backend: BackendName) -> Timeline:
    """Step time by the rule of simulated timelines; measured states hardly ever repeat exactly."""
    boundaries = PassBoundaries()
    steady = passes[1:] if len(passes) > 1 else passes
    for spans in passes:
        boundaries.add(spans.end_ns, _anchor_ns(schedule, spans))
    if len(passes) > 1:
        step = boundaries.unproven()
        step_ns, spread_ns = step.step_ns, step.spread_ns
    else:
        step_ns, spread_ns = float(max(passes[0].end_ns) - min(passes[0].start_ns)), 0.0
    return Timeline(
        op_ids=tuple(op.op_id for op in schedule.ops),
        passes=tuple(steady),
        cold=passes[0],
        step_ns=step_ns,
        spread_ns=spread_ns,
        provenance=_provenance(backend),
    )


def _anchor_ns(schedule: Schedule, spans: PassSpans) -> int:
    return max(
        end for op, end in zip(schedule.ops, spans.end_ns, strict=True) if isinstance(op, Compute)
    )


def _provenance(backend: BackendName) -> Provenance:
    if backend == "cuda":
        where = torch.cuda.get_device_name()
        return Provenance(kind="measured", where=where, detail=f"torch {torch.__version__}")
    where = f"cpu {platform.machine()}"
    return Provenance(kind="measured", where=where, detail=f"torch {torch.__version__}")
