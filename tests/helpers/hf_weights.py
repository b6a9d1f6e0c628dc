"""Hugging Face state dicts to the flat tensors of a schedule, and back, to compare with."""

from collections.abc import Iterator, Mapping

import torch

from twinstream.executor.kernels.operand import DTYPES
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import (
    FlatLayout,
    InnerTensor,
    bias_layout,
    block_layout,
    embedding_layout,
    experts_layout,
    head_layout,
)

# Rows of an inner tensor come from these modules, one after the other.
_BLOCK_MODULES = {
    "attention_norm": ("input_layernorm.weight",),
    "qkv_proj": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "o_proj": ("self_attn.o_proj.weight",),
    "ffn_norm": ("post_attention_layernorm.weight",),
    "gate_up_proj": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down_proj": ("mlp.down_proj.weight",),
    "router": ("mlp.gate.weight",),
    "router_bias": ("mlp.gate.e_score_correction_bias",),
    "shared_gate": ("mlp.shared_expert_gate.weight",),
    "experts_gate_up": ("mlp.experts.gate_up_proj",),
    "experts_down": ("mlp.experts.down_proj",),
}


def flat_layouts(spec: ModelSpec) -> dict[str, FlatLayout]:
    """The layouts of all flat tensors by name: "embedding", "layer.0", ..., "head".

    A layer with experts has more: "layer.0.experts", and "layer.0.bias" of its router.
    """
    layers = {}
    for index in range(spec.num_layers):
        layer = spec.layer(index)
        layers[f"layer.{index}"] = block_layout(layer)
        if layer.experts is not None:
            layers[f"layer.{index}.experts"] = experts_layout(layer)
            if layer.experts.correction_bias:
                layers[f"layer.{index}.bias"] = bias_layout(layer)
    return {"embedding": embedding_layout(spec), **layers, "head": head_layout(spec)}


def pack_hf_state(
    spec: ModelSpec, state_dict: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the flat uint8 tensors, by name, of a llama, mistral, qwen2 or qwen3 state dict.

    Values are cast to the spec's dtype; padding is zero.
    """
    flats = {}
    for flat_name, layout in flat_layouts(spec).items():
        flats[flat_name] = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        for hf_name, rows in _rows_by_hf_name(spec, flat_name, layout, flats[flat_name]):
            assert state_dict[hf_name].shape == rows.shape
            rows.copy_(state_dict[hf_name])
    return flats


def unpack_hf_state(spec: ModelSpec, flats: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights, or gradients, under their Hugging Face names, as views of the flat tensors.

    With tied embeddings there is no LM head among them.
    """
    return {
        hf_name: rows
        for flat_name, layout in flat_layouts(spec).items()
        if flat_name in flats
        for hf_name, rows in _rows_by_hf_name(spec, flat_name, layout, flats[flat_name])
    }


def _rows_by_hf_name(
    spec: ModelSpec, flat_name: str, layout: FlatLayout, flat: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in layout.tensors:
        values = flat[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        dtype = torch.float32 if tensor.name == "router_bias" else DTYPES[spec.dtype]
        whole = values.view(dtype).view(tensor.shape)
        names = _hf_names(spec, flat_name, tensor)
        yield from zip(names, torch.split_with_sizes(whole, _row_counts(spec, tensor)), strict=True)


def _hf_names(spec: ModelSpec, flat_name: str, tensor: InnerTensor) -> tuple[str, ...]:
    ends = {
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    }
    if tensor.name in ends:
        return (ends[tensor.name],)
    layer = flat_name.split(".")[1]
    shared = "mlp."
    if (experts := spec.layer(int(layer)).experts) is not None and experts.shared_d_ff:
        shared = "mlp.shared_expert." if experts.shared_gate else "mlp.shared_experts."
    modules = _BLOCK_MODULES[tensor.name]
    if tensor.name in ("gate_up_proj", "down_proj"):
        modules = tuple(module.replace("mlp.", shared) for module in modules)
    return tuple(f"model.layers.{layer}.{module}" for module in modules)


def _row_counts(spec: ModelSpec, tensor: InnerTensor) -> list[int]:
    if tensor.name in ("qkv_proj", "qkv_bias"):
        return [spec.d_q, spec.d_kv, spec.d_kv]
    if tensor.name == "gate_up_proj":
        return [tensor.shape[0] // 2] * 2
    return [tensor.shape[0]]
