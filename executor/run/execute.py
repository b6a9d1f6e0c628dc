"""Run a schedule, verbatim, and say when every op ran."""

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from twinstream.executor.backends.cpu import CpuBackend
from twinstream.executor.kernels.attention.canary import check_attention
from twinstream.executor.kernels.availability import require_kernels
from twinstream.executor.memory.arena_memory import arena_memory
from twinstream.executor.memory.arenas import ArenaMemory, Arenas
from twinstream.executor.memory.device_memory import expand_segments
from twinstream.executor.program.compiled import Work, compile_program
from twinstream.executor.program.host_work import HostWork
from twinstream.executor.program.options import BackendName, Between, RunOptions
from twinstream.executor.replay.dispatch import PassOptions, run_passes
from twinstream.executor.run.cuda_run import CudaJob, run_on_cuda
from twinstream.executor.run.measured import measured_timeline
from twinstream.executor.run.work import Communications, bind_works
from twinstream.executor.state.training_state import State, fill_carried, read_carried
from twinstream.models.lowering.lower import lower_again
from twinstream.schedule.derived.flush import flush_of
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.proof.conforms import require_conforming
from twinstream.schedule.proof.verify import require_safe_rank
from twinstream.schedule.tensors import Tier
from twinstream.schedule.timeline import Provenance, RankTimeline


class NoCudaError(TwinstreamError):
    """CUDA was asked for and there is none."""


@dataclass(frozen=True)
class Execution:
    """The measured timeline and the state after the last pass."""

    timeline: RankTimeline
    state: State


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
    schedule: RankSchedule,
    state: Mapping[str, torch.Tensor],
    host_work: HostWork,
    options: RunOptions,
) -> Execution:
    """Prove the schedule safe and conforming, then run it; what its last pass leaves is updated.

    Raises:
        KernelsUnavailableError: it names kernels that cannot run on this backend.
        UnsafeSchedule: the proof fails; nothing has run.
        AttentionCanaryError: its attention gives NaN on a shape of the schedule.
        NoCudaError: CUDA was asked for and there is none.
        HostMemoryError: the arenas do not fit this machine's memory.
        DeviceMemoryError: context and libraries take more than the schedule's caps leave them.
    """
    prove(schedule, options.backend)
    if (flush := flush_of(schedule)) is not None:
        prove(flush, options.backend)
    return execute_proven(schedule, state, host_work, options)


def execute_proven(
    schedule: RankSchedule,
    state: Mapping[str, torch.Tensor],
    host_work: HostWork,
    options: RunOptions,
    communications: Communications | None = None,
) -> Execution:
    """Run a schedule that has been proven, and the flush of what its last pass leaves.

    The schedule of one rank among several needs `communications` with the others.

    Raises:
        TwinstreamError: as `execute`, but for the proof.
    """
    prepare_device(schedule, options.backend)
    begun = _Begun(options.between)
    counted = replace(options, between=begun.between_passes if options.between else None)
    with arena_memory(schedule, options) as memory:

        def fill(arenas: Arenas) -> None:
            fill_carried(schedule, arenas, state)

        timeline = execute_in(schedule, memory, fill, host_work, counted, communications)
        if (flush := flush_of(schedule)) is not None:
            num_passes = begun.passes if options.between else options.num_passes
            flush_in(flush, memory, host_work, num_passes, options, communications)
        after = read_carried(schedule, Arenas(schedule, memory), state)
    return Execution(timeline, after)


def execute_resident(
    schedule: RankSchedule,
    fill: Callable[[Arenas], None],
    host_work: HostWork,
    options: RunOptions,
    communications: Communications | None = None,
) -> RankTimeline:
    """Run a schedule that has been proven, with a state that is in its arenas alone.

    `fill` puts it there, and may keep them: while `options.between` is asked and nothing runs, the
    state may be read and written. Nobody reads it back at the end.

    Raises:
        TwinstreamError: as `execute`, but for the proof.
    """
    prepare_device(schedule, options.backend)
    with arena_memory(schedule, options) as memory:
        return execute_in(schedule, memory, fill, host_work, options, communications)


def prepare_device(schedule: RankSchedule, backend: BackendName) -> None:
    """Do what comes before there is memory for the arenas: on CUDA the allocator grows in segments,
    and the schedule's attention is tried.

    Raises:
        AttentionCanaryError: it gives NaN on a shape of the schedule.
    """
    if backend == "cuda":
        expand_segments()
    check_attention(schedule, backend)


def prove(schedule: RankSchedule, backend: BackendName) -> None:
    """Raise unless the schedule is safe, conforms to its chain, and its kernels can run here."""
    require_runnable(schedule, backend)
    require_safe_rank(schedule)
    require_conforming(schedule, lower_again(schedule))


def require_runnable(schedule: RankSchedule, backend: BackendName) -> None:
    """Raise unless the backend is there and has all kernels of the schedule."""
    choose_backend(backend)
    if schedule.workload.cache is not None:
        raise TwinstreamError(
            "the schedule generates text, which is planned and predicted only: no kernels keep "
            "keys and values from step to step yet; `twinstream score` runs forward passes"
        )
    require_kernels(schedule, backend)


def execute_in(
    schedule: RankSchedule,
    memory: Mapping[Tier, ArenaMemory],
    fill: Callable[[Arenas], None],
    host_work: HostWork,
    options: RunOptions,
    communications: Communications | None = None,
) -> RankTimeline:
    """Run a schedule, which has been proven, in memory that is there; reads no state back.

    `memory` has the bytes that the schedule needs of each tier; `fill` puts the carried tensors
    in place before the first pass, unless they are (`options.in_place`). `check_attention` is the
    caller's too, before there is the memory, since it takes some of its own. The schedule of one
    rank among several needs `communications` with the others.

    Raises:
        TwinstreamError: as `execute`; or the schedule consumes what it finds, and is to be run for
            more than one pass.
    """
    if schedule.consumed and options.num_passes > 1:
        raise TwinstreamError(
            f"a schedule that consumes {len(schedule.consumed)} tensors was to be run for "
            f"{options.num_passes} passes: run it for one, after each run that leaves them"
        )
    program = compile_program(schedule)
    arenas = Arenas(schedule, memory)
    works = bind_works(schedule, arenas, host_work, options, communications)
    if (check := options.check) is not None:
        works = [partial(_checked, check, work) for work in works]
    if (on_error := options.on_error) is not None:
        works = [partial(_told, on_error, work) for work in works]

    def fill_all() -> None:
        if options.in_place:
            return
        if options.poison:
            arenas.poison()
        fill(arenas)
        if options.on_filled is not None:
            options.on_filled()

    if options.backend == "cuda":
        job = CudaJob(schedule, program, arenas, works, fill_all)
        return measured_timeline(schedule, *run_on_cuda(job, options))
    fill_all()
    backend = CpuBackend(program, works, options.zero_ns)
    pass_options = PassOptions(options.num_passes, options.timed_passes, options.between)
    passes = run_passes(program, backend, pass_options)
    provenance = Provenance(
        kind="measured",
        where=f"cpu {platform.machine()}",
        detail=f"torch {torch.__version__}",
        processor_share=backend.processor_share,
    )
    return measured_timeline(schedule, passes, provenance)


def flush_in(
    flush: RankSchedule,
    memory: Mapping[Tier, ArenaMemory],
    host_work: HostWork,
    num_passes: int,
    options: RunOptions,
    communications: Communications | None = None,
) -> None:
    """Make the updates that `num_passes` passes of a run have left; then its state is all there.

    The run is at rest or has ended. It may go on afterwards: its next pass has none to make.

    Args:
        flush: `flush_of` the run's schedule, which has been proven, too.
        memory: of the run.
        host_work: of the run; it is notified.
        num_passes: that have begun, as `between` gets it.
        options: of the run.
        communications: of the run.

    Raises:
        TwinstreamError: as `execute`.
    """
    once = replace(
        options, num_passes=1, timed_passes=None, between=None, graphs="off", in_place=True
    )
    work_of_pass = host_work.of_pass(num_passes)
    execute_in(flush, memory, lambda arenas: None, work_of_pass, once, communications)
    host_work.flushed(num_passes)


def _told(on_error: Callable[[Exception], None], work: Work, pass_index: int) -> None:
    try:
        work(pass_index)
    except Exception as error:
        on_error(error)
        raise


def _checked(check: Callable[[], None], work: Work, pass_number: int) -> None:
    check()
    work(pass_number)


@dataclass
class _Begun:
    """Counts the passes of a run that may end before all of them."""

    between: Between | None
    passes: int = 1

    def between_passes(self, number: int, synchronize: Callable[[], None]) -> bool:
        assert self.between is not None, "this is called where there is one"
        goes_on = self.between(number, synchronize)
        self.passes = number + goes_on
        return goes_on
