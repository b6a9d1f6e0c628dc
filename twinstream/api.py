"""The Python front door: plan, simulate, execute, compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering import lower
from twinstream.models.presets import load_model
from twinstream.models.spec import ModelSpec
from twinstream.planner.chunking import TrainingStep, chunkings
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.plan import plan_chain
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.sizes import parse_bytes
from twinstream.schedule.timeline import Timeline
from twinstream.simulator.replay import simulate as replay
from twinstream.text import TextBatches, byte_tokens, check_vocabulary, default_text

if TYPE_CHECKING:
    import torch

DEFAULT_POLICY = "streaming"


def plan(
    model: str | Path | ModelSpec,
    machine: str | Path | Machine,
    *,
    step: TrainingStep,
    device_mem: str | int | None = None,
    host_mem: str | int | None = None,
    policy: str = DEFAULT_POLICY,
) -> Schedule:
    """Plan a training step: where every tensor lives, when it moves, what is recomputed.

    Args:
        model: a preset name, a Hugging Face config.json, or a ModelSpec.
        machine: a profile name, a TOML file, or a Machine.
        step: sequence length and, where fixed, tokens per step, chunk tokens, chunks per round;
            and the recipe.
        device_mem: cap of device memory, `24GiB`, `80%` or bytes; by default all of it. The
            machine's reserve for context and libraries is taken off.
        host_mem: cap of pinned host memory; by default all that the profile states.
        policy: `resident` or `streaming`.

    Returns:
        A schedule that is verified and conforms to the model's task chain.

    Raises:
        TwinstreamError: a name, number or file is wrong, or nothing fits
            (`InfeasiblePlan`, with the smallest caps that would do).
    """
    spec = model if isinstance(model, ModelSpec) else load_model(model)
    profile = machine if isinstance(machine, Machine) else load_machine(machine)
    caps = _caps(profile, device_mem, host_mem)
    failed: InfeasiblePlan | None = None
    for workload in chunkings(spec, step):
        try:
            return plan_chain(lower(spec, workload, step.recipe), profile, caps, policy)
        except InfeasiblePlan as error:
            failed = error
    assert failed is not None, "there is always at least one chunking"
    raise failed


def simulate(schedule: Schedule, machine: str | Path | Machine) -> Timeline:
    """Predict the timeline of a schedule on a machine, whatever machine it was planned for."""
    return replay(schedule, machine if isinstance(machine, Machine) else load_machine(machine))


@dataclass(frozen=True)
class Run:
    """A measured timeline, the loss of every step, and the state after the last."""

    timeline: Timeline
    losses: tuple[float, ...]
    state: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class RunSettings:
    """How to run a schedule; `backend` "auto" is CUDA where there is one, else the CPU."""

    backend: str = "auto"
    num_steps: int = 4
    learning_rate: float = 1e-3
    seed: int = 0
    poison: bool = False


def execute(
    schedule: Schedule,
    settings: RunSettings | None = None,
    *,
    tokens: NDArray[np.int32] | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> Run:
    """Train by a schedule, verbatim; the first step is cold, the others are timed.

    Args:
        schedule: what to run; it is verified again.
        settings: backend, steps, learning rate, seed.
        tokens: a token stream; by default the bytes of Python's help topics.
        state: flat parameters and optimizer state to start from; by default fresh ones.

    Raises:
        TwinstreamError: the schedule is unsafe, there is no CUDA, memory is short, or the text
            does not suit the model.
    """
    from twinstream.executor.execute import RunOptions, choose_backend
    from twinstream.executor.execute import execute as run
    from twinstream.executor.state import initial_state
    from twinstream.executor.training import Training

    settings = settings or RunSettings()
    backend = choose_backend(settings.backend)
    spec = ModelSpec.model_validate(schedule.model.spec)
    stream = tokens if tokens is not None else byte_tokens(default_text())
    check_vocabulary(stream, spec.vocab_size)
    batches = TextBatches(stream, schedule.workload)
    training = Training(_torch_source(batches), settings.learning_rate, settings.seed)
    options = RunOptions(backend=backend, num_passes=settings.num_steps, poison=settings.poison)
    start = state if state is not None else initial_state(spec, settings.seed)
    execution = run(schedule, start, training.host_work(schedule), options)
    return Run(execution.timeline, tuple(training.losses), execution.state)


def _torch_source(batches: TextBatches) -> Callable[[int, int], torch.Tensor]:
    import torch

    def chunk(step: int, index: int) -> torch.Tensor:
        return torch.from_numpy(batches.chunk(step, index))

    return chunk


def _caps(machine: Machine, device_mem: str | int | None, host_mem: str | int | None) -> Caps:
    return Caps(
        device_bytes=_cap_bytes(device_mem, machine, "device_memory_bytes"),
        host_bytes=_cap_bytes(host_mem, machine, "host_memory_bytes"),
        device_reserve_bytes=round(machine.number("device_reserve_bytes")),
    )


def _cap_bytes(given: str | int | None, machine: Machine, field: str) -> int | None:
    """The cap given, or all the memory that the profile states."""
    number = getattr(machine, field)
    whole = number.value if number is not None else None
    if isinstance(given, int):
        return given
    if given is None:
        return None if whole is None else int(whole)
    return parse_bytes(given, whole_bytes=whole)
