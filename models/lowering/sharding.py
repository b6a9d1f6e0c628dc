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
from typing import Literal

from twinstream.models.kernel_costs.scratch_sizes import (
    CODE_BLOCK_ELEMENTS,
    SUM_SHARE_ELEMENTS,
    state_bytes,
    sum_shares,
)
from twinstream.models.lowering.chain_builder import ChainBuilder
from twinstream.models.lowering.declarations import Shapes
from twinstream.models.parallel.layout import Layout
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ITEMSIZE_BYTES
from twinstream.models.update_rules import states_of_element
from twinstream.schedule.tensors import Tensor

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


def declare_shards(builder: ChainBuilder, shapes: Shapes, sharding: Sharding) -> None:
    """The tensors of all groups, none of them in parts."""
    recipe, dtype = shapes.recipe, shapes.spec.dtype
    kind, itemsize = recipe.state_of(dtype), ITEMSIZE_BYTES[dtype]
    gradient_itemsize = ITEMSIZE_BYTES[shapes.gradient_dtype]
    state_dtype = {"float32_master": "float32", "8bit": "uint8"}.get(kind, dtype)
    trained = set(shapes.trained)
    for group in shapes.groups:
        if group not in trained and sharding.zero < 3:
            builder.declare_flat(f"param.{group}", shapes.group_bytes(group), "parameter", dtype)
            continue
        shard = sharding.shard_elements(shapes.num_elements(group), recipe)
        whole = sharding.num_shards * shard
        kept = shard if sharding.zero == 3 else whole
        builder.declare_flat(f"param.{group}", kept * itemsize, "parameter", dtype)
        if sharding.zero == 3:
            builder.declare_flat(f"gathered.{group}", whole * itemsize, "parameter", dtype)
        if group not in trained:
            continue
        size = whole * gradient_itemsize
        builder.declare_flat(f"grad.{group}", size, "gradient", shapes.gradient_dtype)
        if sharding.zero > 1:
            size = shard * gradient_itemsize
            builder.declare_flat(f"grad_shard.{group}", size, "gradient", shapes.gradient_dtype)
        size = state_bytes(kind, dtype, shard, states_of_element(recipe.update))
        builder.declare_flat(f"opt.{group}", size, "optimizer_state", state_dtype)
        if recipe.clips:
            _declare_sums(builder, group, sum_shares(shard), sharding.num_shards)


def _declare_sums(builder: ChainBuilder, group: str, count: int, num_shards: int) -> None:
    """Sums of squares of the stretches of a shard, and those of all shards."""
    for name, values in (("shard_squares", count), ("all_squares", num_shards * count)):
        builder.declare(
            Tensor(
                tensor_id=f"{name}.{group}", size_bytes=4 * values, role="scratch",
                dtype="float32", shape=(values,),
            )
        )  # fmt: skip


def sharding_of(layout: Layout) -> Sharding | None:
    """What each replica keeps of a stage; None where that is all."""
    if not layout.zero or layout.dp == 1:
        return None
    return Sharding(layout.zero, ("dp",), layout.dp)
