"""From a stream of packed chunks to what each step and chunk of a run is fed."""

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinstream.data.chunk_stream import ChunkStream
from twinstream.data.data_error import DataError
from twinstream.data.order import Position
from twinstream.data.packing import Chunk
from twinstream.data.pieces import NO_LABEL

KEPT_STEPS = 4  # a run is at most two passes ahead of the last that is complete


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
        kept: how many of the last steps may be asked for again.
    """

    def __init__(
        self, stream: ChunkStream, chunks_per_step: int, first_step: int, pieces: int = 1,
        kept: int = KEPT_STEPS,
    ) -> None:  # fmt: skip
        self._stream, self._count, self._pieces = stream, chunks_per_step // pieces, pieces
        self._kept = kept
        self._next = first_step
        self._steps: dict[int, StepData] = {}
        self._lock = threading.Lock()

    def step(self, step: int) -> StepData:
        """What a step is given; it is one of the last few or one that comes."""
        with self._lock:
            while self._next <= step:
                chunks = tuple(next(self._stream) for _ in range(self._count))
                self._steps[self._next] = StepData.of(chunks, self._stream.position)
                self._steps.pop(self._next - self._kept, None)
                self._next += 1
            return self._steps[step]

    def failure(self, step: int) -> DataError | None:
        """Why a step that comes cannot be given its chunks, if that is so."""
        try:
            self.step(step)
        except DataError as error:
            return error
        return None

    def tokens(self, step: int, index: int) -> NDArray[np.int32]:
        """Ids and labels of a chunk, int32 [2, chunk_tokens]."""
        return tokens_of(self.step(step).chunks, index, self._pieces)

    def lengths(self, step: int, index: int) -> tuple[int, ...]:
        """Of a chunk's documents, then of its padding."""
        return self.step(step).chunks[index].lengths

    def num_targets(self, step: int) -> int:
        """Labels of a step that count."""
        return self.step(step).targets


def tokens_of(chunks: tuple[Chunk, ...], index: int, pieces: int) -> NDArray[np.int32]:
    """Ids and labels of a chunk or, where each is cut into several, of a piece."""
    whole, piece = divmod(index, pieces)
    chunk = chunks[whole]
    size = len(chunk.ids) // pieces
    inside = slice(piece * size, (piece + 1) * size)
    return np.stack([chunk.ids[inside], chunk.labels[inside]])
