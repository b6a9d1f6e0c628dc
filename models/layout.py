"""Where each weight lies inside the flat tensor of a block, of the head and of the embedding."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Protocol

ALIGNMENT_BYTES = 256
EMBEDDING, HEAD = "embedding", "head"  # groups outside the blocks
ADAPTERS = "lora."  # begins the name of a group of adapters


class DecoderSizes(Protocol):
    """What the layouts of a decoder of ours follow from: a `ModelSpec`."""

    @property
    def d_model(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def d_q(self) -> int: ...
    @property
    def d_kv(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def tied_embeddings(self) -> bool: ...


@dataclass(frozen=True)
class InnerTensor:
    """One weight: a dense, row-major range of the flat tensor."""

    name: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class FlatLayout:
    """The weights of one flat tensor, in order of their offsets, 256-byte aligned each."""

    tensors: tuple[InnerTensor, ...]
    size_bytes: int

    def tensor(self, name: str) -> InnerTensor:
        """Return the inner tensor of that name; KeyError if there is none."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)


def block_layout(spec: DecoderSizes) -> FlatLayout:
    """Return the layout of one block.

    Matrices are [out_features, in_features], as in nn.Linear. The rows of qkv_proj are Q, then K,
    then V; those of gate_up_proj are gate, then up. qkv_bias, q_norm and k_norm are there only if
    the model has them.

    >>> from twinstream.models.presets import load_preset
    >>> block_layout(load_preset("tiny")).tensor("qkv_proj").shape
    (256, 128)
    """
    d_qkv = spec.d_q + 2 * spec.d_kv
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("attention_norm", (spec.d_model,)),
        ("qkv_proj", (d_qkv, spec.d_model)),
    ]
    if spec.qkv_bias:
        shapes += [("qkv_bias", (d_qkv,))]
    if spec.qk_norm:
        shapes += [("q_norm", (spec.head_dim,)), ("k_norm", (spec.head_dim,))]
    shapes += [
        ("o_proj", (spec.d_model, spec.d_q)),
        ("ffn_norm", (spec.d_model,)),
        ("gate_up_proj", (2 * spec.d_ff, spec.d_model)),
        ("down_proj", (spec.d_model, spec.d_ff)),
    ]
    return packed_layout(shapes, spec.itemsize)


def head_layout(spec: DecoderSizes) -> FlatLayout:
    """Return the layout of the final norm and, unless the embeddings are tied, the LM head."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("final_norm", (spec.d_model,))]
    if not spec.tied_embeddings:
        shapes += [("head", (spec.vocab_size, spec.d_model))]
    return packed_layout(shapes, spec.itemsize)


def embedding_layout(spec: DecoderSizes) -> FlatLayout:
    """Return the layout of the embedding, which is also the LM head if the two are tied."""
    return packed_layout([("embedding", (spec.vocab_size, spec.d_model))], spec.itemsize)


def layer_of(group: str) -> int | None:
    """The layer whose parameters or adapters a group of a decoder of ours has; None of others.

    >>> layer_of("lora.3"), layer_of("3"), layer_of("head")
    (3, 3, None)
    """
    number = group.removeprefix(ADAPTERS)
    return int(number) if number.isdigit() else None


def packed_layout(shapes: Iterable[tuple[str, tuple[int, ...]]], itemsize: int) -> FlatLayout:
    """Lay tensors of these names and shapes one after the other, each aligned to 256 bytes."""
    tensors: list[InnerTensor] = []
    end_bytes = 0
    for name, shape in shapes:
        size_bytes = prod(shape) * itemsize
        tensors.append(InnerTensor(name, shape, end_bytes, size_bytes))
        end_bytes = aligned(end_bytes + size_bytes)
    return FlatLayout(tuple(tensors), end_bytes)


def aligned(num_bytes: int) -> int:
    """Round bytes up to the next place where a tensor may begin."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
