"""The rank of one device: a thread that trains, asks, pauses, and ends when it is told to."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import bits_of, random_tokens
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.launch.local_rank import LocalRank
from twinstream.executor.launch.protocol import (
    AtBoundary,
    Batch,
    Continue,
    GetBatch,
    ReadTensor,
    ShouldPause,
    StepResult,
    TrainTask,
    WriteTensor,
    Written,
)
from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks.rank_run import RankOutcome
from twinstream.executor.state.training_state import initial_state
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.document import Caps, RankSchedule

STEPS = 3


@pytest.fixture(scope="module")
def schedule() -> RankSchedule:
    return planned(tiny_chain("packed"), MACHINE, Caps(), "streaming")


def started(schedule: RankSchedule) -> LocalRank:
    """A rank that has its state, and waits before its first step."""
    task = TrainTask(1, STEPS, lambda step: 1e-2, seed=3, max_norm=0.0, evaluation=None)
    rank = LocalRank(schedule, task, RunOptions(num_passes=task.num_passes))
    assert rank.recv() == (0, AtBoundary(0))
    spec = ModelSpec.model_validate(schedule.model.spec)
    state = initial_state(spec, seed=1, recipe=Recipe.model_validate(schedule.recipe))
    for name, flat in state.items():
        rank.send(0, WriteTensor(name, flat.numpy()))
        assert rank.recv() == (0, Written())
    return rank


def served(rank: LocalRank, schedule: RankSchedule) -> Iterator[Any]:
    """What a rank says beside asking for data, which it gets."""
    work, spec = schedule.workload, ModelSpec.model_validate(schedule.model.spec)
    tokens = random_tokens(schedule, spec.vocab_size).numpy()
    count = work.chunks_per_round * work.rounds_per_step
    while True:
        _, message = rank.recv()
        if isinstance(message, GetBatch):
            own = tokens[(message.step - 1) * count : message.step * count]
            rank.send(0, Batch(tuple(own), None, work.tokens_per_step))
        else:
            yield message


def test_a_rank_trains_to_the_bits_of_a_run_and_pauses_where_it_is_told_to(
    schedule: RankSchedule,
) -> None:
    expected = bits_of(schedule, STEPS)
    rank, losses = started(schedule), {}
    rank.send(0, Continue(True))
    for said in served(rank, schedule):
        match said:
            case StepResult("loss", step, value):
                losses[step] = value
            case ShouldPause(step):
                rank.send(0, step == STEPS)
            case AtBoundary(step):
                break
    assert step == STEPS and tuple(losses[at] for at in sorted(losses)) == expected.losses
    for name, flat in expected.state.items():
        rank.send(0, ReadTensor(name))
        assert np.array_equal(rank.recv()[1].flat, flat.numpy())
    rank.send(0, Continue(False))
    _, outcome = rank.recv()
    assert isinstance(outcome, RankOutcome)
    assert outcome.timeline.op_ids == tuple(op.op_id for op in schedule.ops)
    rank.close()


def test_a_rank_that_is_closed_within_a_step_ends_after_the_op_that_runs(
    schedule: RankSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    reached, closed = threading.Event(), threading.Event()
    kernel = registered_kernel("block_backward/eager")

    def slow(operands: Any, attributes: Any) -> Any:
        calls_of_op = kernel(operands, attributes)

        def run() -> None:
            calls.append(1)
            if len(calls) == 2:
                reached.set()
                closed.wait()
            calls_of_op()

        return run

    monkeypatch.setattr(
        "twinstream.executor.providers.provider.registered_kernel",
        lambda key: slow if key == "block_backward/eager" else registered_kernel(key),
    )
    threads = threading.active_count()
    rank = started(schedule)

    def serve() -> None:
        with contextlib.suppress(StopServing):
            for said in served(rank, schedule):
                if isinstance(said, ShouldPause):
                    rank.send(0, False)

    serves, ends = threading.Thread(target=serve), threading.Thread(target=rank.close)
    rank.send(0, Continue(True))
    serves.start()
    assert reached.wait(60)
    ends.start()
    while not rank._channel.is_closed:
        time.sleep(0.001)
    closed.set()
    ends.join(60)
    assert not ends.is_alive() and len(calls) == 2
    rank._channel.from_rank.put(StopServing())
    serves.join(60)
    assert threading.active_count() == threads


class StopServing(Exception):
    """Ends the server of the tests."""


def test_what_ends_a_rank_is_raised_to_whoever_hears_of_it(schedule: RankSchedule) -> None:
    rank = started(schedule)
    rank.send(0, Continue(True))
    with pytest.raises(ZeroDivisionError):
        for said in served(rank, schedule):
            if isinstance(said, ShouldPause):
                rank.send(0, _NoBool())
    with pytest.raises(ZeroDivisionError):
        rank.recv()
    rank.close()


class _NoBool:
    """An answer at which the rank fails."""

    def __bool__(self) -> bool:
        raise ZeroDivisionError
