"""Which Hugging Face tensor lies where in the flat tensors of the parameters."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from twinstream.models.layout import (
    FlatLayout,
    InnerTensor,
    block_layout,
    embedding_layout,
    head_layout,
)
from twinstream.models.spec import ModelSpec

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


@dataclass(frozen=True)
class HfWeight:
    """One tensor of a Hugging Face checkpoint, and its bytes inside the flat tensor of a group.

    `shape` is row-major; `group` is `embedding`, a layer by its number, or `head`. `dtype` is None
    where it is the model's.
    """

    name: str
    shape: tuple[int, ...]
    group: str
    offset_bytes: int
    size_bytes: int
    dtype: str | None = field(default=None, repr=False)

    @property
    def end_bytes(self) -> int:
        """Where its bytes end inside the group's flat tensor."""
        return self.offset_bytes + self.size_bytes


def hf_weights(spec: ModelSpec) -> tuple[HfWeight, ...]:
    """Every tensor of a llama, mistral, qwen2 or qwen3 checkpoint, in Hugging Face's order.

    Tied embeddings have no `lm_head.weight`. The bytes that no tensor covers are padding.

    >>> from twinstream.models.presets import load_preset
    >>> hf_weights(load_preset("tiny"))[2]  # doctest: +NORMALIZE_WHITESPACE
    HfWeight(name='model.layers.0.self_attn.k_proj.weight', shape=(64, 128), group='0',
             offset_bytes=66048, size_bytes=32768)
    """
    groups = spec.parameter_groups
    return tuple(weight for group in groups for weight in hf_weights_of(spec, group))


def hf_weights_of(spec: ModelSpec, group: str) -> tuple[HfWeight, ...]:
    """The tensors of one group: `embedding`, a layer by its number, or `head`."""
    if group == "embedding":
        inner = embedding_layout(spec).tensor("embedding")
        return (_weight("model.embed_tokens.weight", group, inner),)
    if group != "head":
        return tuple(_block_weights(spec, block_layout(spec), group))
    names = {"final_norm": "model.norm.weight", "head": LM_HEAD}
    return tuple(_weight(names[inner.name], group, inner) for inner in head_layout(spec).tensors)


def _block_weights(spec: ModelSpec, layout: FlatLayout, layer: str) -> Iterator[HfWeight]:
    inner = {tensor.name: tensor for tensor in layout.tensors}
    d_qkv = (spec.d_q, spec.d_kv, spec.d_kv)
    parts = {"qkv_proj": d_qkv, "qkv_bias": d_qkv, "gate_up_proj": (spec.d_ff, spec.d_ff)}
    for module, whole, part in _BLOCK:
        if whole in inner:
            rows = parts.get(whole, inner[whole].shape[:1])
            yield _weight(
                f"model.layers.{layer}.{module}", layer, _rows_of(inner[whole], rows, part)
            )


def _rows_of(tensor: InnerTensor, rows: tuple[int, ...], part: int) -> InnerTensor:
    """A range of a tensor's rows, as a tensor of its own."""
    row_bytes = tensor.size_bytes // tensor.shape[0]
    shape = (rows[part], *tensor.shape[1:])
    offset_bytes = tensor.offset_bytes + sum(rows[:part]) * row_bytes
    return InnerTensor(tensor.name, shape, offset_bytes, rows[part] * row_bytes)


def _weight(name: str, group: str, at: InnerTensor) -> HfWeight:
    return HfWeight(name, at.shape, group, at.offset_bytes, at.size_bytes)
