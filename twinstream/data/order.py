"""In which order a run sees its data: a seeded shuffle for each epoch."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from math import ceil, floor

import numpy as np

from twinstream.data.pieces import Ints
from twinstream.data.reading.blocks import Block


@dataclass(frozen=True)
class Position:
    """Which chunk comes next; whole numbers and a text, so that it goes into JSON as it is.

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
class Visit:
    """A block in an epoch, or a share of its documents: those from `first` to `end` of 1.

    The documents are in the order of a shuffle named `shuffle`, the same for all shares.
    """

    block: Block
    shuffle: tuple[int, ...]
    first: Fraction = Fraction(0)
    end: Fraction = Fraction(1)

    @property
    def size_bytes(self) -> int:
        return ceil(self.block.size_bytes * (self.end - self.first))

    def share(self, count: int, seed: int) -> Ints:
        """Indices of its documents, of so many of the block."""
        if self.first == 0 and self.end == 1:
            return np.arange(count)
        order = shuffled(count, "documents", seed, *self.shuffle)
        return order[floor(self.first * count) : floor(self.end * count)]


@dataclass(frozen=True)
class Order:
    """The blocks of each source, its weight, and the seed.

    Each source goes through its blocks in one shuffled pass after another; an epoch takes the next
    `weight` passes of each. The blocks of an epoch, of all sources, are shuffled and cut into
    groups of about `group_bytes`, and within a group all documents are shuffled: so only the
    blocks of one group are tokenised before its first chunk.
    """

    sources: tuple[tuple[Block, ...], ...]
    weights: tuple[float, ...]
    seed: int
    group_bytes: int

    @property
    def most_epochs_of_nothing(self) -> int:
        """After so many a document has come, if there is one."""
        return 1 + ceil(1 / max(self.weights))

    def groups(self, epoch: int) -> list[list[Visit]]:
        """Visits of an epoch in order; no group is empty."""
        visits = [
            visit
            for source, (blocks, weight) in enumerate(zip(self.sources, self.weights, strict=True))
            for visit in self._visits(source, blocks, Fraction(weight).limit_denominator(), epoch)
        ]
        order = shuffled(len(visits), "blocks", self.seed, epoch)
        return _grouped([visits[index] for index in order], self.group_bytes)

    def _visits(
        self, source: int, blocks: Sequence[Block], weight: Fraction, epoch: int
    ) -> list[Visit]:
        begin, end = epoch * weight * len(blocks), (epoch + 1) * weight * len(blocks)
        visits: list[Visit] = []
        a_pass, order = -1, np.empty(0, np.int64)
        for position in range(floor(begin), ceil(end)):
            if position // len(blocks) != a_pass:
                a_pass = position // len(blocks)
                order = shuffled(len(blocks), "pass", self.seed, source, a_pass)
            index = int(order[position % len(blocks)])
            name = (source, a_pass, index)
            if begin <= position and position + 1 <= end:
                visits.append(Visit(blocks[index], name))
            else:
                first, last = max(begin - position, Fraction(0)), min(end - position, Fraction(1))
                visits.append(Visit(blocks[index], name, first, last))
        return visits


def shuffled(count: int, *key: str | int) -> Ints:
    """A permutation of `count` numbers that the key decides, with any version of NumPy."""
    entropy = int.from_bytes(blake2b(repr(key).encode(), digest_size=16).digest(), "little")
    draws = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(draws, kind="stable").astype(np.int64)


def _grouped(visits: Sequence[Visit], group_bytes: int) -> list[list[Visit]]:
    """Cut into groups of about equal sizes, so that the last is not a small one."""
    total = sum(visit.size_bytes for visit in visits)
    count = max(1, round(total / group_bytes))
    groups: list[list[Visit]] = [[] for _ in range(count)]
    before = 0
    for visit in visits:
        groups[min(before * count // total, count - 1)].append(visit)
        before += visit.size_bytes
    return [group for group in groups if group]
