"""A mesh of ranks: named axes, and which ranks lie on one node."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount


class Axis(Node):
    """One axis of a mesh, by its usual name: pp, dp, cp, ep, tp."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    size: PositiveCount


class Mesh(Node):
    """Ranks in rows: the last axis is the innermost, its ranks follow one another.

    Rank r is on node r // ranks_per_node.

    >>> mesh = Mesh(axes=(Axis(name="pp", size=2), Axis(name="tp", size=4)), ranks_per_node=4)
    >>> mesh.size, mesh.coordinates(6), mesh.stride("pp")
    (8, {'pp': 1, 'tp': 2}, 4)
    """

    axes: Annotated[tuple[Axis, ...], Field(min_length=1)]
    ranks_per_node: PositiveCount

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise PydanticCustomError("axis_twice", "two axes of a mesh have one name")
        return self

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    def length(self, name: str) -> int:
        """Ranks along an axis; KeyError if there is none of that name."""
        return {axis.name: axis.size for axis in self.axes}[name]

    def stride(self, name: str) -> int:
        """Return how far apart, in ranks, two neighbours along an axis are."""
        place = self.names.index(name)
        return prod(axis.size for axis in self.axes[place + 1 :])

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates, one for each axis."""
        return sum(coordinates[axis.name] * self.stride(axis.name) for axis in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank is along every axis."""
        return {a.name: rank // self.stride(a.name) % a.size for a in self.axes}

    def ranks_on_a_node(self, names: Sequence[str]) -> int:
        """Return how many of rank 0's group along these axes are on its node.

        Other groups are alike where axes and nodes divide one another.
        """
        offsets = [0]
        for name in names:
            steps = range(self.length(name))
            offsets = [base + i * self.stride(name) for base in offsets for i in steps]
        return sum(offset < self.ranks_per_node for offset in offsets)
