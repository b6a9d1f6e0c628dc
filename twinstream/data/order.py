"""The order in which a run sees its data: a seeded shuffle for each epoch."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from math import ceil, floor

import numpy as np

from twinstream.data.reading.blocks import DataBlock
from twinstream.data.spans import Ints


@dataclass(frozen=True)
class Position:
    """The place of the next chunk in the data; whole numbers and a text, so that JSON takes it.

    Attributes:
        epoch: epochs that are behind.
        group: groups of blocks of this epoch that are behind.
        chunk: chunks of this group that are behind.
        order: of what it is a position: data, seed and shape of the chunks. Empty at the start.
    """

    epoch: int = 0
    group: int = 0
    chunk: int = 0
    order: str = ""


@dataclass(frozen=True)
class BlockSlice:
    """The part of a block that one epoch takes: shares `first` to `end` of its documents.

    Where a source's weight is no whole number, an epoch may end within a block: with weight 0.5 and
    one block it takes half of the documents, and the next epoch the others. `shuffle` names the
    shuffle of the documents that both slices are cut from.
    """

    block: DataBlock
    shuffle: tuple[int, ...]
    first: Fraction = Fraction(0)
    end: Fraction = Fraction(1)

    @property
    def size_bytes(self) -> int:
        return ceil(self.block.size_bytes * (self.end - self.first))

    def share(self, count: int, seed: int) -> Ints:
        """Return the indices of the slice's documents, of the `count` in the block."""
        if self.first == 0 and self.end == 1:
            return np.arange(count)
        order = shuffled(count, "documents", seed, *self.shuffle)
        return order[floor(self.first * count) : floor(self.end * count)]


@dataclass(frozen=True)
class Order:
    """The order of all data of a run: the blocks of each source, its weight, and the seed.

    Each source goes through its blocks in one shuffled pass after another; an epoch takes the next
    `weight` passes of each. The blocks of an epoch, of all sources, are shuffled and cut into
    groups of about `group_bytes`, and within a group all documents are shuffled: so only the
    blocks of one group are tokenised before its first chunk.
    """

    sources: tuple[tuple[DataBlock, ...], ...]
    weights: tuple[float, ...]
    seed: int
    group_bytes: int

    @property
    def most_epochs_of_nothing(self) -> int:
        """Return how many epochs in a row may have no document, although the data has one."""
        return 1 + ceil(1 / max(self.weights))

    def groups(self, epoch: int) -> list[list[BlockSlice]]:
        """Return the slices of an epoch in order, in groups of which none is empty."""
        slices = [
            block_slice
            for source, (blocks, weight) in enumerate(zip(self.sources, self.weights, strict=True))
            for block_slice in self._slices(
                source, blocks, Fraction(weight).limit_denominator(), epoch
            )
        ]
        order = shuffled(len(slices), "blocks", self.seed, epoch)
        return _grouped([slices[index] for index in order], self.group_bytes)

    def _slices(
        self, source: int, blocks: Sequence[DataBlock], weight: Fraction, epoch: int
    ) -> list[BlockSlice]:
        begin, end = epoch * weight * len(blocks), (epoch + 1) * weight * len(blocks)
        slices: list[BlockSlice] = []
        a_pass, order = -1, np.empty(0, np.int64)
        for position in range(floor(begin), ceil(end)):
            if position // len(blocks) != a_pass:
                a_pass = position // len(blocks)
                order = shuffled(len(blocks), "pass", self.seed, source, a_pass)
            index = int(order[position % len(blocks)])
            name = (source, a_pass, index)
            if begin <= position and position + 1 <= end:
                slices.append(BlockSlice(blocks[index], name))
            else:
                first, last = max(begin - position, Fraction(0)), min(end - position, Fraction(1))
                slices.append(BlockSlice(blocks[index], name, first, last))
        return slices


def shuffled(count: int, *key: str | int) -> Ints:
    """A permutation of `count` numbers that the key decides, with any version of NumPy."""
    entropy = int.from_bytes(blake2b(repr(key).encode(), digest_size=16).digest(), "little")
    draws = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(draws, kind="stable").astype(np.int64)


def _grouped(slices: Sequence[BlockSlice], group_bytes: int) -> list[list[BlockSlice]]:
    """Cut into groups of about equal sizes, so that the last is not a small one."""
    total = sum(block_slice.size_bytes for block_slice in slices)
    count = max(1, round(total / group_bytes))
    groups: list[list[BlockSlice]] = [[] for _ in range(count)]
    before = 0
    for block_slice in slices:
        groups[min(before * count // total, count - 1)].append(block_slice)
        before += block_slice.size_bytes
    return [group for group in groups if group]
