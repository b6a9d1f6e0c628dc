"""Which tensor of a PEFT adapter file lies where in the flat tensors of adapters."""

from twinstream.models.adapters.adapter_layout import adapter_group, adapter_layout, adapter_sites
from twinstream.models.adapters.lora import Lora, Target
from twinstream.models.hf_weights import HfWeight
from twinstream.models.spec import ModelSpec

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
    return tuple(weight for layer in layers for weight in peft_weights_of(spec, lora, layer))


def peft_weights_of(spec: ModelSpec, lora: Lora, layer: int) -> tuple[HfWeight, ...]:
    """Those of one layer: A and B of each target."""
    layout, group, found = adapter_layout(spec, lora), adapter_group(layer), []
    for site in adapter_sites(spec, lora):
        a = layout.tensor(f"{site.name}_a")
        rows_bytes = a.size_bytes // len(site.adapted)
        for number, target in enumerate(site.adapted):
            b = layout.tensor(f"{target}_b")
            module = f"base_model.model.model.layers.{layer}.{PEFT_MODULES[target]}"
            shape = (lora.rank, site.in_width)
            start_bytes = a.offset_bytes + number * rows_bytes
            found += [
                HfWeight(f"{module}.lora_A.weight", shape, group, start_bytes, rows_bytes),
                HfWeight(f"{module}.lora_B.weight", b.shape, group, b.offset_bytes, b.size_bytes),
            ]
    return tuple(found)
