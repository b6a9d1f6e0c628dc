"""Evaluation between two steps: training's own loss, and a training that knows nothing of it."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.helpers.fake_cuda import on_cuda
from tests.helpers.fake_gpu import FakeGpu
from tests.helpers.host_chains import tiny_chain_of
from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.runs import Bits, assert_same_bits, bits_of, random_tokens, training
from tests.helpers.tiny_chains import WORKLOADS, small
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.pinned_pieces import host_ranges
from twinstream.executor.program.compiled import Work, compile_program
from twinstream.executor.program.host_work import HostWork
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run import execute as execute_module
from twinstream.executor.run.evaluation import (
    Evaluated,
    EvaluationBatch,
    EvaluationError,
    mean_loss,
    pass_losses,
)
from twinstream.executor.run.execute import execute_in, prove
from twinstream.executor.run.training import Training
from twinstream.executor.run.work import bind_works
from twinstream.executor.state.training_state import (
    State,
    fill_carried,
    initial_state,
    read_carried,
)
from twinstream.models.lowering.lower import lower
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.evaluate.evaluation import evaluation_of
from twinstream.schedule.document import Caps, RankSchedule

# policy, cap of the device over the least there is, workload, preset; None is no cap
GRID = [
    ("resident", None, "packed", "tiny"),
    ("resident", None, "unequal", "tiny-qwen3"),
    ("streaming", 5 / 4, "packed", "tiny-qwen3"),
    ("streaming", 1, "sliced", "tiny"),
    ("streaming", 1, "unequal", "tiny"),
    ("optimal", 5 / 4, "sliced", "tiny-qwen3"),
    ("optimal", 1, "one chunk", "tiny"),
    ("full_recompute", 1, "sliced in pairs", "tiny"),
]
Between = Callable[[int, Callable[[], None]], bool]


@cache
def schedule_of(policy: str, share: float | None, workload: str, preset: str) -> RankSchedule:
    chain = tiny_chain_of(policy, workload, preset)
    least = None if share is None else int(enough_device_bytes(chain, policy) * share)
    return planned(chain, MACHINE, Caps(device_bytes=least), policy)


def batch_of(schedule: RankSchedule, tokens: torch.Tensor, lengths=None) -> EvaluationBatch:
    """Of tokens [chunks, 2, chunk_tokens]."""
    num_targets = int((tokens[:, 1] >= 0).sum())
    return EvaluationBatch(list(tokens), num_targets, lengths)


def state_of(schedule: RankSchedule):
    spec = ModelSpec.model_validate(schedule.model.spec)
    return initial_state(spec, seed=1, recipe=Recipe.model_validate(schedule.recipe))


class Resting:
    """Arenas of a training that is at rest, its state in place and all else garbage."""

    def __init__(self, schedule: RankSchedule, state: State | None = None) -> None:
        sizes = Arenas.sizes(schedule)
        self.memory = {t: torch.full((n,), 0xFF, dtype=torch.uint8) for t, n in sizes.items()}
        self.schedule = schedule
        fill_carried(schedule, Arenas(schedule, self.memory), state or state_of(schedule))
        self.evaluation = evaluation_of(schedule)
        self.before = self.carried()

    def carried(self) -> list[torch.Tensor]:
        arenas = Arenas(self.schedule, self.memory)
        return [arenas.view(item.tensor, item.slot).clone() for item in self.schedule.carried]

    def evaluated(self, batches: list[EvaluationBatch], **options: object) -> Evaluated:
        losses = pass_losses(self.evaluation, self.memory, batches, RunOptions(**options))
        found = mean_loss(losses, 0.0)
        assert all(map(torch.equal, self.carried(), self.before))
        return found


@cache
def tokens_of(schedule_key: tuple) -> torch.Tensor:
    schedule = schedule_of(*schedule_key)
    return random_tokens(schedule, small(schedule.model.name).vocab_size)


def some_labels_missing(tokens: torch.Tensor) -> torch.Tensor:
    found = tokens.clone()
    found[:, 1, ::3] = -100
    return found


@pytest.mark.parametrize("key", GRID, ids=str)
def test_every_plan_has_the_loss_of_the_step_and_leaves_the_state_alone(key):
    """The step of one round on the same tokens; some targets do not count."""
    schedule = schedule_of(*key)
    cut = schedule.workload
    tokens = some_labels_missing(tokens_of(key)[: 2 * cut.chunks_per_round])
    tokens[cut.chunks_per_round, 1] = -100
    tokens[cut.chunks_per_round, 1, 1] = 7
    batch, other = (batch_of(schedule, part) for part in tokens.split(cut.chunks_per_round))
    assert batch.num_targets > other.num_targets > 0
    found = Resting(schedule).evaluated([batch], poison=True)

    one_round = cut.model_copy(update={"rounds_per_step": 1})
    chain = lower(small(schedule.model.name), one_round)
    step = planned(chain, MACHINE, Caps(), "resident")
    loop = Training(
        lambda step, index: tokens[index], 0.0, 0, num_targets=lambda _: batch.num_targets
    )
    execute_once(step, loop)
    assert [found.loss] == loop.losses
    assert found.num_targets == batch.num_targets < cut.chunks_per_round * cut.chunk_tokens
    assert found.perplexity == math.exp(found.loss)

    both = Resting(schedule).evaluated([batch, other, batch])
    alone = Resting(schedule).evaluated([other])
    counts = batch.num_targets, other.num_targets, batch.num_targets
    losses = found.loss, alone.loss, found.loss
    expected = math.fsum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
    assert both.loss == expected


def test_pinned_pieces_of_the_training_do_for_its_evaluation():
    """No copy of it reaches over bytes that training does not use in one go."""
    for key in GRID:
        schedule = schedule_of(*key)
        held, used = (host_ranges(each) for each in (schedule, evaluation_of(schedule)))
        assert used
        for one in used:
            assert any(other.start <= one.start and one.end <= other.end for other in held)


def execute_once(schedule: RankSchedule, loop: Training) -> None:
    memory = {t: torch.zeros(n, dtype=torch.uint8) for t, n in Arenas.sizes(schedule).items()}
    state = state_of(schedule)
    fill = lambda arenas: fill_carried(schedule, arenas, state)  # noqa: E731
    execute_in(schedule, memory, fill, loop.host_work(schedule), RunOptions(num_passes=1))


def trained(schedule: RankSchedule, between: Callable[[dict], Between], **options: object) -> Bits:
    """Four steps in arenas that `between` is told of."""
    memory = {t: torch.zeros(n, dtype=torch.uint8) for t, n in Arenas.sizes(schedule).items()}
    loop, state = training(schedule), state_of(schedule)
    fill = lambda arenas: fill_carried(schedule, arenas, state)  # noqa: E731
    asked = RunOptions(num_passes=4, between=between(memory), **options)
    execute_in(schedule, memory, fill, loop.host_work(schedule), asked)
    return Bits(tuple(loop.losses), read_carried(schedule, Arenas(schedule, memory), state))


@pytest.mark.parametrize(("key", "poison"), [(GRID[3], True), (GRID[5], False)], ids=str)
def test_a_training_with_evaluations_between_its_steps_is_the_one_without(key, poison):
    schedule, found = schedule_of(*key), []
    evaluation = evaluation_of(schedule)
    prove(evaluation, "cpu")
    batch = batch_of(schedule, tokens_of(key)[: schedule.workload.chunks_per_round])

    def between(memory: dict) -> Between:
        def ask(number: int, rest: Callable[[], None]) -> bool:
            rest()
            options = RunOptions(poison=poison)
            losses = pass_losses(evaluation, memory, number * [batch], options)
            found.append(mean_loss(losses, 0.0).loss)
            return True

        return ask

    assert_same_bits(trained(schedule, between, poison=poison), bits_of(schedule, 4))
    assert len(set(found)) == 3
    after = Resting(schedule, bits_of(schedule, 2).state)
    assert after.evaluated([batch]).loss == found[1]


def test_lengths_of_a_batch_are_its_own():
    key = GRID[1]
    schedule, resting = schedule_of(*key), Resting(schedule_of(*key))
    tokens = tokens_of(key)[:2]
    expected = WORKLOADS["unequal"].packing.expected_lengths
    as_expected = resting.evaluated([batch_of(schedule, tokens)]).loss
    assert resting.evaluated([batch_of(schedule, tokens, 2 * [expected])]).loss == as_expected
    others = [(16, 13), (9, 9, 9, 2)]
    assert resting.evaluated([batch_of(schedule, tokens, others)]).loss != as_expected


def test_batches_without_a_target_count_nothing_but_not_all_may_be_so():
    key = GRID[0]
    schedule, resting = schedule_of(*key), Resting(schedule_of(*key))
    tokens = tokens_of(key)[:2].clone()
    alone = resting.evaluated([batch_of(schedule, tokens)])
    unlabelled = tokens.clone()
    unlabelled[:, 1] = -100
    empty = batch_of(schedule, unlabelled)
    both = resting.evaluated([empty, batch_of(schedule, tokens)])
    assert (both.loss, both.num_targets) == (alone.loss, alone.num_targets)
    with pytest.raises(EvaluationError, match="no label"):
        resting.evaluated([empty])


def test_what_cannot_be_evaluated_is_refused_and_leaves_the_state_alone():
    key = GRID[0]
    schedule, resting = schedule_of(*key), Resting(schedule_of(*key))
    with pytest.raises(EvaluationError, match="nothing to evaluate on"):
        resting.evaluated([])
    with pytest.raises(EvaluationError, match="has 1 chunks, and a pass takes 2"):
        resting.evaluated([batch_of(schedule, tokens_of(key)[:1])])
    batch = batch_of(schedule, tokens_of(key)[:2])
    with pytest.raises(EvaluationError, match="evaluation_of"):
        pass_losses(schedule, resting.memory, [batch], RunOptions())
    assert all(map(torch.equal, resting.carried(), resting.before))


def test_on_a_gpu_nothing_is_warmed_up_and_the_training_goes_on(monkeypatch):
    """Both on the same GPU of the tests, one run within the other."""
    key = GRID[5]
    schedule, gpu, found = schedule_of(*key), on_cuda(monkeypatch, FakeGpu(3, 0.5)), []
    evaluation = evaluation_of(schedule)
    batch = batch_of(schedule, tokens_of(key)[: schedule.workload.chunks_per_round])

    def bind(bound: RankSchedule, arenas: Arenas, host_work: HostWork, *how: Any) -> list[Work]:
        works = bind_works(bound, arenas, host_work, *how)
        return gpu.works(compile_program(bound), works, arenas)

    def between(memory: dict) -> Between:
        def ask(number: int, rest: Callable[[], None]) -> bool:
            rest()
            options = RunOptions("cuda", graphs="on")
            losses = pass_losses(evaluation, memory, [batch, batch, batch], options)
            found.append(mean_loss(losses, 0.0))
            return True

        return ask

    monkeypatch.setattr(execute_module, "bind_works", bind)
    trained_bits = trained(schedule, between, backend="cuda", graphs="on")
    monkeypatch.undo()
    assert_same_bits(trained_bits, bits_of(schedule, 4))
    assert gpu.graphs
    after = Resting(schedule, bits_of(schedule, 2).state)
    assert found[1].loss == after.evaluated([batch]).loss
