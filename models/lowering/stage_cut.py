"""What a stage of a pipeline has of a model, and what of its tensors each of its replicas keeps."""

from dataclasses import dataclass, field
from functools import cached_property

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import EMBEDDING, layer_of, whole_group
from twinstream.models.layouts.layout import Layout, stages_of
from twinstream.models.layouts.orders import actions_of
from twinstream.models.lowering.declarations import GRADIENT_PIECES, DecoderShapes
from twinstream.models.lowering.sharding import (
    Sharding,
    replica_axes,
    sharding_of,
    shares_experts,
)
from twinstream.models.providers.trained import all_groups, trained_groups
from twinstream.models.recipes.adapter_layout import adapter_group
from twinstream.schedule.ops import Reduction
from twinstream.schedule.workload import Workload


@dataclass(frozen=True)
class StageCut:
    """One stage: `spans` are the layers of its virtual stages, `places` which ones they are.

    `actions` say what it runs, in order: forward, backward, weight or (of an evaluation, the loss
    alone) evaluate, which of its virtual stages, which microbatch. With `tied` embeddings the head
    reads the embedding's: the first and the last stage then both have them, and update them alike.
    """

    layout: Layout
    tied: bool
    spans: tuple[range, ...]
    places: tuple[int, ...]
    actions: tuple[tuple[str, int, int], ...]

    @property
    def num_places(self) -> int:
        """Virtual stages of the pipeline."""
        return self.layout.pp * self.layout.virtual_stages

    def replicas(self, group: str) -> tuple[str, ...]:
        """Axes of the mesh over which gradients of a group are summed."""
        return tuple(replica_axes(self.layout, group))

    @property
    def reduction(self) -> Reduction:
        """How gradients are summed: pairs of parts of sequences, where these are in parts."""
        reduction = self.layout.reduction
        is_ordered = reduction == "rank_order" and self.layout.splits_sequences
        return "pairwise" if is_ordered else reduction

    def sharding(self, group: str) -> Sharding | None:
        """What each of the replicas keeps of a group; None where that is all."""
        return sharding_of(self.layout, group)

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return 0 in self.places

    @property
    def last(self) -> bool:
        """Whether it has the head."""
        return self.num_places - 1 in self.places

    @property
    def shares_embedding(self) -> bool:
        """Whether another stage has the same embedding."""
        return self.tied and self.first != self.last

    @cached_property
    def _last(self) -> dict[int, int]:
        """By virtual stage the microbatch that is the last to add to gradients of weights."""
        phase = "weight" if any(one == "weight" for one, _, _ in self.actions) else "backward"
        return {chunk: j for one, chunk, j in self.actions if one == phase}

    def completes(self, chunk: int, j: int) -> bool:
        """Return whether a microbatch completes the gradients of a virtual stage."""
        return self._last[chunk] == j

    def gathers(self, group: str) -> bool:
        """Whether a group's parameters are gathered before each use."""
        return self.layout.zero == 3 and self.sharding(group) is not None

    def has(self, group: str) -> bool:
        """Whether a group of parameters is the stage's."""
        layer = layer_of(group)
        if layer is None:
            is_head = whole_group(group) == "head"
            return self.last if is_head else self.first or (self.tied and self.last)
        return any(layer in span for span in self.spans)

    def squares(self, group: str) -> bool:
        """Whether the stage sums up the squares of a group's gradient."""
        return self.has(group) and (whole_group(group) != "embedding" or self.first)


def stage_cut(layout: Layout, spec: ModelSpec, workload: Workload, stage: int) -> StageCut:
    """Return what a stage of a layout has, and runs in a step of one replica."""
    spans = stages_of(layout, spec.num_layers)
    places = tuple(chunk * layout.pp + stage for chunk in range(layout.virtual_stages))
    cut = tuple(spans[place] for place in places)
    return StageCut(layout, spec.tied_embeddings, cut, places, _actions(layout, workload, stage))


def _actions(layout: Layout, workload: Workload, stage: int) -> tuple[tuple[str, int, int], ...]:
    if not workload.forward_only:
        actions = actions_of(layout, stage, workload.rounds_per_step)
        return tuple((one.phase, one.chunk, one.microbatch) for one in actions)
    chunks = range(layout.virtual_stages)
    ends = [("evaluate", chunks[-1], 0)] if stage == layout.pp - 1 else []
    return (*(("forward", chunk, 0) for chunk in chunks), *ends)


@dataclass(frozen=True)
class StageShapes(DecoderShapes):
    """The groups of a stage alone."""

    cut: StageCut = field(kw_only=True)

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Of all groups those that the stage has."""
        return tuple(filter(self.cut.has, all_groups(self.spec, self.recipe)))

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Of these, what has a gradient."""
        return tuple(filter(self.cut.has, trained_groups(self.spec, self.recipe)))

    @property
    def norm_parts(self) -> tuple[tuple[str, int], ...]:
        """One for each group that it sums up, and one for each run of groups of other stages."""
        found: list[tuple[str, int]] = []
        own = True
        trained = trained_groups(self.spec, self.recipe)
        for group in dict.fromkeys(map(self.norm_part, trained)):
            before, own = own, self.cut.squares(group)
            if own:
                found.append((group, 1))
            elif found and not before:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((f"others.{len(found)}", 1))
        return tuple(found)

    @property
    def num_chunks(self) -> int:
        """Chunks of all microbatches of a rank."""
        return self.workload.chunks_per_round

    def sums(self, tensor: str) -> list[str]:
        """All tensors in which what chunks add to one is added up at first."""
        return [tensor]

    def ends(self, group: str) -> tuple[str, ...]:
        is_shared = self.cut.shares_embedding and whole_group(group) == EMBEDDING
        return (f"grad.{group}", f"head_grad.{group}") if is_shared else ()

    def sharding(self, group: str) -> Sharding | None:
        """What each replica keeps of a group."""
        return self.cut.sharding(group)

    def gradient_pieces(self, group: str) -> int:
        """How many gradients a rank makes of its experts: one for each replica whose rows come to
        it, where they are summed in the order of replicas."""
        layout = self.cut.layout
        apart = layout.reduction == "rank_order" and shares_experts(layout, group)
        return layout.ep if apart else 1

    def contributed_to(self, group: str) -> str:
        """Where backward adds up a group's gradient: there, in pieces of it, or the head's."""
        if (ends := self.ends(group)) and not self.cut.first:
            return ends[1]
        return f"{GRADIENT_PIECES if self.gradient_pieces(group) > 1 else 'grad'}.{group}"

    def sums_of_pieces(self, group: str) -> int:
        """Ranks that have the same experts, of which each sums a share of their gradient."""
        layout = self.cut.layout
        is_split = self.gradient_pieces(group) > 1 and not layout.splits_sequences
        return layout.dp // layout.ep if is_split else 1

    def holders_of_squares(self, group: str) -> int:
        """Ranks of which each has the squares of some stretches of a group; 1 where it has all."""
        if shares_experts(self.cut.layout, group):
            return self.cut.layout.ep
        return super().holders_of_squares(group)

    @property
    def of_embedding(self) -> tuple[str, ...]:
        """The groups whose parameters the embedding's tasks read."""
        return ("embedding",)

    @property
    def of_head(self) -> tuple[str, ...]:
        """The groups whose parameters the head's tasks read."""
        return ("head", "embedding") if self.cut.tied else ("head",)

    def of_layer(self, layer: int) -> tuple[str, ...]:
        """The groups whose parameters a layer's tasks read."""
        adapters = self.spec.adapter_parts(adapter_group(layer))
        return (*self.spec.layer_groups(layer), *(g for g in adapters if g in self.groups))

    def parameters(self, group: str) -> str:
        """Gathered, where only a shard is kept."""
        return f"gathered.{group}" if self.cut.gathers(group) else f"param.{group}"
