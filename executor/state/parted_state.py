"""A run's state as ranks of a layout have it, and whole again: parts of tensors or some experts,
then shards.

Names and values of the whole are as in `initial_state`. Of each group its parameters, and every
number of its elements' optimizer state, lie one behind the other; each of these is cut alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from twinstream.executor.state.sharded_state import ShardedState, StateSizes, recut
from twinstream.executor.state.training_state import State
from twinstream.models.decoders.parted import PartedSpec, SharedSpec
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import FlatLayout, whole_group
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.sharding import shares_experts
from twinstream.models.providers.trained import all_groups, layout_of
from twinstream.models.recipes.quantized_base import SCALES
from twinstream.models.recipes.recipe import Recipe

Place = tuple[int, int, int]  # which of the replicas, of the ranks of cp, of those of tp
_Rank = tuple[int, int]  # which of the ranks of tp, and of those that share experts


def place_of(coordinates: Mapping[str, int], ep: int = 1) -> Place:
    """Of a rank, by what decides its state beside its stage, where `ep` replicas share experts."""
    replica = coordinates.get("dp", 0) * ep + coordinates.get("ep", 0)
    return replica, coordinates.get("cp", 0), coordinates.get("tp", 0)


@dataclass(frozen=True)
class RankStates:
    """The cut of a model's state over the replicas and the tensor parallel ranks of a layout.

    `split` is the model as one of them has it; None where each has all of a stage. Ranks of cp keep
    what replicas do: each has its shards, or all.
    """

    spec: ModelSpec
    recipe: Recipe
    layout: Layout

    @classmethod
    def of(cls, spec: ModelSpec, recipe: Recipe, layout: Layout) -> "RankStates | None":
        """None where each rank of a stage has all of what the stage has."""
        found = cls(spec, recipe, layout)
        is_sharded = layout.zero and layout.dp * layout.cp > 1
        return found if found.split is not None or is_sharded else None

    def names(self, name: str) -> list[str]:
        """Return what a rank has of a tensor of the whole."""
        kind, _, group = name.partition(".")
        return [f"{kind}.{own}" for own in self._groups(group)]

    def of_rank(self, state: State, place: Place) -> State:
        """Return what a rank keeps; `state` may lack some of the groups."""
        found, rank = state, self._rank(place)
        if self.split is not None:
            found = {}
            for name, flat in state.items():
                found |= self._in_parts(name, flat, rank)
        return self._sharded.shard(found, place[0] * self.layout.cp + place[1])

    def extent(self, group: str, place: Place) -> tuple[int, int] | None:
        """Return the first byte, and the one past the last, of a group's parameters that a rank
        keeps; None of a group that the model is split in."""
        if not self._is_whole(group):
            return None
        return self._sharded.extent(group, place[0] * self.layout.cp + place[1])

    def whole(self, states: Mapping[Place, State]) -> State:
        """The state again, from that of all replicas and ranks of tp of a stage."""
        joined: dict[_Rank, State] = {}
        for rank in sorted({place[2] for place in states}):
            replicas = [place for place in sorted(states) if place[2] == rank]
            whole = self._sharded.whole([states[place] for place in replicas])
            for place in replicas if self.layout.ep > 1 else replicas[:1]:
                own = {name: states[place][name] for name in whole if self._is_shared(name)}
                joined[self._rank(place)] = whole | own
        first = next(iter(joined.values()))
        if self.split is None:
            return first
        names = dict.fromkeys(map(whole_group, first))
        return {name: self._joined(name, joined) for name in names}

    @cached_property
    def split(self) -> SharedSpec | None:
        """The model whose groups a rank of tp, or one that shares experts, has."""
        layout = self.layout
        if layout.in_parts:
            return PartedSpec.of(self.spec, layout.ep, tp=layout.tp, parts=layout.num_parts)
        return SharedSpec.of(self.spec, layout.ep) if layout.ep > 1 else None

    @property
    def _sharded(self) -> ShardedState:
        return ShardedState(self.split or self.spec, self.recipe, self.layout)

    def _rank(self, place: Place) -> _Rank:
        return place[2], place[0] % self.layout.ep

    def _is_shared(self, name: str) -> bool:
        return shares_experts(self.layout, name)

    def _in_parts(self, name: str, flat: torch.Tensor, rank: _Rank) -> State:
        """What a rank has of a tensor: what all have, and its own parts."""
        kind, _, group = name.partition(".")
        parted = self._split
        if self._is_whole(group):
            return {name: flat}
        streams, found = self._streams(name, flat), {}
        for own in self._groups(group):
            layout = layout_of(parted, self.recipe, own)
            cut = [self._cut(stream, own, layout, rank) for stream in streams]
            found[f"{kind}.{own}"] = self._laid(kind, own, cut, parted)
        return found

    def _joined(self, name: str, states: Mapping[_Rank, State]) -> torch.Tensor:
        kind, _, group = name.partition(".")
        parted = self._split
        if self._is_whole(group):
            return next(iter(states.values()))[name]
        whole = layout_of(self.spec, self.recipe, group)
        streams: list[torch.Tensor] = []
        for rank, state in states.items():
            for own in self._groups(group):
                layout = layout_of(parted, self.recipe, own)
                found = self._streams(f"{kind}.{own}", state[f"{kind}.{own}"], parted)
                streams = streams or [_empty(one, whole, self.spec.itemsize) for one in found]
                for stream, into in zip(found, streams, strict=True):
                    self._put(stream, into, own, layout, rank)
        return self._laid(kind, group, streams, self.spec)

    def _is_whole(self, group: str) -> bool:
        """Whether all ranks that the model is split over have all of a group."""
        if self.split is None:
            return True
        is_one = self._groups(group) == [group] and self.split.part_of(group, 0) is None
        return is_one and not shares_experts(self.layout, group)

    def _groups(self, group: str) -> list[str]:
        """Those of a rank that are of a whole group."""
        if self.split is None:
            return [group]
        groups = all_groups(self.split, self.recipe)
        return [own for own in groups if whole_group(own) == group]

    @property
    def _split(self) -> SharedSpec:
        assert self.split is not None, "each rank has all of a stage"
        return self.split

    def _cut(self, stream: torch.Tensor, own: str, layout: FlatLayout, rank: _Rank) -> torch.Tensor:
        """Of a number of each element of a whole group, those of a rank's group."""
        whole = layout_of(self.spec, self.recipe, whole_group(own))
        found = _empty(stream, layout, self.spec.itemsize)
        for inner in layout.tensors:
            source = _view(stream, whole, inner.name, self.spec.itemsize)
            axis, pieces = self._pieces(source, inner.name, own, rank)
            target = _view(found, layout, inner.name, self.spec.itemsize)
            target.copy_(torch.cat(pieces, axis))
        return found

    def _put(
        self, stream: torch.Tensor, into: torch.Tensor, own: str, layout: FlatLayout, rank: _Rank
    ) -> None:
        whole = layout_of(self.spec, self.recipe, whole_group(own))
        for inner in layout.tensors:
            target = _view(into, whole, inner.name, self.spec.itemsize)
            source = _view(stream, layout, inner.name, self.spec.itemsize)
            axis, pieces = self._pieces(target, inner.name, own, rank)
            sizes = [piece.shape[axis] for piece in pieces]
            for piece, values in zip(pieces, torch.split(source, sizes, axis), strict=True):
                piece.copy_(values)

    def _pieces(
        self, whole: torch.Tensor, name: str, own: str, rank: _Rank
    ) -> tuple[int, list[torch.Tensor]]:
        """What a rank has of a weight, or of its codes or scales, side by side along an axis."""
        split, (tp_rank, ep_rank) = self._split, rank
        if shares_experts(self.layout, own):
            whole = whole.chunk(self.layout.ep)[ep_rank]
        part = split.part_of(own, tp_rank)
        if not isinstance(split, PartedSpec) or part is None:
            return 0, [whole]
        axis, shares = split.cut(name.removesuffix(SCALES))
        unit = whole.shape[axis] // sum(shares)
        sections = torch.split(whole, [unit * share for share in shares], axis)
        return axis, [one.chunk(split.parts, axis)[part] for one in sections]

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
    """A weight in its shape; codes of it, or its scales, as bytes in place of its last axis."""
    inner = layout.tensor(name)
    if name.endswith(SCALES) or inner.size_bytes < prod(inner.shape) * itemsize:
        rows = layout.tensor(name.removesuffix(SCALES)).shape[:-1]
        coded = flat.view(torch.uint8)[inner.offset_bytes : inner.offset_bytes + inner.size_bytes]
        return coded.view(*rows, -1)
    start = inner.offset_bytes // itemsize
    return flat[start : start + inner.size_bytes // itemsize].view(inner.shape)
