"""The ranks that take part in a collective, and where they are."""

from typing import Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount


class RankGroupError(TwinstreamError):
    """A group of ranks that the cluster cannot hold."""


class RankGroup(Node):
    """`ranks` ranks, one a GPU, `ranks_per_node` of them on each node.

    `sharing`: how many such groups run the same collective at the same time through the same NICs
    of a node, this one included: the replicas of a tensor-parallel node are 8 data-parallel groups
    of one rank a node, `RankGroup(ranks=64, ranks_per_node=1, sharing=8)`.
    """

    ranks: PositiveCount
    ranks_per_node: PositiveCount
    sharing: PositiveCount = 1

    @model_validator(mode="after")
    def _fills_its_nodes(self) -> Self:
        if self.ranks % self.ranks_per_node:
            raise PydanticCustomError(
                "group_nodes", "ranks must be a multiple of ranks_per_node: equal nodes"
            )
        return self

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    @property
    def within_a_node(self) -> bool:
        return self.nodes == 1


def on_one_node(ranks: int) -> RankGroup:
    """Ranks that share a node."""
    return RankGroup(ranks=ranks, ranks_per_node=ranks)
