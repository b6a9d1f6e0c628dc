"""Documents packed into chunks of one size, side by side and apart."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinstream.data.data_error import DataError
from twinstream.data.spans import NO_LABEL, Ints, Spans
from twinstream.schedule.workload import PADDING_LABEL

_PADDING_ID = 0  # any that each model has: nothing attends to it, and it has no label


@dataclass(frozen=True)
class Chunk:
    """The packed tokens of one pass of the model, T of them.

    Attributes:
        ids: [T].
        labels: [T], the token that comes after each; -100 is none, as at a document's end, and
            PADDING_LABEL is padding's.
        lengths: of the documents one after another, then of the padding; they add up to T.
        num_padding: tokens of padding, the last ones.
        num_pairs: where documents are the two of a pair, one behind the other, how many there are.
        samples: tensors of the chunk's samples, by name, where the model takes some in place of
            ids, of which there are none then.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    lengths: tuple[int, ...]
    num_padding: int = 0
    num_pairs: int = 0
    samples: Mapping[str, NDArray[Any]] | None = None

    @property
    def documents(self) -> Iterator[slice]:
        """Yield where each document of the pairs lies in the chunk, without padding."""
        end = 0
        for length in self.lengths[: 2 * self.num_pairs]:
            yield slice(end, end + length)
            end += length


@dataclass(frozen=True)
class ChunkShape:
    """The limits of a plan: tokens of a chunk, of its longest document, entries of `lengths`.

    Padding is in `lengths` too, in pieces no longer than a document, so that a chunk with
    nothing but one token needs `1 + ceil((chunk_tokens - 1) / longest)` entries. With `alone` each
    document has a sequence of `longest` tokens, and padding behind it. Of pairs (`sides` 2) both
    documents are in one chunk.
    """

    chunk_tokens: int
    longest: int
    most_documents: int
    alone: bool = False
    sides: int = 1

    def __post_init__(self) -> None:
        if self.sides * self.longest > self.chunk_tokens >= self.longest:
            raise DataError(
                f"a chunk of {self.chunk_tokens} tokens cannot hold both documents of a pair, of "
                f"up to {self.longest} tokens each"
            )
        if not 1 <= self.longest <= self.chunk_tokens:
            raise DataError(
                f"a chunk of {self.chunk_tokens} tokens cannot hold documents of up to "
                f"{self.longest} tokens: the longest needs from 1 token to as many as a chunk"
            )
        needed = self.sides + -(-(self.chunk_tokens - self.sides) // self.longest)
        if self.most_documents < needed:
            raise DataError(
                f"{self.most_documents} document(s) a chunk are too few: {self.chunk_tokens} "
                f"tokens in documents of up to {self.longest} need at least {needed}, with padding"
            )


def pack(lengths: Ints, shape: ChunkShape) -> list[Ints]:
    """First-fit decreasing: for each chunk, the indices of its documents, or of its pairs.

    Each document goes to the first chunk that has room for it, the longest ones first and equal
    ones in the order they come. Equal ones are placed together, so that it takes about one step
    for each chunk and each different length.
    """
    order = np.argsort(-lengths, kind="stable")
    if shape.alone:
        each = shape.chunk_tokens // shape.longest
        order = order if each == 1 else np.arange(len(lengths))
        return [order[at : at + each] for at in range(0, len(order), each)]
    different, counts = np.unique(lengths, return_counts=True)
    bins = _Bins(shape)
    taken = 0
    for length, count in zip(different[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            index = bins.first_with_room(length)
            placed = bins.place(index, length, left)
            bins.members[index].append(order[taken : taken + placed])
            taken += placed
            left -= placed
    return [np.concatenate(members) for members in bins.members]


class _Bins:
    """Chunks being filled."""

    def __init__(self, shape: ChunkShape) -> None:
        self.shape = shape
        self.members: list[list[Ints]] = []
        self._free = np.full(64, shape.chunk_tokens, np.int64)
        self._entries = np.zeros(64, np.int64)

    def first_with_room(self, length: int) -> int:
        """The first chunk that takes one more of this length; a new one is always there."""
        if len(self.members) == len(self._free):
            self._free = np.append(self._free, np.full_like(self._free, self.shape.chunk_tokens))
            self._entries = np.append(self._entries, np.zeros_like(self._entries))
        num = len(self.members) + 1
        free = self._free[:num] - length
        padding = -(-free // self.shape.longest)
        entries = self._entries[:num] + self.shape.sides + padding
        fits = (free >= 0) & (entries <= self.shape.most_documents)
        index = int(fits.argmax())
        if index == len(self.members):
            self.members.append([])
        return index

    def place(self, index: int, length: int, at_most: int) -> int:
        """Put in as many as there is room for, at least one; how many."""
        free, entries = int(self._free[index]), int(self._entries[index])

        def needed(placed: int) -> int:
            padding = -(-(free - placed * length) // self.shape.longest)
            return entries + placed * self.shape.sides + padding

        # One more never lowers the entries: no document is longer than a piece of padding.
        room = range(1, min(at_most, free // length) + 1)
        placed = bisect_right(room, self.shape.most_documents, key=needed)
        self._free[index] -= placed * length
        self._entries[index] += placed * self.shape.sides
        return placed


def chunk_of(spans: Spans, indices: Ints, shape: ChunkShape) -> Chunk:
    """The chunk of these pieces or pairs, in this order."""
    spans = spans.chosen(indices)
    starts, lengths = spans.starts.tolist(), spans.lengths.tolist()
    ids = np.full(shape.chunk_tokens, _PADDING_ID, np.int32)
    labels = np.full(shape.chunk_tokens, PADDING_LABEL, np.int32)
    at = 0
    for start, length in zip(starts, lengths, strict=True):
        ids[at : at + length] = spans.ids[start : start + length]
        labels[at : at + length - 1] = spans.labels[start : start + length - 1]
        labels[at + length - 1] = NO_LABEL
        at += shape.longest if shape.alone else length
    num_padding = shape.chunk_tokens - sum(lengths)
    pieces = (*lengths, *_padding(num_padding, shape.longest))
    return Chunk(ids, labels, pieces, num_padding, len(indices) if spans.sides == 2 else 0)


def empty_chunk(shape: ChunkShape) -> Chunk:
    """Return a chunk of padding alone."""
    no_ids, none = np.empty(0, np.int32), np.empty(0, np.int64)
    return chunk_of(Spans(no_ids, no_ids, none, none, shape.sides), none, shape)


def _padding(num_tokens: int, longest: int) -> Sequence[int]:
    whole, rest = divmod(num_tokens, longest)
    return [longest] * whole + [rest] * (rest > 0)
