"""The Python front door: plan, simulate, execute, compare."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from twinstream.clusters.running.places import machine_for, place_of
from twinstream.data.text import TextBatches, byte_tokens, check_vocabulary, default_text
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.providers.model import AnyModel, model_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.planner import Planner
from twinstream.planner.request import DEFAULT_POLICY, PlanRequest, TrainingStep
from twinstream.run_settings import RunSettings
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.errors import ArgumentError, TwinstreamError, require
from twinstream.schedule.files import write_text
from twinstream.schedule.ops import Fetch
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.sizes import gib
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.timeline import RankTimeline, Timeline
from twinstream.simulator.replay import simulate as simulate_ranks
from twinstream.simulator.replay import steady_state
from twinstream.simulator.stragglers import with_stragglers
from twinstream.tracing import find_model
from twinstream.trusted_code import require_trusted

if TYPE_CHECKING:
    from twinstream.executor.memory.arenas import Arenas
    from twinstream.executor.program.host_work import HostWork
    from twinstream.executor.program.options import RunOptions
    from twinstream.executor.run.training import TokenSource
    from twinstream.executor.state.training_state import State

_NOBODY: Mapping[str, float] = MappingProxyType({})
_WHICH_TOKENS = (
    "the state has {done} steps behind it: say whether `tokens` begin where it stopped, "
    "RunSettings(skip_trained=False), or are the whole stream, of which what those steps took is "
    "skipped, RunSettings(skip_trained=True)"
)


class NoTorchError(TwinstreamError):
    """Running and probing need torch, and it is not installed."""


class HostTooSmall(TwinstreamError):
    """This machine's memory does not hold what a run needs."""


def plan(  # noqa: PLR0913
    model: str | Path | AnyModel,
    machine: str | Path | Machine,
    *,
    step: TrainingStep,
    device_mem: str | int | None = None,
    host_mem: str | int | None = None,
    disk_mem: str | int | None = None,
    policy: str = DEFAULT_POLICY,
    choices: Choices = OPEN,
    warm_start: Sequence[Schedule] = (),
) -> Schedule:
    """Plan a training step: where every tensor lives, when it moves, what is recomputed.

    Who plans more than once keeps a `Planner` and gives it a `PlanRequest` each time.

    Args:
        model: a preset name, a Hugging Face config.json or a folder with one, `FILE.py:FUNCTION`,
            what `twinstream trace` wrote, a ModelSpec or a TracedModel. Families without kernels
            of twinstream's own are traced, for which torch and transformers have to be installed.
        machine: a profile name, a TOML file, or a Machine.
        step: sequence length, or the unequal lengths that are packed, and, where fixed, tokens per
            step, chunk tokens, chunks per round; and the recipe. Kernels that it leaves open are
            those that suit the machine.
        device_mem: cap of device memory, `24GiB`, `80%` or bytes; by default all of it. The
            machine's reserve for context and libraries is taken off.
        host_mem: cap of pinned host memory; by default all that the profile states.
        disk_mem: most of a drive for what has no room in host memory; by default none. The machine
            states `disk_read_bytes_per_s`, `disk_latency_ns`, and `disk_write_bytes_per_s` and
            `disk_overlap` where more than frozen weights may lie there.
        policy: by name; see `twinstream.planner.policies`. It decides where the optimizer runs,
            whatever the recipe of `step` says.
        choices: what is fixed of a plan of `optimal`: homes, recompute level, prefetch; and how
            hard to look.
        warm_start: plans of the same step, made for less memory or a slower machine. One of them
            is the answer where it fits the caps and is faster, by the simulator of this machine,
            than what is found. Without them more memory may give a slower plan, by at most the
            gap that it states. Tokens per step that are open are theirs.

    Returns:
        A schedule that is verified and conforms to the model's task chain.

    Raises:
        TwinstreamError: a name, number or file is wrong, a known plan is of another step, or
            nothing fits (`InfeasiblePlan`, with caps that would do).
    """
    for schedule in warm_start:
        require("a known plan", schedule, Schedule)
    require("step", step, TrainingStep)
    found = find_model(model, longest=step.seq_len)
    request = PlanRequest.of(
        found, machine, step=step, device_mem=device_mem, host_mem=host_mem,
        disk_mem=disk_mem, policy=policy, choices=choices,
    )  # fmt: skip
    return Planner(steady_state).plan(request, warm_start)


def simulate(
    schedule: Schedule,
    machine: str | Path | Machine | None = None,
    *,
    cluster: str | Path | Cluster | None = None,
    stragglers: Mapping[str, float] = _NOBODY,
) -> Timeline:
    """Predict the timeline of a schedule, whatever it was planned for.

    Args:
        machine: of one device, or of a node of the cluster; by default the shipped profile that the
            schedule was planned for.
        cluster: of ranks of a layout, likewise.
        stragglers: how many times as long the ranks of a class, or `rank 5` alone, take; of a
            single rank the timeline has more classes than the schedule.

    Raises:
        UnsafeSchedule: `verify` finds something: an edit gave it a race or a circle of waits, say.
        TwinstreamError: a profile cannot be read, or lacks a number that the schedule needs.
    """
    require_safe(schedule)
    if not schedule.is_one_device:
        place = place_of(schedule, cluster, machine)
        cut, slow = with_stragglers(schedule, place.machine, stragglers)
        return simulate_ranks(cut, place.machine, place.cluster, slow)
    if cluster is not None or stragglers:
        raise ArgumentError("cluster and stragglers are of several ranks: leave them out")
    return simulate_ranks(schedule, machine_for(schedule, machine))


def write_report(
    path: str | Path,
    schedule: Schedule,
    machine: str | Path | Machine,
    *,
    predicted: Timeline | None = None,
    measured: Timeline | None = None,
) -> None:
    """Write one HTML page about a schedule and its timelines.

    Args:
        machine: of a mesh the profile of a node.
        predicted: without it the schedule is simulated, of a mesh on the cluster it was made for.

    Raises:
        TwinstreamError: a timeline is not of this schedule, or the file cannot be written.
    """
    from twinstream.report.report import report_html

    require("path", path, str, Path)
    require("schedule", schedule, Schedule)
    profile = load_machine(machine)
    before = predicted
    if before is None:
        before = simulate(schedule, profile)
    write_text(report_html(schedule, profile, predicted=before, measured=measured), Path(path))


@dataclass(frozen=True)
class Run:
    """A measured timeline, the loss of every step, and the state after the last.

    `norms` are those of the gradients of every step, before clipping, of a recipe that clips.
    `state["step"]` counts the optimizer steps done: `execute(..., state=run.state)` goes on there.
    """

    timeline: Timeline
    losses: tuple[float, ...]
    state: State
    norms: tuple[float, ...] = ()


def execute(
    schedule: Schedule,
    settings: RunSettings | None = None,
    *,
    tokens: NDArray[np.int32] | None = None,
    state: State | None = None,
) -> Run:
    """Train by a schedule, verbatim; the first step is cold, the others are timed.

    Args:
        schedule: of one device, what to run; it is verified again.
        settings: backend, steps, learning rate, seed.
        tokens: a token stream; by default the bytes of Python's help topics.
        state: flat parameters and optimizer state to start from, by default fresh ones; `step` in
            it, if any, is how many optimizer steps it has behind it. 3 steps and 3 from their
            `Run.state` give the bits of 6 at once; see `skip_trained` of the settings.

    Raises:
        TwinstreamError: the schedule is unsafe, there is no torch or no CUDA, memory is short, or
            the text does not suit the model.
    """
    require("schedule", schedule, Schedule)
    own = schedule.only
    require("settings", settings, RunSettings, type(None))
    require_torch()
    from twinstream.executor.kernels.availability import require_kernels
    from twinstream.executor.run.execute import execute as run
    from twinstream.executor.run.training import Training
    from twinstream.executor.state.training_state import initial_state, steps_done, with_steps_done

    settings = settings or RunSettings()
    options = settings.options()
    spec, recipe = model_of(own.model), Recipe.model_validate(own.recipe)
    require_trusted("the schedule", spec, recipe, trusts=settings.trusts_code)
    require_kernels(own, options.backend)
    done = 0 if state is None else steps_done(state)
    batches = _batches(own, tokens, done, settings)
    training = Training(
        _torch_source(batches), settings.learning_rate, settings.seed, first_step=1 + done,
        max_norm=settings.max_norm,
    )  # fmt: skip
    _check_memory(own, options.backend, copies_of_state=2 if settings.keeps_state else 0)
    host_work = _told(training.host_work(own), training.losses, settings.on_loss)
    if not settings.keeps_state:
        ran = _run_in_arenas(own, state, settings.seed, host_work, options)
        return Run(Timeline.of_rank(ran), tuple(training.losses), {}, tuple(training.norms))
    start = state if state is not None else initial_state(spec, settings.seed, recipe)
    execution = run(own, start, host_work, options)
    after = with_steps_done(execution.state, done + settings.num_steps)
    timeline = Timeline.of_rank(execution.timeline)
    return Run(timeline, tuple(training.losses), after, tuple(training.norms))


def _run_in_arenas(
    schedule: RankSchedule, state: State | None, seed: int, host_work: HostWork, options: RunOptions
) -> RankTimeline:
    """Run with a state that is in the arenas alone, and that nobody reads back."""
    from twinstream.executor.run.execute import execute_resident, prove
    from twinstream.executor.state.sources import fill_fresh
    from twinstream.executor.state.training_state import fill_carried

    def fill(arenas: Arenas) -> None:
        if state is None:
            fill_fresh(schedule, arenas, seed)
        else:
            fill_carried(schedule, arenas, state)

    prove(schedule, options.backend)
    return execute_resident(schedule, fill, host_work, options)


def _batches(
    schedule: RankSchedule, tokens: NDArray[np.int32] | None, done: int, settings: RunSettings
) -> TextBatches:
    """The tokens of each step; the stream may begin where the `done` steps stopped."""
    if done and tokens is not None and settings.skip_trained is None:
        raise ArgumentError(_WHICH_TOKENS.format(done=done))
    spec = model_of(schedule.model)
    stream = tokens if tokens is not None else byte_tokens(default_text())
    if spec.inputs:  # samples are all what fills them up, labels any
        stream = stream % spec.vocab_size
    check_vocabulary(stream, spec.vocab_size)
    begins_there = settings.skip_trained is False
    return TextBatches(stream, schedule.workload, 1 + done if begins_there else 1)


def _told(
    host_work: HostWork, losses: Sequence[float], on_loss: Callable[[float], None] | None
) -> HostWork:
    """The host's work, with `on_loss` told of every loss it takes out."""
    import torch

    if on_loss is None:
        return host_work

    def fetch(op: Fetch, pass_index: int, taken: torch.Tensor) -> None:
        host_work.fetch(op, pass_index, taken)
        if op.sink == "loss":
            on_loss(losses[-1])

    return replace(host_work, fetch=fetch)


def _check_memory(schedule: RankSchedule, backend: str, copies_of_state: int) -> None:
    """Refuse what this host cannot hold before the state is made, which may take minutes."""
    from twinstream.executor.memory.host_limits import AVAILABLE_ADVICE, host_limits

    tiers = (HOST, DEVICE) if backend == "cpu" else (HOST,)
    arenas = sum(arena_bytes(schedule, tier) for tier in tiers)
    state = sum(
        tensor.size_bytes
        for tensor in schedule.tensors
        if tensor.parent is None and tensor.role in ("parameter", "optimizer_state")
    )
    free = host_limits().free_bytes
    needed = arenas + copies_of_state * state
    if free is not None and needed > free:
        raise HostTooSmall(
            f"a run of this schedule on the {backend} backend takes {gib(needed)} of host memory "
            f"({gib(arenas)} of arenas, {gib(needed - arenas)} of weights and optimizer state "
            f"before and after), and {gib(free)} are free here. Run a smaller model, or "
            "where there is more memory (planning and simulating need none of it); "
            f"{AVAILABLE_ADVICE}."
        )


def probe(dtypes: Sequence[str] = ()) -> Machine:
    """Measure this machine's CPU, in float32 and these, as the device of the `cpu` backend.

    A CUDA device is measured by `executor.probe.device.probed_machine`.

    Raises:
        NoTorchError: torch is not installed.
    """
    require_torch()
    from twinstream.executor.probe.cpu import probe_cpu

    return probe_cpu(dtypes=dtypes)


def from_blocks(blocks: Sequence[Any], loss: Callable[[Any, Any], Any] | None = None) -> Any:
    """A torch module of these modules, called one after the other, for a file's `build` to return.

    Args:
        blocks: the first makes hidden states of token ids [B, S], the last one logits [B, S, V] of
            them; those in between are moved and run one by one.
        loss: of rows of logits [R, V] and labels [R], one for each row; None is cross entropy.

    Raises:
        NoTorchError: torch is not installed.
        TwinstreamError: they are fewer than three, or one is no module.
    """
    require_torch()
    from twinstream.executor.modules.blocks import BlockList

    return BlockList(blocks, loss)


def require_torch() -> None:
    """Raise NoTorchError where running and probing are impossible."""
    if importlib.util.find_spec("torch") is None:
        raise NoTorchError(
            "running and probing need torch, which is not installed: "
            "pip install 'twinstream[train]'; planning, simulating and comparing do without"
        )


def _torch_source(batches: TextBatches) -> TokenSource:
    import torch

    def chunk(step: int, index: int) -> torch.Tensor:
        return torch.from_numpy(batches.chunk(step, index))

    return chunk
