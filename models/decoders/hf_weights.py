"""Which Hugging Face tensor lies where in the flat tensors of the parameters."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import (
    EXPERTS,
    ROUTER_BIAS,
    InnerTensor,
    block_layout,
    dense_width,
    embedding_layout,
    head_layout,
    layer_of,
)

LM_HEAD = "lm_head.weight"

# In the order of Hugging Face's modules: its name, the inner tensor, which range of its rows.
_BLOCK = (
    ("self_attn.q_proj.weight", "qkv_proj", 0),
    ("self_attn.q_proj.bias", "qkv_bias", 0),
    ("self_attn.k_proj.weight", "qkv_proj", 1),
    ("self_attn.k_proj.bias", "qkv_bias", 1),
    ("self_attn.v_proj.weight", "qkv_proj", 2),
    ("self_attn.v_proj.bias", "qkv_bias", 2),
    ("self_attn.o_proj.weight", "o_proj", 0),
    ("self_attn.q_norm.weight", "q_norm", 0),
    ("self_attn.k_norm.weight", "k_norm", 0),
    ("mlp.gate_proj.weight", "gate_up_proj", 0),
    ("mlp.up_proj.weight", "gate_up_proj", 1),
    ("mlp.down_proj.weight", "down_proj", 0),
    ("input_layernorm.weight", "attention_norm", 0),
    ("post_attention_layernorm.weight", "ffn_norm", 0),
)
# Of a block with experts: what its router and the expert that all tokens go to are called.
_MIXTRAL, _SHARED, _GATED_SHARED = "block_sparse_moe", "mlp.shared_experts", "mlp.shared_expert"
_EXPERT_NAMES = {
    "block_sparse_moe": ("w1", "w3", "w2"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True)
class HfWeight:
    """One tensor of a Hugging Face checkpoint, and its bytes inside the flat tensor of a group.

    `shape` is row-major; `group` is `embedding`, a layer by its number, or `head`. `dtype` is None
    where it is the model's; of a tensor that is only carried it is safetensors' name of it. With
    `axes` the bytes in the flat tensor are of `flat_shape`, and those of the checkpoint have its
    axes in that order.
    """

    name: str
    shape: tuple[int, ...]
    group: str
    offset_bytes: int
    size_bytes: int
    dtype: str | None = field(default=None, repr=False)
    flat_shape: tuple[int, ...] = field(default=(), repr=False)
    axes: tuple[int, ...] = field(default=(), repr=False)

    @property
    def end_bytes(self) -> int:
        """Where its bytes end inside the group's flat tensor."""
        return self.offset_bytes + self.size_bytes


def hf_weights(spec: ModelSpec, *, fused: bool = False) -> tuple[HfWeight, ...]:
    """Every tensor of a checkpoint of a family that is read, in Hugging Face's order.

    Tied embeddings have no `lm_head.weight`. The bytes that no tensor covers are padding.

    Args:
        fused: experts of a layer are two tensors, as transformers 5 has them in memory, and not
            three of each expert, as it writes them.

    >>> from twinstream.models.presets import load_preset
    >>> hf_weights(load_preset("tiny"))[2]  # doctest: +NORMALIZE_WHITESPACE
    HfWeight(name='model.layers.0.self_attn.k_proj.weight', shape=(64, 128), group='0',
             offset_bytes=66048, size_bytes=32768)
    """
    groups = spec.parameter_groups
    return tuple(weight for group in groups for weight in hf_weights_of(spec, group, fused=fused))


def has_fused_experts(spec: ModelSpec, names: Collection[str]) -> bool:
    """Whether a checkpoint with tensors of these names has a layer's experts in two of them."""
    if spec.experts is None:
        return False
    group = next((each for each in spec.parameter_groups if each.endswith(EXPERTS)), None)
    one = () if group is None else hf_weights_of(spec, group, fused=True)
    return bool(one) and all(weight.name in names for weight in one)


def hf_weights_of(spec: ModelSpec, group: str, *, fused: bool = False) -> tuple[HfWeight, ...]:
    """The tensors of one group: `embedding`, one of a layer's, or `head`."""
    if group == "embedding":
        inner = embedding_layout(spec).tensor("embedding")
        return (_weight("model.embed_tokens.weight", group, inner),)
    if (layer := layer_of(group)) is not None:
        if group.endswith(EXPERTS):
            return tuple(_expert_weights(spec, layer, group, fused=fused))
        if group.endswith(ROUTER_BIAS):
            inner = spec.group_layout(group).tensors[0]
            name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
            return (replace(_weight(name, group, inner), dtype="float32"),)
        return tuple(_block_weights(spec.layer(layer), group, fused=fused))
    names = {"final_norm": "model.norm.weight", "head": LM_HEAD}
    return tuple(_weight(names[inner.name], group, inner) for inner in head_layout(spec).tensors)


def _expert_module(spec: ModelSpec) -> str:
    """What the module of a layer that has router and experts is called in files.

    Mixtral's own name is that of the routers which all families have, without norms of Q and K.
    """
    experts = spec.experts
    assert experts is not None
    is_mixtral = not (spec.qk_norm or spec.qkv_bias or experts.shared_d_ff) and (
        experts.scores == "softmax" and experts.normalized
    )
    return _MIXTRAL if is_mixtral else "mlp"


def _block_weights(spec: ModelSpec, layer: str, *, fused: bool) -> Iterator[HfWeight]:
    inner = {tensor.name: tensor for tensor in block_layout(spec).tensors}
    d_qkv, d_ff = (spec.d_q, spec.d_kv, spec.d_kv), dense_width(spec)
    parts = {"qkv_proj": d_qkv, "qkv_bias": d_qkv, "gate_up_proj": (d_ff, d_ff)}
    shared = "mlp"
    if spec.experts is not None:
        shared = _GATED_SHARED if spec.experts.shared_gate else _SHARED
        module = "mlp" if fused else _expert_module(spec)
        yield _weight(f"model.layers.{layer}.{module}.gate.weight", layer, inner["router"])
        if spec.experts.shared_gate:
            yield _weight(f"model.layers.{layer}.mlp.shared_expert_gate.weight", layer,
                          inner["shared_gate"])  # fmt: skip
    for module, whole, part in _BLOCK:
        if whole in inner:
            rows = parts.get(whole, inner[whole].shape[:1])
            name = module.replace("mlp.", f"{shared}.")
            yield _weight(f"model.layers.{layer}.{name}", layer, _rows_of(inner[whole], rows, part))


def _expert_weights(
    spec: ModelSpec, layer: int, group: str, *, fused: bool
) -> Iterator[HfWeight]:  # fmt: skip
    """Gate, up and down of every expert; or of all, where they are `fused`."""
    assert spec.experts is not None
    both, down = spec.group_layout(group).tensors
    module = _expert_module(spec)
    if fused:
        for name, inner in (("gate_up_proj", both), ("down_proj", down)):
            yield _weight(f"model.layers.{layer}.mlp.experts.{name}", group, inner)
        return
    gate_name, up_name, down_name = _EXPERT_NAMES[module]
    d_ff = spec.experts.d_ff
    for number in range(spec.experts.count):
        prefix = f"model.layers.{layer}.{module}.experts.{number}"
        rows = _one_of(both, number)
        yield _weight(f"{prefix}.{gate_name}.weight", group, _rows_of(rows, (d_ff, d_ff), 0))
        yield _weight(f"{prefix}.{up_name}.weight", group, _rows_of(rows, (d_ff, d_ff), 1))
        yield _weight(f"{prefix}.{down_name}.weight", group, _one_of(down, number))


def _one_of(tensor: InnerTensor, number: int) -> InnerTensor:
    """One of the matrices under each other in a tensor."""
    size_bytes = tensor.size_bytes // tensor.shape[0]
    offset_bytes = tensor.offset_bytes + number * size_bytes
    return InnerTensor(tensor.name, tensor.shape[1:], offset_bytes, size_bytes)


def _rows_of(tensor: InnerTensor, rows: tuple[int, ...], part: int) -> InnerTensor:
    """A range of a tensor's rows, as a tensor of its own."""
    row_bytes = tensor.size_bytes // tensor.shape[0]
    shape = (rows[part], *tensor.shape[1:])
    offset_bytes = tensor.offset_bytes + sum(rows[:part]) * row_bytes
    return InnerTensor(tensor.name, shape, offset_bytes, rows[part] * row_bytes)


def _weight(name: str, group: str, at: InnerTensor) -> HfWeight:
    return HfWeight(name, at.shape, group, at.offset_bytes, at.size_bytes)
