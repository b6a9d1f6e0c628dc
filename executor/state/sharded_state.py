"""A run's state in shards, one for each replica, and whole again.

The optimizer's state of a group lies part by part, each part's m, v and whatever else is there one
after the other; that of a shard likewise. So it is put together anew, not just cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from twinstream.executor.state.training_state import State
from twinstream.models.decoders.sizes import ITEMSIZE_BYTES
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.scratch_sizes import code_blocks
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.declarations import optimizer_parts
from twinstream.models.lowering.sharding import Sharding, sharding_of
from twinstream.models.providers.trained import layout_of, trained_groups
from twinstream.models.recipes.recipe import Recipe
from twinstream.models.recipes.update_rules import states_of_element

Sizes = Callable[[int], list[int]]  # of so many elements the bytes of each thing that is kept


@dataclass(frozen=True)
class StateSizes:
    """How the state of a model's groups lies."""

    spec: ModelSpec
    recipe: Recipe

    def sizes(self, kind: str) -> Sizes:
        """Of so many elements the bytes of parameters, or of each number of their state."""
        itemsize = ITEMSIZE_BYTES[self.spec.dtype]
        if kind == "param":
            return lambda count: [count * itemsize]
        match self.recipe.state_of(self.spec.dtype):
            case "model":
                states = states_of_element(self.recipe.update)
                return lambda count: states * [count * itemsize]
            case "float32_master":
                return lambda count: 3 * [count * 4]
            case "8bit":
                return lambda count: 2 * [count] + 2 * [4 * code_blocks(count)]

    def parts(self, kind: str, group: str) -> list[int]:
        """Elements of each part of the whole."""
        if kind == "param":
            return [self.num_elements(group)]
        parts = optimizer_parts(self.spec, group, self.recipe)
        return [part.num_elements for part in parts]

    def num_elements(self, group: str) -> int:
        """Of a whole group, with padding."""
        return layout_of(self.spec, self.recipe, group).size_bytes // self.spec.itemsize


@dataclass(frozen=True)
class ShardedState(StateSizes):
    """The cut of a model's state into the shards of ranks, and back.

    Keys and values are as in `initial_state`; a rank's are as its schedule has them.
    """

    layout: Layout

    def shard(self, state: State, index: int) -> State:
        """Return what rank `index` of the replicas keeps; `state` may lack some of the groups."""
        found = {}
        for name, flat in state.items():
            kind, _, group = name.partition(".")
            sharding = self._sharding(group)
            if sharding is None:
                found[name] = flat
                continue
            shards = self._shards(sharding, group)
            cut = recut(flat, self.sizes(kind), self.parts(kind, group), shards)
            keeps = kind == "opt" or sharding.zero == 3
            found[name] = cut.chunk(sharding.num_shards)[index].clone() if keeps else cut
        return found

    def whole(self, shards: Sequence[State]) -> State:
        """The state again, from that of all replicas of a stage in order."""
        found = {}
        for name in shards[0]:
            kind, _, group = name.partition(".")
            sharding = self._sharding(group)
            if sharding is None:
                found[name] = shards[0][name]
                continue
            keeps = kind == "opt" or sharding.zero == 3
            flat = torch.cat([one[name] for one in shards]) if keeps else shards[0][name]
            parts = self.parts(kind, group)
            found[name] = recut(flat, self.sizes(kind), self._shards(sharding, group), parts)
        return found

    def extent(self, group: str, index: int) -> tuple[int, int]:
        """Return the first byte, and the one past the last, of a group's parameters that rank
        `index` of the replicas keeps; the last ranks' may lie past its end, where zeros are."""
        sharding = self._sharding(group)
        if sharding is None or sharding.zero < 3:
            return 0, layout_of(self.spec, self.recipe, group).size_bytes
        count = sharding.shard_elements(self.num_elements(group), self.recipe)
        return index * count * self.spec.itemsize, (index + 1) * count * self.spec.itemsize

    def _sharding(self, group: str) -> Sharding | None:
        """None of what is whole: what is not trained, where parameters are."""
        sharding = sharding_of(self.layout, group)
        if sharding is None or sharding.zero == 3:
            return sharding
        return sharding if group in trained_groups(self.spec, self.recipe) else None

    def _shards(self, sharding: Sharding, group: str) -> list[int]:
        shard = sharding.shard_elements(self.num_elements(group), self.recipe)
        return sharding.num_shards * [shard]


def recut(
    flat: torch.Tensor, sizes: Sizes, have: Sequence[int], want: Sequence[int]
) -> torch.Tensor:
    """From pieces of so many elements each to other pieces; zeros follow what there is."""
    kept: list[list[torch.Tensor]] = [[] for _ in sizes(0)]
    at = 0
    for count in have:
        for pieces, size in zip(kept, sizes(count), strict=True):
            pieces.append(flat[at : at + size])
            at += size
    streams = []
    for pieces, size in zip(kept, sizes(sum(want)), strict=True):
        missing = size - sum(piece.numel() for piece in pieces)
        streams.append(torch.cat([*pieces, flat.new_zeros(max(0, missing))]))
    found, starts = [], [0] * len(streams)
    for count in want:
        for number, size in enumerate(sizes(count)):
            found.append(streams[number][starts[number] : starts[number] + size])
            starts[number] += size
    return torch.cat(found)
