"""Which tensor of a PEFT adapter file lies where in the flat tensors of adapters."""

from dataclasses import replace

from twinstream.models.decoders.hf_weights import HfWeight, hf_weights_of
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.recipes.adapter_layout import (
    adapter_group,
    adapter_layout,
    adapter_sites,
    expert_sites,
)
from twinstream.models.recipes.lora import Lora, Target

_PEFT = "base_model.model."
PEFT_LAYERS = f"{_PEFT}model.layers."
EXPERT_MODULES = {  # as PEFT 0.21 wraps two parameters of one module, one about the other
    "experts_gate_up": "mlp.experts.base_layer",
    "experts_down": "mlp.experts",
}
EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
PEFT_MODULES: dict[Target, str] = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def peft_weights(spec: ModelSpec, lora: Lora) -> tuple[HfWeight, ...]:
    """Every tensor of an adapter file, layer by layer; its group is `lora.LAYER`.

    >>> from twinstream.models.presets import load_preset
    >>> lora = Lora(rank=4, alpha=8.0, targets=("q", "v"))
    >>> peft_weights(load_preset("tiny"), lora)[3]  # doctest: +NORMALIZE_WHITESPACE
    HfWeight(name='base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight', shape=(64, 4),
             group='lora.0', offset_bytes=6144, size_bytes=1024)
    """
    layers = range(spec.num_layers)
    of_layers = (weight for layer in layers for weight in peft_weights_of(spec, lora, layer))
    return (*of_layers, *saved_weights(spec, lora))


def saved_weights(spec: ModelSpec, lora: Lora) -> tuple[HfWeight, ...]:
    """What is trained whole, of the groups `embedding` and `head`.

    >>> from twinstream.models.presets import load_preset
    >>> lora = Lora(rank=4, alpha=8.0, saved=("lm_head",))
    >>> [weight.name for weight in saved_weights(load_preset("tiny"), lora)]
    ['base_model.model.lm_head.weight']
    """
    weights = (w for group in lora.saved_groups for w in hf_weights_of(spec, group))
    return tuple(
        replace(weight, name=f"{_PEFT}{weight.name}")
        for weight in weights if weight.name.endswith(tuple(f"{n}.weight" for n in lora.saved))
    )  # fmt: skip


def peft_weights_of(spec: ModelSpec, lora: Lora, layer: int) -> tuple[HfWeight, ...]:
    """Those of one layer: A and B of each target.

    PEFT has those of all experts in one A, expert by expert, and one B, rank by rank.
    """
    spec = spec.layer(layer)
    layout, group, found = adapter_layout(spec, lora), adapter_group(layer), []
    for site in adapter_sites(spec, lora):
        a = layout.tensor(f"{site.name}_a")
        rows_bytes = a.size_bytes // len(site.adapted)
        for number, target in enumerate(site.adapted):
            b = layout.tensor(f"{target}_b")
            module = f"{PEFT_LAYERS}{layer}.{peft_module(spec, target)}"
            shape = (lora.rank, site.in_width)
            start_bytes = a.offset_bytes + number * rows_bytes
            found += [
                HfWeight(f"{module}.lora_A.weight", shape, group, start_bytes, rows_bytes),
                HfWeight(f"{module}.lora_B.weight", b.shape, group, b.offset_bytes, b.size_bytes),
            ]
    for each in expert_sites(spec, lora):
        a, b = layout.tensor(f"{each.name}_a"), layout.tensor(f"{each.name}_b")
        module = f"{PEFT_LAYERS}{layer}.{EXPERT_MODULES[each.name]}"
        all_ranks = each.count * each.rank
        found += [
            HfWeight(f"{module}.lora_A.weight", (all_ranks, each.in_width), group, a.offset_bytes,
                     a.size_bytes),
            HfWeight(f"{module}.lora_B.weight", (each.out_width, all_ranks), group, b.offset_bytes,
                     b.size_bytes, flat_shape=b.shape, axes=(1, 2, 0)),
        ]  # fmt: skip
    return tuple(found)


def peft_module(spec: ModelSpec, target: Target) -> str:
    """What PEFT calls a target of a layer built like a model's."""
    module, experts = PEFT_MODULES[target], spec.experts
    if experts is None or not module.startswith("mlp."):
        return module
    shared = "mlp.shared_expert." if experts.shared_gate else "mlp.shared_experts."
    return module.replace("mlp.", shared)
