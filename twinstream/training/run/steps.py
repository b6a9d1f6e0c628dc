"""What the ranks of a run are fed of each step, from a stream of packed chunks, and its metrics."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from twinstream.data.chunk_stream import ChunkStream
from twinstream.data.data_error import DataError
from twinstream.data.order import Position
from twinstream.data.packing import Chunk
from twinstream.data.spans import NO_LABEL
from twinstream.executor.launch.protocol import Batch
from twinstream.log.metrics import StepMetrics
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.ranks.planning import Plan
from twinstream.training.rates import LearningRate

_KEPT_STEPS = 16  # a run is two passes ahead of the last that is complete, stages a few more


@dataclass(frozen=True)
class StepData:
    """The chunks of one step, and where the data goes on after it.

    Attributes:
        tokens: without padding.
        targets: labels that count.
    """

    chunks: tuple[Chunk, ...]
    after: Position
    tokens: int
    targets: int

    @classmethod
    def of(cls, chunks: tuple[Chunk, ...], after: Position) -> "StepData":
        """Counted."""
        return cls(
            chunks,
            after,
            sum(len(chunk.ids) - chunk.num_padding for chunk in chunks),
            sum(int(np.count_nonzero(chunk.labels != NO_LABEL)) for chunk in chunks),
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

    def failure(self, step: int) -> DataError | None:
        """Why a step that comes cannot be given its chunks, if that is so."""
        try:
            self.step(step)
        except DataError as error:
            return error
        return None


def batch_of(data: StepData, replica: int, chunks: int, plan: Plan) -> Batch:
    """What a replica is fed of a step or a pass: so many chunks of the plan.

    Where the data's chunks are cut into pieces, each piece is a chunk of the plan.
    """
    count, pieces = chunks // plan.pieces, plan.pieces
    own = data.chunks[replica * count : (replica + 1) * count]
    tokens = tuple(_piece(chunk, at, pieces) for chunk in own for at in range(pieces))
    packed = plan.workload.packing is not None
    return Batch(tokens, tuple(chunk.lengths for chunk in own) if packed else None, data.targets)


def _piece(chunk: Chunk, index: int, pieces: int) -> NDArray[np.int32]:
    """Ids and labels of one of the pieces of a chunk, int32 [2, chunk_tokens]."""
    size = len(chunk.ids) // pieces
    inside = slice(index * size, (index + 1) * size)
    return np.stack([chunk.ids[inside], chunk.labels[inside]])


class LossError(TwinstreamError):
    """A loss or a norm is no number."""


class StepRecorder:
    """Takes losses and norms as they come, and tells of each step once, in order.

    Args:
        num_replicas: a step's loss is the sum of theirs.
        predicted_s: of a step.
        clips: whether each step has a norm, too.
        tokens: trained before the first step here.
        epoch_tokens: of the data.
    """

    def __init__(  # noqa: PLR0913
        self,
        batches: StepBatches,
        rate: LearningRate,
        *,
        num_replicas: int,
        predicted_s: float,
        clips: bool,
        tokens: int,
        epoch_tokens: int,
        on_step: Callable[[StepMetrics], None],
    ) -> None:
        self.tokens, self.last_step = tokens, 0
        self._batches, self._rate, self._on_step = batches, rate, on_step
        self._predicted_s, self._clips, self._epoch_tokens = predicted_s, clips, epoch_tokens
        self._num_replicas = num_replicas
        self._shares: dict[tuple[str, int], dict[int, float]] = {}
        self._found: dict[str, float] = {}
        self._since_s = perf_counter()

    def take(self, sink: str, step: int, value: float, replica: int = 0) -> None:
        """Take a replica's result of a step: its share of the loss, or the norm, which all have.

        Raises:
            LossError: it is no finite number; names the step.
        """
        shares = self._shares.setdefault((sink, step), {})
        shares[replica] = value
        if len(shares) < self._num_replicas:
            return
        del self._shares[sink, step]
        values = [shares[replica] for replica in sorted(shares)]
        value = sum(values) if sink == "loss" else values[0]
        if not math.isfinite(value):
            what = "loss" if sink == "loss" else "norm of the gradients"
            raise LossError(
                f"the {what} of step {step} is {value}: the run has stopped, and its checkpoints "
                "are as they were. Go on from the last one with a lower learning_rate, look at the "
                "data of that step, or start a new run with a lower max_grad_norm"
            )
        self._found[sink] = value
        if "loss" in self._found and (not self._clips or "grad_norm" in self._found):
            self._record(step)

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
            loss=self._found["loss"],
            learning_rate=self._rate(step),
            grad_norm=self._found.get("grad_norm"),
            tokens=data.tokens,
            targets=data.targets,
            seconds=took_s,
            tokens_per_s=data.tokens / took_s if took_s > 0 else 0.0,
            predicted_tokens_per_s=data.tokens / self._predicted_s,
            epoch=self.tokens / max(1, self._epoch_tokens),
        )
        self._found.clear()
        self._on_step(metrics)
