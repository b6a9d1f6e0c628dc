"""ZeRO: which part of a group's flat tensors each replica keeps, and how these are declared.

A group's elements are cut into equal shards, one for each replica in rank order; the last ones are
padded with zeros. The optimizer's state is a shard's alone. With ZeRO 1 parameters and gradients
are whole; a rank's shard of the gradient is summed where it lies. With ZeRO 2 the summed gradient
is a shard by itself, so that the whole one is free once it has been reduced. With ZeRO 3 the
parameters are a shard, too, and gathered whole before each use; frozen ones likewise.

Whole gradients are added up over microbatches with ZeRO 2 and 3 as well: replicas' sums added up
have other bits than sums of what replicas have of each microbatch.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from twinstream.models.kernel_costs.scratch_sizes import (
    CODE_BLOCK_ELEMENTS,
    SUM_SHARE_ELEMENTS,
)
from twinstream.models.layout import is_of_experts
from twinstream.models.layouts.layout import Layout
from twinstream.models.recipes.recipe import Recipe

ZeroStage = Literal[1, 2, 3]


@dataclass(frozen=True)
class Sharding:
    """Over so many replicas along these axes."""

    zero: ZeroStage
    axes: tuple[str, ...]
    num_shards: int

    def shard_elements(self, num_elements: int, recipe: Recipe) -> int:
        """Of each shard of a group of so many.

        A shard begins at a whole block of 8-bit codes; where gradients are clipped, at a whole
        stretch of those whose squares are summed each by itself.

        >>> Sharding(1, ("dp",), 2).shard_elements(1000, Recipe())
        512
        """
        unit = SUM_SHARE_ELEMENTS if recipe.clips else CODE_BLOCK_ELEMENTS
        return -(-num_elements // (unit * self.num_shards)) * unit

    @property
    def gradient_kind(self) -> str:
        """Which tensors hold summed gradients."""
        return "grad" if self.zero == 1 else "grad_shard"

    @property
    def whole_operands(self) -> str:
        """Which operands of an update are whole groups, of which it takes its shard."""
        return {1: "parameters gradients", 2: "parameters", 3: ""}[self.zero]


def shares_experts(layout: Layout, group: str) -> bool:
    """Whether each of some replicas has other experts of a group."""
    return layout.ep > 1 and is_of_experts(group)


def replica_axes(layout: Layout, group: str) -> dict[str, int]:
    """Axes of the mesh, with their sizes, over which replicas hold the same of a group."""
    sizes = {"dp": layout.dp // layout.ep, "ep": layout.ep, "cp": layout.cp}
    shared = ("ep",) if shares_experts(layout, group) else ()
    return {axis: size for axis, size in sizes.items() if size > 1 and axis not in shared}


def sharding_of(layout: Layout, group: str) -> Sharding | None:
    """What each replica keeps of a group; None where that is all, as of a rank's experts."""
    axes = replica_axes(layout, group)
    if not layout.zero or not axes or shares_experts(layout, group):
        return None
    return Sharding(layout.zero, tuple(axes), prod(axes.values()))
