"""From a stream of packed chunks to what the ranks of a run are fed of each step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from twinstream.data.chunk_stream import ChunkStream
from twinstream.data.data_error import DataError
from twinstream.data.order import Position
from twinstream.data.packing import Chunk
from twinstream.data.spans import NO_LABEL
from twinstream.training.planning import Plan

if TYPE_CHECKING:
    from twinstream.executor.launch.protocol import Batch

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


def batch_of(data: StepData, replica: int, chunks: int, plan: Plan) -> "Batch":
    """What a replica is fed of a step or a pass: so many chunks of the plan.

    Where the data's chunks are cut into pieces, each piece is a chunk of the plan.
    """
    from twinstream.executor.launch.protocol import Batch

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
