"""Evaluate: the loss over a set of data by forward passes, between two steps of a training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from twinstream.executor.memory.arenas import ArenaMemory
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.execute import execute_in
from twinstream.executor.run.training import Training
from twinstream.executor.run.work import Communications
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.tensors import Tier
from twinstream.schedule.workload import Workload


class EvaluationError(TwinstreamError):
    """A schedule or data that cannot be evaluated with."""


@dataclass(frozen=True)
class EvaluationBatch:
    """The inputs of one pass of an evaluation.

    Attributes:
        tokens: of each chunk of the pass, ids and labels, int32 [2, chunk_tokens]; a label < 0 is
            none.
        num_targets: labels of all of them that count; pairs, where the loss is of pairs.
        lengths: where sequences of any lengths are packed, those of each chunk; by default as the
            plan expects them.
        reference: where the loss is of pairs, of those of each chunk, float32 [2, pairs].
        samples: where the model takes tensors of samples, those of each chunk, by name.
    """

    tokens: Sequence[torch.Tensor]
    num_targets: int
    lengths: Sequence[tuple[int, ...]] | None = None
    reference: Sequence[torch.Tensor] | None = None
    samples: Sequence[Mapping[str, torch.Tensor]] | None = None


class PassLoss(NamedTuple):
    """The mean loss of one pass's targets, or a replica's share of it.

    Attributes:
        log_probs: where the loss is of pairs, of each chunk's, as `Training` has them; or of each
            chunk what the workload's `result` is, of all its tokens in one row.
    """

    loss: float
    num_targets: int
    log_probs: tuple[NDArray[np.float32], ...] = ()


@dataclass(frozen=True)
class Evaluated:
    """The mean loss over all targets, in nats; `seconds` are those of the whole evaluation."""

    loss: float
    num_targets: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def pass_losses(
    schedule: RankSchedule,
    memory: Mapping[Tier, ArenaMemory],
    batches: Sequence[EvaluationBatch],
    options: RunOptions,
    communications: Communications | None = None,
) -> list[PassLoss]:
    """The loss, pass by pass, of the state that lies in `memory`, which is left as it is.

    It is called where a training stands still (`RunOptions.between`, after `synchronize()`), with
    that training's memory and a schedule that the planner derived from the training's
    (`evaluation_of`) and that has been proven (`prove`). Of `options` those of the training do:
    how many passes, and what is between them, is set here; there are no graphs.

    A pass has the loss that training has of a step of the same tokens, to the bit: the mean over
    its own targets. `mean_loss` weights passes by their number. A rank without a head has none.

    Args:
        batches: one for each pass; may be made when they are asked for, in their order.

    Raises:
        EvaluationError: the schedule is not forward only, there is no batch, or one has another
            number of chunks than a pass takes.
        TwinstreamError: as `execute_in`.
    """
    if not schedule.workload.forward_only:
        raise EvaluationError(
            "the schedule is one of training, which would change the state: evaluate with the one "
            "that evaluation_of makes of it"
        )
    if not batches:
        raise EvaluationError("there is nothing to evaluate on: give one batch at least")
    data = _Data(batches, schedule.workload)
    loop = Training(
        tokens=data.tokens,
        learning_rate=0.0,
        seed=0,
        lengths=data.lengths,
        num_targets=data.num_targets,
        reference=data.reference,
        samples=data.sample,
    )
    timed = 1 if options.timed_passes is None else options.timed_passes
    once = replace(
        options, num_passes=len(batches), timed_passes=timed, between=None, in_place=True
    )
    work = loop.host_work(schedule)
    execute_in(schedule, memory, lambda arenas: None, work, once, communications)
    result = "log_probs" if schedule.workload.result == "loss" else schedule.workload.result
    sinks = [loop.log_probs[f"{result}.{i}"] for i in range(len(loop.log_probs))]
    return [
        PassLoss(loss, data.counts[step], tuple(values[step - 1] for values in sinks))
        for step, loss in enumerate(loop.losses, 1)
    ]


def mean_loss(losses: Sequence[PassLoss], seconds: float) -> Evaluated:
    """Exact for one pass: a float32 times fewer than 2**29 targets fits a float64.

    Raises:
        EvaluationError: no label counts.
    """
    num_targets = sum(one.num_targets for one in losses)
    if not num_targets:
        raise EvaluationError("no label of the evaluation's data counts: there is no loss")
    total = math.fsum(one.loss * one.num_targets for one in losses)
    return Evaluated(total / num_targets, num_targets, seconds)


class _Data:
    """The batches as a training's data, whose step n is pass n - 1."""

    def __init__(self, batches: Sequence[EvaluationBatch], workload: Workload) -> None:
        self._batches, self._workload = batches, workload
        self.counts: dict[int, int] = {}
        self._latest: tuple[int, EvaluationBatch] | None = None

    def tokens(self, step: int, index: int) -> torch.Tensor:
        return self._batch(step).tokens[index]

    def lengths(self, step: int, index: int) -> tuple[int, ...]:
        assert self._workload.packing is not None, "only packed sequences are asked for"
        given = self._batch(step).lengths
        return self._workload.packing.expected_lengths if given is None else given[index]

    def reference(self, step: int, index: int) -> torch.Tensor:
        given = self._batch(step).reference
        if given is None:
            raise EvaluationError("the loss is of pairs: give the batch a reference for them")
        return given[index]

    def sample(self, step: int, index: int, name: str) -> torch.Tensor:
        given = self._batch(step).samples
        if given is None:
            raise EvaluationError("the model takes tensors of samples: give the batch some")
        return given[index][name]

    def num_targets(self, step: int) -> int:
        return self._batch(step).num_targets

    def _batch(self, step: int) -> EvaluationBatch:
        if self._latest is None or self._latest[0] != step:
            found, wanted = self._batches[step - 1], self._workload.chunks_per_round
            for given in (found.tokens, found.lengths, found.reference, found.samples):
                if given is not None and len(given) != wanted:
                    raise EvaluationError(
                        f"batch {step} of the evaluation has {len(given)} chunks, and a pass takes "
                        f"{wanted}: fill the last one up with chunks without labels"
                    )
            self._latest = step, found
            self.counts[step] = found.num_targets
        return self._latest[1]
