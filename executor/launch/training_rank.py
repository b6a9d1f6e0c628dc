"""A rank in a training: asks its trainer for data, reports losses, gives and takes its state."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray

from twinstream.executor.launch.protocol import (
    AtBoundary,
    Batch,
    Continue,
    Evaluate,
    GetBatch,
    Losses,
    RankChannel,
    ReadTensor,
    ShouldPause,
    StepResult,
    TensorBytes,
    TrainTask,
    WriteTensor,
    Written,
)
from twinstream.executor.memory.staging import Staging
from twinstream.executor.program.host_work import HostWork
from twinstream.executor.ranks.rank_run import RankInputs
from twinstream.executor.ranks.resident import ResidentRank
from twinstream.executor.run.evaluation import EvaluationBatch
from twinstream.executor.run.training import Training
from twinstream.schedule.cluster.projecting import RankPart, rank_part
from twinstream.schedule.ops import Fetch

_KEPT_STEPS = 4  # a run is at most two passes ahead of the last that is complete


class TrainingRank:
    """One rank of a training.

    Args:
        part: what it does of each step.
        channel: to the trainer.
    """

    def __init__(self, task: TrainTask, part: RankPart, channel: RankChannel) -> None:
        self._task, self._part, self._channel = task, part, channel
        self._evaluation = None
        if task.evaluation is not None:
            self._evaluation = rank_part(task.evaluation, part.rank)
        self._batches: dict[int, Batch] = {}
        self._data = threading.Lock()
        self._asking = threading.Lock()

    def inputs(self) -> RankInputs:
        """Return the rank's first state, its host work, and its work between steps."""
        return RankInputs(self._host_work(), between=self._between, fill=self._fill)

    def _host_work(self) -> HostWork:
        """Feeds data; reports losses and norms."""
        task, packing = self._task, self._part.schedule.workload.packing
        training = Training(
            lambda step, index: torch.from_numpy(self._batch(step).tokens[index]),
            task.rate,
            task.seed,
            first_step=task.first,
            lengths=self._lengths if packing is not None else None,
            num_targets=lambda step: self._batch(step).num_targets,
            max_norm=task.max_norm,
            reference=self._reference,
            samples=self._sample,
        )
        work = training.host_work(self._part.schedule)

        def fetch(op: Fetch, pass_index: int, taken: torch.Tensor) -> None:
            work.fetch(op, pass_index, taken)
            values: list[Any] = training.results(op.sink)
            self._channel.send(StepResult(op.sink, task.first + pass_index, values.pop()))

        return replace(work, fetch=fetch)

    def _batch(self, step: int) -> Batch:
        with self._data:
            if step not in self._batches:
                self._batches[step] = self._ask(GetBatch(step))
                self._batches.pop(step - _KEPT_STEPS, None)
            return self._batches[step]

    def _lengths(self, step: int, index: int) -> tuple[int, ...]:
        lengths = self._batch(step).lengths
        assert lengths is not None, "sequences are packed"
        return lengths[index]

    def _reference(self, step: int, index: int) -> torch.Tensor:
        reference = self._batch(step).reference
        assert reference is not None, "the loss is of pairs"
        return torch.from_numpy(reference[index])

    def _sample(self, step: int, index: int, name: str) -> torch.Tensor:
        samples = self._batch(step).samples
        assert samples is not None, "the model takes tensors of samples"
        return torch.from_numpy(samples[index][name])

    def _ask(self, question: object) -> Any:
        """One question at a time, from whatever thread."""
        with self._asking:
            self._channel.send(question)
            return self._channel.recv()

    def _fill(self, rank: ResidentRank) -> None:
        """The state comes from the trainer, which reads the files or draws it."""
        self._rank = rank
        self._serve(self._task.first - 1)

    def _between(self, number: int, rest: Callable[[], None]) -> bool:
        """Before another pass: pause where the trainer says so; whether to go on."""
        step = self._task.first - 1 + number
        if not self._ask(ShouldPause(step)):
            return True
        rest()
        self._rank.flush(number)
        return self._serve(step)

    def _serve(self, step: int) -> bool:
        """Do what the trainer asks until the pause is over; whether the run goes on."""
        channel, rank, staging = self._channel, self._rank, Staging()
        with self._asking:
            channel.send(AtBoundary(step))
            while True:
                match channel.recv():
                    case ReadTensor(name, start, stop):
                        channel.send(TensorBytes(rank.read(name, start, stop).numpy()))
                    case WriteTensor(name, flat):
                        rank.write(name, torch.from_numpy(flat), staging)
                        channel.send(Written())
                    case Evaluate(passes):
                        channel.send(self._losses(passes))
                    case Continue(goes_on):
                        if not goes_on:  # whose views would keep the memory
                            del self._rank
                        return goes_on
                    case other:
                        raise AssertionError(f"a rank at rest is told {other!r}")

    def _losses(self, passes: tuple[Batch, ...]) -> Losses:
        assert self._evaluation is not None, "who asks for it has sent its schedule"
        batches = [
            EvaluationBatch(
                [torch.from_numpy(tokens) for tokens in one.tokens],
                one.num_targets,
                one.lengths,
                None if one.reference is None else list(map(torch.from_numpy, one.reference)),
                None if one.samples is None else list(map(_tensors, one.samples)),
            )
            for one in passes
        ]
        return Losses(tuple(self._rank.evaluate(self._evaluation, batches)))


def _tensors(samples: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in samples.items()}
