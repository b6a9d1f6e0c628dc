"""Runs of schedules on the CPU backend, and what is left of them to compare bit by bit."""

from dataclasses import dataclass

import torch

from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.execute import Execution, execute
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import State, initial_state
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.document import RankSchedule


@dataclass(frozen=True)
class Bits:
    """Losses and the whole state after the last step."""

    losses: tuple[float, ...]
    state: State


def random_tokens(schedule: RankSchedule, vocab_size: int) -> torch.Tensor:
    """As many ids and labels as five steps need, [chunk of the run, 2, chunk_tokens]."""
    workload = schedule.workload
    chunks = 5 * workload.chunks_per_round * workload.rounds_per_step
    generator = torch.Generator().manual_seed(5)
    shape = (chunks, 2, workload.chunk_tokens)
    return torch.randint(0, vocab_size, shape, generator=generator, dtype=torch.int32)


def training(schedule: RankSchedule, learning_rate: float = 1e-2) -> Training:
    spec = ModelSpec.model_validate(schedule.model.spec)
    tokens = random_tokens(schedule, spec.vocab_size)
    per_step = schedule.workload.chunks_per_round * schedule.workload.rounds_per_step
    return Training(
        lambda step, index: tokens[(step - 1) * per_step + index], learning_rate, seed=3
    )


def run(schedule: RankSchedule, options: RunOptions) -> tuple[Execution, Bits]:
    """Train from a fresh state on random tokens, the same for every schedule of a model."""
    spec = ModelSpec.model_validate(schedule.model.spec)
    loop = training(schedule)
    start = initial_state(spec, seed=1, recipe=Recipe.model_validate(schedule.recipe))
    execution = execute(schedule, start, loop.host_work(schedule), options)
    return execution, Bits(tuple(loop.losses), execution.state)


def bits_of(schedule: RankSchedule, num_steps: int = 3, *, poison: bool = False) -> Bits:
    return run(schedule, RunOptions(num_passes=num_steps, poison=poison))[1]


def assert_same_bits(found: Bits, expected: Bits) -> None:
    assert found.losses == expected.losses
    assert found.state.keys() == expected.state.keys()
    for name, flat in expected.state.items():
        assert torch.equal(found.state[name], flat), f"'{name}' differs"
