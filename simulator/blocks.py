"""Programs of a pipeline's stages in blocks: what repeats from one microbatch to the next is one.

Waits of a block's ops are for ops so many blocks on from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from twinstream.simulator.engine import OpPrice
from twinstream.simulator.flows import SharedFlow

COMPUTE = 0  # the number of the stream that computes


class IrregularError(Exception):
    """A step that has to be simulated op by op."""


class BlockOp(NamedTuple):
    """An op; without a price it meets ops of other stages.

    Fields:
        waits: for ops so many blocks on (not positive), of a stream, the n-th of the block there.
        delay_ns: what waiting takes.
        cause: what compute waits for while it runs (`schedule.analysis.idle`).
    """

    price: OpPrice | None
    waits: tuple[tuple[int, int, int], ...]
    delay_ns: int
    cause: str


@dataclass(frozen=True, eq=False)
class Block:
    """Ops that follow one another, by stream; `ends_pass`: the last of a step."""

    streams: tuple[tuple[BlockOp, ...], ...]
    ends_pass: bool

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """The number of the first op of every stream among all of the block; then how many."""
        found = [0]
        for ops in self.streams:
            found.append(found[-1] + len(ops))
        return tuple(found)


@dataclass(frozen=True)
class StageProgram:
    """All passes of a stage; `meets` has the numbers of the exchanges of streams that have any."""

    blocks: Sequence[Block]
    meets: Mapping[int, int]


@dataclass(frozen=True)
class StageMeeting:
    """Exchanges of the same sides, one after the other: each a stage and its stream.

    The price draws on the resources of one side after the other, as many as each has.
    """

    sides: tuple[tuple[int, int], ...]
    price: OpPrice


@dataclass
class Interned:
    """Prices and blocks, each once: so those of several layouts are known again.

    Args:
        capacity: of a stage's resources.
    """

    capacity: tuple[float, ...]
    prices: list[OpPrice] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    _price_at: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _number_of: dict[int, int] = field(default_factory=dict)
    _block_of: dict[Any, Block] = field(default_factory=dict)

    def price(self, fixed_ns: int, alone_ns: float, amounts: Mapping[int, float]) -> OpPrice:
        """The price that says so."""
        key = fixed_ns, alone_ns, tuple(sorted(amounts.items()))
        if key not in self._price_at:
            flow = SharedFlow(alone_ns, amounts) if alone_ns else None
            price = OpPrice(fixed_ns, flow)
            self._price_at[key] = self._number_of[id(price)] = len(self.prices)
            self.prices.append(price)
        return self.prices[self._price_at[key]]

    def block(self, streams: tuple[tuple[BlockOp, ...], ...], *, ends_pass: bool) -> Block:
        """The block of these ops."""
        key = streams, ends_pass
        if key not in self._block_of:
            self._block_of[key] = block = Block(streams, ends_pass)
            self._number_of[id(block)] = len(self.blocks)
            self.blocks.append(block)
        return self._block_of[key]

    def number(self, one: OpPrice | Block) -> int:
        """Its place among prices, or among blocks."""
        return self._number_of[id(one)]
