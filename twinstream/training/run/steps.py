"""What the ranks of a run are fed of each step, from a stream of packed chunks, and its metrics."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from twinstream.data.chunk_stream import ChunkStream
from twinstream.data.order import Position
from twinstream.data.packing import Chunk
from twinstream.executor.launch.protocol import Batch
from twinstream.log.metrics import PairMetrics, StepMetrics
from twinstream.models.lowering.declarations import log_probs_sink
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.ranks.planning import Plan
from twinstream.training.rates import LearningRate
from twinstream.training.run.pairs import Floats, pair_metrics

_KEPT_STEPS = 16  # a run is two passes ahead of the last that is complete, stages a few more


@dataclass(frozen=True)
class StepData:
    """The chunks of one step, and where the data goes on after it.

    Attributes:
        tokens: without padding.
        targets: labels that count.
        pairs: where documents are pairs.
    """

    chunks: tuple[Chunk, ...]
    after: Position
    tokens: int
    targets: int
    pairs: int

    @classmethod
    def of(cls, chunks: tuple[Chunk, ...], after: Position) -> "StepData":
        """Counted."""
        return cls(
            chunks,
            after,
            sum(len(chunk.ids) - chunk.num_padding for chunk in chunks),
            sum(int(np.count_nonzero(chunk.labels >= 0)) for chunk in chunks),
            sum(chunk.num_pairs for chunk in chunks),
        )


class StepBatches:
    """Gives each step its chunks, in whatever order they are asked for.

    Args:
        first_step: the step that the stream's next chunk belongs to.
        pieces: into how many slices of one sequence a chunk of the stream is cut.
    """

    def __init__(
        self, stream: ChunkStream, chunks_per_step: int, first_step: int, pieces: int = 1
    ) -> None:
        self._stream, self._count, self._next = stream, chunks_per_step // pieces, first_step
        self._steps: dict[int, StepData] = {}

    def step(self, step: int) -> StepData:
        """What a step is given; it is one of the last few or one that comes."""
        while self._next <= step:
            chunks = tuple(next(self._stream) for _ in range(self._count))
            self._steps[self._next] = StepData.of(chunks, self._stream.position)
            self._steps.pop(self._next - _KEPT_STEPS, None)
            self._next += 1
        return self._steps[step]

    def failure(self, step: int, reference: "ReferenceOf | None") -> TwinstreamError | None:
        """Why a step that comes cannot be given its chunks and their reference, if that is so."""
        try:
            for chunk in self.step(step).chunks:
                if reference is not None:
                    reference(chunk)
        except TwinstreamError as error:
            return error
        return None


ReferenceOf = Callable[[Chunk], Floats]


def batch_of(
    data: StepData, replica: int, chunks: int, plan: Plan, reference: ReferenceOf | None
) -> Batch:
    """What a replica is fed of a step or a pass: so many chunks of the plan.

    Where the data's chunks are cut into pieces, each piece is a chunk of the plan.

    Args:
        reference: where the loss is of pairs, of those of a chunk.
    """
    count, pieces = chunks // plan.pieces, plan.pieces
    own = data.chunks[replica * count : (replica + 1) * count]
    tokens = tuple(piece_of(chunk, at, pieces) for chunk in own for at in range(pieces))
    packed = plan.workload.packing is not None
    lengths = tuple(chunk.lengths for chunk in own) if packed else None
    given = [chunk.samples for chunk in own if chunk.samples is not None]
    samples = tuple(given) or None
    if reference is None:
        return Batch(tokens, lengths, data.targets, samples=samples)
    return Batch(tokens, lengths, data.pairs, tuple(map(reference, own)), samples)


def passes_of(chunks: Iterable[Chunk], plan: Plan, empty: Chunk) -> Iterator[StepData]:
    """Forward passes over chunks; the last one is filled up with empty ones."""
    each = plan.workload.chunks_per_round // plan.pieces * plan.num_replicas
    left = iter(chunks)
    while found := tuple(islice(left, each)):
        yield StepData.of((*found, *[empty] * (each - len(found))), Position())


def piece_of(chunk: Chunk, index: int, pieces: int) -> NDArray[np.int32]:
    """Ids and labels of one of the pieces of a chunk, int32 [2, chunk_tokens]."""
    size = len(chunk.ids) // pieces
    inside = slice(index * size, (index + 1) * size)
    return np.stack([chunk.ids[inside], chunk.labels[inside]])


class LossError(TwinstreamError):
    """A loss or a norm is no number."""


class StepRecorder:
    """Takes the results of steps as they come, and tells of each step once, in order.

    Args:
        plan: a step's loss is the sum of those of its replicas.
        reference: where the loss is of pairs.
        tokens: trained before the first step here.
        epoch_tokens: of the data.
    """

    def __init__(  # noqa: PLR0913
        self,
        batches: StepBatches,
        rate: LearningRate,
        *,
        plan: Plan,
        reference: ReferenceOf | None,
        tokens: int,
        epoch_tokens: int,
        on_step: Callable[[StepMetrics], None],
    ) -> None:
        self.tokens, self.last_step = tokens, 0
        self._batches, self._rate, self._on_step = batches, rate, on_step
        self._plan, self._epoch_tokens, self._reference = plan, epoch_tokens, reference
        self._sinks = {"loss", *(("grad_norm",) if plan.recipe.clips else ())}
        self._shares: dict[tuple[str, int], dict[int, float]] = {}
        self._values: dict[str, float] = {}
        # by step and replica; of a sink round by round
        self._log_probs: dict[int, dict[int, dict[str, list[Floats]]]] = {}
        self._since_s = perf_counter()

    def take(self, sink: str, step: int, value: float | Floats, replica: int = 0) -> None:
        """Take a replica's result of a step: its share of the loss, or the norm, which all have;
        or the log-probabilities of a chunk of its own.

        Raises:
            LossError: it is no finite number; names the step.
        """
        if isinstance(value, np.ndarray):
            of_replica = self._log_probs.setdefault(step, {}).setdefault(replica, {})
            of_replica.setdefault(sink, []).append(value)
        else:
            shares = self._shares.setdefault((sink, step), {})
            shares[replica] = value
            if len(shares) < self._plan.num_replicas:
                return
            del self._shares[sink, step]
            values = [shares[replica] for replica in sorted(shares)]
            self._values[sink] = self._checked(sink, step, values)
        if self._values.keys() == self._sinks and self._has_log_probs(step):
            self._record(step)

    def _has_log_probs(self, step: int) -> bool:
        """Whether those of all its chunks have come."""
        if self._reference is None:
            return True
        found = self._log_probs.get(step, {}).values()
        count = sum(len(values) for by_sink in found for values in by_sink.values())
        return count == self._plan.chunks_per_step

    def _checked(self, sink: str, step: int, values: list[float]) -> float:
        value = sum(values) if sink == "loss" else values[0]
        if not math.isfinite(value):
            what = "loss" if sink == "loss" else "norm of the gradients"
            raise LossError(
                f"the {what} of step {step} is {value}: the run has stopped, and its checkpoints "
                "are as they were. Go on from the last one with a lower learning_rate, look at the "
                "data of that step, or start a new run with a lower max_grad_norm"
            )
        return value

    def skip_time(self) -> None:
        """What went by since the last step was not a step's."""
        self._since_s = perf_counter()

    def _record(self, step: int) -> None:
        now_s, data = perf_counter(), self._batches.step(step)
        took_s, self._since_s = now_s - self._since_s, now_s
        self.tokens += data.tokens
        self.last_step = step
        metrics = StepMetrics(
            step=step,
            loss=self._values["loss"],
            learning_rate=self._rate(step),
            grad_norm=self._values.get("grad_norm"),
            tokens=data.tokens,
            targets=data.targets,
            seconds=took_s,
            tokens_per_s=data.tokens / took_s if took_s > 0 else 0.0,
            predicted_tokens_per_s=data.tokens / self._plan.step_s,
            epoch=self.tokens / max(1, self._epoch_tokens),
            preference=self._preference(step, data),
        )
        self._values.clear()
        self._on_step(metrics)

    def _preference(self, step: int, data: StepData) -> PairMetrics | None:
        if self._reference is None:
            return None
        found = self._log_probs.pop(step)
        log_probs = [
            values
            for _, by_sink in sorted(found.items())
            for of_round in zip(
                *(by_sink[log_probs_sink(chunk)] for chunk in range(len(by_sink))), strict=True
            )
            for values in of_round
        ]
        reference = list(map(self._reference, data.chunks))
        scale = self._plan.recipe.loss.reward_scale
        return pair_metrics(data.chunks, log_probs, reference, scale)
