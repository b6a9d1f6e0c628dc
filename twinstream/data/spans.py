"""Spans of tokens to train on: documents, the longer ones cut to a plan's longest document."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twinstream.data.encoding.block_tokens import BlockTokens

NO_LABEL = -100
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """S spans of one run of N tokens; chunks are packed of such spans.

    Attributes:
        ids, labels: [N]; a label is the token after, or NO_LABEL where that is not learned.
        starts, lengths: [S]; no span is longer than the longest document, and in each there is
            something to learn.
        sides: of what is packed as one: 1, or the 2 of a pair, which are one behind the other.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    starts: Ints
    lengths: Ints
    sides: int = 1

    @property
    def totals(self) -> Ints:
        """Tokens of each span, or of both of each pair."""
        totals: Ints = self.lengths.reshape(-1, self.sides).sum(1)
        return totals

    def chosen(self, indices: Ints) -> "Spans":
        """Return the spans, or the pairs of spans, at these indices."""
        found = (indices[:, None] * self.sides + np.arange(self.sides)).ravel()
        return replace(self, starts=self.starts[found], lengths=self.lengths[found])


def cut(tokens: BlockTokens, sizes: Sequence[int], sides: int = 1) -> Spans:
    """Cut the documents of a block into spans; long ones into these sizes, taken in turn.

    Of a long document that is not all learned, as a conversation, only the first span is kept: in
    another one an answer would be learned without what it answers. A span in which nothing is
    learned is left out: it would cost time and change nothing. So is a pair (`sides` 2) in one of
    whose two documents nothing is, or of whose documents the same is left.
    """
    ends = tokens.ends
    starts = np.concatenate([ends[:1] * 0, ends[:-1]])
    lengths = ends - starts
    counts = np.concatenate([[0], np.cumsum(tokens.learned)])
    is_all_learned = counts[ends] - counts[np.minimum(starts + 1, ends)] >= lengths - 1
    is_all_learned &= sides == 1
    lengths = np.where(is_all_learned, lengths, np.minimum(lengths, sizes[0]))
    is_long = lengths > sizes[0]
    parts = [
        (int(start) + first, size)
        for start, length in zip(starts[is_long], lengths[is_long], strict=True)
        for first, size in _split_document(int(length), sizes)
    ]
    long_starts, long_lengths = np.array(parts, np.int64).reshape(-1, 2).T
    starts = np.concatenate([starts[~is_long], long_starts])
    lengths = np.concatenate([lengths[~is_long], long_lengths])
    ends = starts + lengths
    teaches = counts[ends] > counts[np.minimum(starts + 1, ends)]
    teaches = teaches.reshape(-1, sides).all(1)
    if sides == 2:
        teaches &= ~alike_pairs(tokens.ids, starts, ends)
    teaches = teaches.repeat(sides)
    labels = np.full(len(tokens.ids), NO_LABEL, np.int32)
    labels[:-1] = np.where(tokens.learned[1:], tokens.ids[1:], NO_LABEL)
    return Spans(tokens.ids, labels, starts[teaches], lengths[teaches], sides)


def alike_pairs(ids: NDArray[np.int32], starts: Ints, ends: Ints) -> NDArray[np.bool_]:
    """Return for each pair of documents [starts, ends) of the ids whether both are the same."""
    first, second = (list(zip(starts[i::2], ends[i::2], strict=True)) for i in range(2))
    same = [
        np.array_equal(ids[a:b], ids[c:d]) for (a, b), (c, d) in zip(first, second, strict=True)
    ]
    return np.array(same, np.bool_)


def _split_document(length: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first token, size) of the spans of one long document."""
    found: list[tuple[int, int]] = []
    first = 0
    while first < length:
        size = min(sizes[len(found) % len(sizes)], length - first)
        found.append((first, size))
        first += size
    return found


def joined(parts: Sequence[Spans]) -> Spans:
    """Join spans of several runs of tokens into spans of one run."""
    offsets = np.cumsum([0, *(len(part.ids) for part in parts)])
    return Spans(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.starts + at for part, at in zip(parts, offsets, strict=False)]),
        np.concatenate([part.lengths for part in parts]),
        parts[0].sides,
    )


def sizes_for(longest: int, chunk_tokens: int | None, *, is_continuous: bool) -> tuple[int, ...]:
    """Return the sizes of the spans that long documents are cut into.

    A continuous text is cut so that its spans fill chunks to the last token: as many of the
    longest as a chunk has room for, then one of what is left.
    """
    if chunk_tokens is None or not is_continuous or chunk_tokens % longest == 0:
        return (longest,)
    return (*([longest] * (chunk_tokens // longest)), chunk_tokens % longest)


def first_too_long(tokens: BlockTokens, longest: int) -> tuple[int, int] | None:
    """Return index and length of the first document longer than `longest`; None if none is."""
    lengths = np.diff(tokens.ends, prepend=0)
    over = np.flatnonzero(lengths > longest)
    return (int(over[0]), int(lengths[over[0]])) if len(over) else None
