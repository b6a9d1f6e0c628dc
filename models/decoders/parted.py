"""A decoder as a rank has it that shares it with others: what all have, and parts of the rest.

For tensor parallelism a model is cut into so many parts: of heads, of the width of the feed-forward
network and of every expert, and of rows of the vocabulary. Each rank has as many of them, one
behind the other; one rank may have all. What a part has of a group is a group of its own, `3.tp0`
of layer 3, which each rank numbers from 0. Norms and the router, which every part reads, are what
is left in group 3.

Where ranks share routed experts, each has some of a layer's, in their order, and all of the rest;
of a model in parts its parts of these.
"""

from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple, Self

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import (
    EMBEDDING,
    EXPERTS,
    HEAD,
    PART,
    AdapterHalf,
    FlatLayout,
    experts_layout,
    is_of_experts,
    packed_layout,
    part_layout,
    shared_layout,
    whole_group,
)
from twinstream.schedule.workload import ModelRef

_ENDS = (EMBEDDING, HEAD)


class Cut(NamedTuple):
    """How a weight is cut into parts: along an axis, each of its sections, that are so large
    beside one another, into as many."""

    axis: Literal[0, 1, 2]
    sections: tuple[int, ...] = (1,)


class SharedSpec(ModelSpec):
    """A model whose routed experts `ep` ranks share, each as many."""

    ep: int = 1

    @classmethod
    def of(cls, spec: ModelSpec, ep: int = 1) -> Self:
        """The model on ranks that share its experts, whose number is a multiple of theirs."""
        return cls(**dict(spec), ep=ep)

    @cached_property
    def whole(self) -> ModelSpec:
        """The model of all parts, with all experts."""
        return ModelSpec(**{name: getattr(self, name) for name in ModelSpec.model_fields})

    def part_of(self, group: str, rank: int) -> int | None:
        """The number among all parts of a group of a rank of tp; None of what all ranks have."""
        return None

    @property
    def part(self) -> ModelSpec:
        """The sizes of one part."""
        return self.whole

    def group_layout(self, group: str) -> FlatLayout:
        """How the parameters of a group of a rank lie."""
        sizes = self.share if is_of_experts(group) else self.part
        return sizes.group_layout(whole_group(group))

    @cached_property
    def share(self) -> ModelSpec:
        """The sizes of one part, with as many experts as a rank has."""
        if (experts := self.part.experts) is None:
            return self.part
        own = experts.model_copy(update={"count": experts.count // self.ep})
        return self.part.model_copy(update={"experts": own})

    def adapter_sizes(self, layer: int) -> ModelSpec:
        """Those of a rank."""
        return self.share.layer(layer)

    def adapter_parts(self, group: str) -> tuple[str, ...]:
        """Adapters that all ranks have of a layer, then those of a rank's experts."""
        return (group, f"{group}{EXPERTS}")

    def adapter_half(self, group: str) -> AdapterHalf | None:
        """Which of a layer's adapters are in a group."""
        return "experts" if is_of_experts(group) else "dense"

    def updated_apart(self, group: str) -> bool:
        """Whether each matrix of a group is updated by itself: a rank's lie apart in the whole."""
        return self.ep > 1 and is_of_experts(group)

    def ref(self) -> ModelRef:
        """What documents say of the whole model."""
        return self.whole.ref()


class PartedSpec(SharedSpec):
    """A model whose groups are those of one of `tp` ranks, which have `parts` together."""

    tp: int = 1
    parts: int = 1

    @classmethod
    def of(cls, spec: ModelSpec, ep: int = 1, *, tp: int = 1, parts: int = 1) -> Self:
        """The model in parts; what cannot be cut is for `parts_refusal` to say."""
        return cls(**dict(spec), tp=tp, parts=parts, ep=ep)

    @property
    def parts_each(self) -> int:
        """Parts that a rank has."""
        return self.parts // self.tp

    @cached_property
    def part(self) -> ModelSpec:
        """The sizes of one part."""
        split = ("num_heads", "num_kv_heads", "d_ff", "vocab_size")
        sizes = {name: getattr(self, name) // self.parts for name in split}
        if self.experts is not None:
            widths = {n: getattr(self.experts, n) // self.parts for n in ("d_ff", "shared_d_ff")}
            sizes["experts"] = self.experts.model_copy(update=widths)
        return self.whole.model_copy(update=sizes)

    @property
    def parameter_groups(self) -> tuple[str, ...]:
        """Those of a rank, in the order of the forward pass.

        >>> from twinstream.models.presets import load_preset
        >>> PartedSpec.of(load_preset("tiny"), tp=2, parts=2).parameter_groups[:4]
        ('embedding.tp0', '0', '0.tp0', '1')
        """
        layers = (group for layer in range(self.num_layers) for group in self.layer_groups(layer))
        head = () if self.tied_embeddings else self.parts_of(HEAD)
        return (*self.parts_of(EMBEDDING), *layers, HEAD, *head)

    def parts_of(self, group: str) -> tuple[str, ...]:
        """Of a group of the whole model what a rank has in parts."""
        return tuple(f"{group}{PART}{number}" for number in range(self.parts_each))

    def adapter_sizes(self, layer: int) -> ModelSpec:
        """Those of a part."""
        return self.part.layer(layer)

    def adapter_parts(self, group: str) -> tuple[str, ...]:
        """What all parts read of a layer's adapters, then parts."""
        return (group, *self.parts_of(group))

    def adapter_half(self, group: str) -> AdapterHalf | None:
        """Which of a layer's adapters are in a group."""
        return "own" if PART in group else "shared"

    def layer_groups(self, layer: int) -> tuple[str, ...]:
        """What all parts read, then parts; of experts likewise."""
        block, *others = self.whole.layer_groups(layer)
        groups = (self.parts_of(one) if one.endswith(EXPERTS) else (one,) for one in others)
        return (block, *self.parts_of(block), *chain.from_iterable(groups))

    def group_layout(self, group: str) -> FlatLayout:
        """How the parameters of a group of a rank lie."""
        whole, part = whole_group(group), self.part
        if group == HEAD:
            return packed_layout([("final_norm", (self.d_model,))], self.itemsize)
        if whole in _ENDS:
            return packed_layout([(whole, (part.vocab_size, self.d_model))], self.itemsize)
        if not whole.isdigit():
            return super().group_layout(group)
        built = part.layer(int(whole))
        return shared_layout(built) if group == whole else part_layout(built)

    def part_of(self, group: str, rank: int) -> int | None:
        """The number among all parts of a group of a rank of tp; None of what all ranks have."""
        number = group.partition(PART)[2]
        return rank * self.parts_each + int(number) if number else None

    def cut(self, name: str) -> Cut:
        """How a weight that is in parts is cut."""
        match name:
            case "qkv_proj" | "qkv_bias":
                return Cut(0, (self.d_q, self.d_kv, self.d_kv))
            case "gate_up_proj":
                return Cut(0, (1, 1))
            case "experts_gate_up" | "experts_gate_up_b":
                return Cut(1, (1, 1))
            case "o_proj" | "o_a" | "down_proj" | "down_a":
                return Cut(1)
            case "experts_down" | "experts_down_a":
                return Cut(2)
            case _:
                return Cut(0)

    @property
    def layer_bytes(self) -> int:
        """Of the largest flat tensor of parameters of a layer."""
        kinds = [part_layout(kind).size_bytes for kind, _ in self.part.layer_kinds]
        return max(*kinds, experts_layout(self.part).size_bytes if self.experts else 0)


def parts_refusal(spec: ModelSpec, parts: int) -> list[str]:
    """Why kernels here do not compute a model in so many parts; none if they do.

    >>> from twinstream.models.presets import load_preset
    >>> parts_refusal(load_preset("tiny"), 4)
    ['2 key and value heads in 4 parts (whole ones in each)']
    """
    found = []
    if spec.qk_norm_rows and parts > 1:
        found.append("norms over all heads of Q and K in parts (norms of each head only)")
    for count, what in (
        (spec.num_kv_heads, "key and value heads"), (spec.num_heads, "heads"),
        *((width, f"columns of {name}") for name, width in spec.ffn_widths.items()),
        (spec.vocab_size, "rows of the vocabulary"),
    ):  # fmt: skip
        if count % parts:
            found.append(f"{count:,} {what} in {parts} parts (whole ones in each)")
    return found
