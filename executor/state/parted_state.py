"""A run's state as ranks of a layout have it, and whole again: parts of tensors, then shards.

Names and values of the whole are as in `initial_state`. Of each group its parameters, and every
number of its elements' optimizer state, lie one behind the other; each of these is cut alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from twinstream.executor.state.sharded_state import ShardedState, StateSizes, recut
from twinstream.executor.state.training_state import State
from twinstream.models.decoders.parted import PartedSpec
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import PART, FlatLayout, whole_group
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.sharding import sharding_of
from twinstream.models.providers.trained import layout_of
from twinstream.models.recipes.recipe import Recipe

Place = tuple[int, int, int]  # which of the replicas, of the ranks of cp, of those of tp


def place_of(coordinates: Mapping[str, int]) -> Place:
    """Of a rank, by what decides its state beside its stage."""
    return coordinates.get("dp", 0), coordinates.get("cp", 0), coordinates.get("tp", 0)


@dataclass(frozen=True)
class RankStates:
    """The cut of a model's state over the replicas and the tensor parallel ranks of a layout.

    Ranks of cp keep what replicas do: each has its shards, or all.
    """

    spec: ModelSpec
    recipe: Recipe
    layout: Layout

    @classmethod
    def of(cls, spec: ModelSpec, recipe: Recipe, layout: Layout) -> "RankStates | None":
        """None where each rank of a stage has all of what the stage has."""
        is_whole = not layout.in_parts and sharding_of(layout) is None
        return None if is_whole else cls(spec, recipe, layout)

    def names(self, name: str) -> list[str]:
        """Return what a rank has of a tensor of the whole."""
        if not self.layout.in_parts:
            return [name]
        kind, _, group = name.partition(".")
        return [f"{kind}.{own}" for own in self._groups(group)]

    def of_rank(self, state: State, place: Place) -> State:
        """Return what a rank keeps; `state` may lack some of the groups."""
        replica, of_sequence, rank = place
        found = state
        if self.layout.in_parts:
            found = {}
            for name, flat in state.items():
                found |= self._in_parts(name, flat, rank)
        sharded = self._sharded
        return (
            found
            if sharded is None
            else sharded.shard(found, replica * self.layout.cp + of_sequence)
        )

    def whole(self, states: Mapping[Place, State]) -> State:
        """The state again, from that of all replicas and ranks of tp of a stage."""
        joined: dict[int, State] = {}
        sharded = self._sharded
        for rank in sorted({place[2] for place in states}):
            replicas = [states[place] for place in sorted(states) if place[2] == rank]
            joined[rank] = replicas[0] if sharded is None else sharded.whole(replicas)
        if not self.layout.in_parts:
            return joined[0]
        names = dict.fromkeys(whole_group(name) for name in joined[0])
        return {name: self._joined(name, joined) for name in names}

    @cached_property
    def parted(self) -> PartedSpec:
        """The model whose groups a rank of tp has."""
        return PartedSpec.of(self.spec, self.layout.tp, self.layout.num_parts)

    @property
    def _sharded(self) -> ShardedState | None:
        sharding = sharding_of(self.layout)
        if sharding is None:
            return None
        spec = self.parted if self.layout.in_parts else self.spec
        return ShardedState(spec, self.recipe, sharding)

    def _in_parts(self, name: str, flat: torch.Tensor, rank: int) -> State:
        """What a rank of tp has of a tensor: what all have, and its own parts."""
        kind, _, group = name.partition(".")
        parted, streams = self.parted, self._streams(name, flat)
        found = {}
        for own in self._groups(group):
            number = own.partition(PART)[2]
            part = rank * parted.parts_each + int(number) if number else None
            layout = parted.group_layout(own)
            cut = [self._cut(stream, group, layout, part) for stream in streams]
            found[f"{kind}.{own}"] = self._laid(kind, own, cut, parted)
        return found

    def _joined(self, name: str, states: Mapping[int, State]) -> torch.Tensor:
        kind, _, group = name.partition(".")
        parted, whole = self.parted, layout_of(self.spec, self.recipe, group)
        streams: list[torch.Tensor] = []
        for rank, state in states.items():
            for own in self._groups(group):
                number = own.partition(PART)[2]
                part = rank * parted.parts_each + int(number) if number else None
                found = self._streams(f"{kind}.{own}", state[f"{kind}.{own}"], parted)
                streams = streams or [_empty(one, whole, self.spec.itemsize) for one in found]
                for stream, into in zip(found, streams, strict=True):
                    self._put(stream, into, group, parted.group_layout(own), part)
        return self._laid(kind, group, streams, self.spec)

    def _groups(self, group: str) -> list[str]:
        return [own for own in self.parted.parameter_groups if whole_group(own) == group]

    def _cut(
        self, stream: torch.Tensor, group: str, layout: FlatLayout, part: int | None
    ) -> torch.Tensor:
        """Of a number of each element of a whole group, those of a rank's group."""
        whole = layout_of(self.spec, self.recipe, group)
        found = _empty(stream, layout, self.spec.itemsize)
        for inner in layout.tensors:
            source = _view(stream, whole, inner.name, self.spec.itemsize)
            _view(found, layout, inner.name, self.spec.itemsize).copy_(
                self._of_part(source, inner.name, part)
            )
        return found

    def _put(
        self, stream: torch.Tensor, into: torch.Tensor, group: str, layout: FlatLayout,
        part: int | None,
    ) -> None:  # fmt: skip
        whole = layout_of(self.spec, self.recipe, group)
        for inner in layout.tensors:
            target = _view(into, whole, inner.name, self.spec.itemsize)
            source = _view(stream, layout, inner.name, self.spec.itemsize)
            if part is None:
                target.copy_(source)
                continue
            axis, sections = self.parted.cut(inner.name)
            at = 0
            for piece, size in zip(
                torch.split(target, list(sections), axis), sections, strict=True
            ):
                own = size // self.parted.parts
                piece.narrow(axis, part * own, own).copy_(source.narrow(axis, at, own))
                at += own

    def _of_part(self, whole: torch.Tensor, name: str, part: int | None) -> torch.Tensor:
        if part is None:
            return whole
        axis, sections = self.parted.cut(name)
        pieces = torch.split(whole, list(sections), axis)
        return torch.cat([one.chunk(self.parted.parts, axis)[part] for one in pieces], axis)

    def _streams(
        self, name: str, flat: torch.Tensor, spec: ModelSpec | None = None
    ) -> list[torch.Tensor]:
        """Parameters, or each number of the optimizer's state, of all elements in order."""
        spec = spec or self.spec
        kind, _, group = name.partition(".")
        lies = StateSizes(spec, self.recipe)
        sizes, total = lies.sizes(kind), lies.num_elements(group)
        joined = recut(flat, sizes, lies.parts(kind, group), [total])
        wide = [size // total for size in sizes(total)]
        pieces = torch.split(joined, sizes(total))
        dtypes = {2: torch.int16, 4: torch.int32}  # bits alone are moved
        return [piece.view(dtypes[item]) for piece, item in zip(pieces, wide, strict=True)]

    def _laid(
        self, kind: str, group: str, streams: list[torch.Tensor], spec: ModelSpec
    ) -> torch.Tensor:
        lies = StateSizes(spec, self.recipe)
        flat = torch.cat([stream.view(torch.uint8) for stream in streams])
        total, parts = lies.num_elements(group), lies.parts(kind, group)
        return recut(flat, lies.sizes(kind), [total], parts)


def _empty(like: torch.Tensor, layout: FlatLayout, itemsize: int) -> torch.Tensor:
    return like.new_zeros(layout.size_bytes // itemsize)


def _view(flat: torch.Tensor, layout: FlatLayout, name: str, itemsize: int) -> torch.Tensor:
    inner = layout.tensor(name)
    start = inner.offset_bytes // itemsize
    return flat[start : start + inner.size_bytes // itemsize].view(inner.shape)
