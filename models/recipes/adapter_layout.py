"""Where the LoRA matrices of a block lie in their flat tensor, by the input they share.

Projections of one input (Q, K and V; gate and up) have their A matrices one under the other, so
that one product makes x A^T for all of them.
"""

from dataclasses import dataclass

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import (
    ADAPTERS,
    AdapterHalf,
    FlatLayout,
    dense_width,
    packed_layout,
)
from twinstream.models.recipes.lora import Lora, Target

_SITES: dict[str, tuple[Target, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
_ATTENTION = ("qkv", "o")
# Of a block in parts every part reads these: what is beside columns has them whole as inputs, what
# is beside rows as outputs.
_OF_ALL_PARTS = ("qkv_a", "gate_up_a", "experts_gate_up_a", "o_b", "down_b", "experts_down_b")


def adapter_group(layer: int) -> str:
    """The group of a layer's adapters, beside those of the base's parameters."""
    return f"{ADAPTERS}{layer}"


@dataclass(frozen=True)
class AdapterSite:
    """An input of a block and the target projections that read it.

    `out_widths` has one of every projection of the site, target or not, in the order of its
    weight's rows; `adapted` are the targets among them.
    """

    name: str
    in_width: int
    out_widths: dict[Target, int]
    adapted: tuple[Target, ...]
    rank: int

    @property
    def low_width(self) -> int:
        """Columns of x A^T: the rank, for each target."""
        return len(self.adapted) * self.rank

    @property
    def num_parameters(self) -> int:
        """Of all A and B of the site, without padding."""
        return sum(self.rank * (self.in_width + self.out_widths[t]) for t in self.adapted)


@dataclass(frozen=True)
class ExpertSite:
    """The matrices of all routed experts that share a tensor; each expert has an A and a B."""

    name: str
    count: int
    in_width: int
    out_width: int
    rank: int

    @property
    def num_parameters(self) -> int:
        """Of all A and B, without padding."""
        return self.count * self.rank * (self.in_width + self.out_width)


def low_widths(lora: Lora, d_ff: int) -> dict[str, int]:
    """Columns of x A^T by site, of the sites that have a target, of a block whose network for all
    tokens is so wide.

    >>> low_widths(Lora(rank=16, alpha=32.0), 128)
    {'qkv': 48, 'o': 16, 'gate_up': 32, 'down': 16}
    """
    counts = {name: sum(t in lora.targets for t in targets) for name, targets in _SITES.items()}
    there = {name: count for name, count in counts.items() if d_ff or name in _ATTENTION}
    return {name: count * lora.rank for name, count in there.items() if count}


def adapter_sites(spec: ModelSpec, lora: Lora) -> tuple[AdapterSite, ...]:
    """The sites of one block that have a target, in the order of the forward pass.

    >>> from twinstream.models.presets import load_preset
    >>> [site.low_width for site in adapter_sites(load_preset("8b"), Lora(rank=16, alpha=32.0))]
    [48, 16, 32, 16]
    """
    d_ff = dense_width(spec)
    in_widths = {"qkv": spec.d_model, "o": spec.d_q, "gate_up": spec.d_model, "down": d_ff}
    out_widths: dict[Target, int] = {
        "q": spec.d_q, "k": spec.d_kv, "v": spec.d_kv, "o": spec.d_model,
        "gate": d_ff, "up": d_ff, "down": spec.d_model,
    }  # fmt: skip
    found = (
        AdapterSite(
            name,
            in_widths[name],
            {target: out_widths[target] for target in targets},
            tuple(target for target in targets if target in lora.targets),
            lora.rank,
        )
        for name, targets in _SITES.items()
        if d_ff or name in _ATTENTION
    )
    return tuple(site for site in found if site.adapted)


def expert_sites(spec: ModelSpec, lora: Lora) -> tuple[ExpertSite, ...]:
    """Those of one block's routed experts; none unless they are a target."""
    experts = spec.experts
    if experts is None or "experts" not in lora.targets:
        return ()
    count, d_ff, d = experts.count, experts.d_ff, spec.d_model
    return (
        ExpertSite("experts_gate_up", count, d, 2 * d_ff, lora.rank),
        ExpertSite("experts_down", count, d_ff, d, lora.rank),
    )


def lora_of_layer(spec: ModelSpec, lora: Lora | None, layer: int) -> Lora | None:
    """What is beside the matrices of a layer; None where none of them is a target.

    >>> from twinstream.models.presets import load_preset
    >>> lora_of_layer(load_preset("qwen3-30b-a3b"), Lora(rank=4, alpha=8.0, targets=("down",)), 0)
    """
    if lora is None:
        return None
    built = spec.layer(layer)
    return lora if adapter_sites(built, lora) or expert_sites(built, lora) else None


def lora_there(spec: ModelSpec, lora: Lora) -> Lora | None:
    """The same without targets that no layer has; None where none is left.

    >>> from twinstream.models.presets import load_preset
    >>> lora_there(load_preset("qwen3-30b-a3b"), Lora(rank=4, alpha=8.0)).targets
    ('q', 'k', 'v', 'o')
    """
    kinds = [kind for kind, _ in spec.layer_kinds]
    there = {t for kind in kinds for site in adapter_sites(kind, lora) for t in site.adapted}
    there |= {"experts"} if any(expert_sites(kind, lora) for kind in kinds) else set()
    targets = tuple(target for target in lora.targets if target in there)
    return lora.model_copy(update={"targets": targets}) if targets else None


def adapter_layout(spec: ModelSpec, lora: Lora, only: AdapterHalf | None = None) -> FlatLayout:
    """Return the layout of one block's LoRA matrices, or of those that all parts of it read, that a
    part has by itself, or that are beside experts or all else.

    `SITE_a` is [targets of the site x rank, in_features], target by target; `TARGET_b` is
    [out_features, rank]. Of routed experts they are [experts, rank, in_features] and [experts,
    out_features, rank].

    >>> from twinstream.models.presets import load_preset
    >>> layout = adapter_layout(load_preset("tiny"), Lora(rank=4, alpha=8.0, targets=("q", "v")))
    >>> [(tensor.name, tensor.shape) for tensor in layout.tensors]
    [('qkv_a', (8, 128)), ('q_b', (128, 4)), ('v_b', (64, 4))]
    """
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for site in adapter_sites(spec, lora):
        shapes.append((f"{site.name}_a", (site.low_width, site.in_width)))
        shapes += [(f"{t}_b", (site.out_widths[t], lora.rank)) for t in site.adapted]
    for each in expert_sites(spec, lora):
        shapes.append((f"{each.name}_a", (each.count, lora.rank, each.in_width)))
        shapes.append((f"{each.name}_b", (each.count, each.out_width, lora.rank)))
    if only in ("shared", "own"):
        shapes = [one for one in shapes if (one[0] in _OF_ALL_PARTS) == (only == "shared")]
    elif only is not None:
        shapes = [one for one in shapes if one[0].startswith("experts") == (only == "experts")]
    return packed_layout(shapes, spec.itemsize)


def adapter_layout_of(spec: ModelSpec, lora: Lora, group: str, layer: int) -> FlatLayout:
    """Return the layout of a group of adapters of a model, or of a rank's of one in parts."""
    return adapter_layout(spec.adapter_sizes(layer), lora, spec.adapter_half(group))
