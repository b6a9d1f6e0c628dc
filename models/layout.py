"""Where each weight lies inside the flat tensor of a block, of the head and of the embedding."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

ALIGNMENT_BYTES = 256
_FLOAT32_BYTES = 4
_VOCAB_MULTIPLE = 128  # of the rows of the embedding that a rank holds; Megatron-LM's default
EMBEDDING, HEAD = "embedding", "head"  # groups outside the blocks
ADAPTERS = "lora."  # begins the name of a group of adapters
EXPERTS = ".experts"  # ends the name of the group of a layer's experts
ROUTER_BIAS = ".bias"  # ends that of its router's untrained bias
AdapterHalf = Literal["shared", "own", "dense", "experts"]  # of a layer's, what a group has
PART = ".tp"  # and a number: ends that of a part of a group that tensor parallelism splits
# What every part of a block reads.
_OF_ALL_PARTS = ("attention_norm", "q_norm", "k_norm", "ffn_norm", "router", "shared_gate")


class ExpertSizes(Protocol):
    """What the layout of a layer's experts follows from."""

    @property
    def count(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def shared_d_ff(self) -> int: ...
    @property
    def shared_gate(self) -> bool: ...


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
    def qk_norm_rows(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def tied_embeddings(self) -> bool: ...
    @property
    def experts(self) -> ExpertSizes | None: ...


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
    the model has them. With experts there are a router, and gate_up_proj and down_proj only of an
    expert that all tokens go to; those of routed ones are a group of their own (`experts_layout`).

    >>> from twinstream.models.presets import load_preset
    >>> block_layout(load_preset("tiny")).tensor("qkv_proj").shape
    (256, 128)
    """
    return packed_layout(_block_shapes(spec), spec.itemsize)


def shared_layout(spec: DecoderSizes) -> FlatLayout:
    """Return the layout of what every part of a block reads: its norms, and its router."""
    shapes = [(name, shape) for name, shape in _block_shapes(spec) if name in _OF_ALL_PARTS]
    return packed_layout(shapes, spec.itemsize)


def part_layout(spec: DecoderSizes) -> FlatLayout:
    """Return the layout of the matrices, and their biases, of one part of a block.

    Args:
        spec: with the heads and the width of the part.
    """
    shapes = [(name, shape) for name, shape in _block_shapes(spec) if name not in _OF_ALL_PARTS]
    return packed_layout(shapes, spec.itemsize)


def _block_shapes(spec: DecoderSizes) -> list[tuple[str, tuple[int, ...]]]:
    d_qkv = spec.d_q + 2 * spec.d_kv
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("attention_norm", (spec.d_model,)),
        ("qkv_proj", (d_qkv, spec.d_model)),
    ]
    if spec.qkv_bias:
        shapes += [("qkv_bias", (d_qkv,))]
    shapes += [(name, (width,)) for name, width in qk_norm_widths(spec).items()]
    shapes += [("o_proj", (spec.d_model, spec.d_q)), ("ffn_norm", (spec.d_model,))]
    if spec.experts is not None:
        shapes += [("router", (spec.experts.count, spec.d_model))]
        if spec.experts.shared_gate:
            shapes += [("shared_gate", (1, spec.d_model))]
    if d_ff := dense_width(spec):
        shapes += [
            ("gate_up_proj", (2 * d_ff, spec.d_model)), ("down_proj", (spec.d_model, d_ff))
        ]  # fmt: skip
    return shapes


def qk_norm_widths(spec: DecoderSizes) -> dict[str, int]:
    """Of the norms of Q and of K, of each head or of all heads together; empty without any."""
    if not spec.qk_norm:
        return {}
    widths = (spec.d_q, spec.d_kv) if spec.qk_norm_rows else (spec.head_dim, spec.head_dim)
    return dict(zip(("q_norm", "k_norm"), widths, strict=True))


def dense_width(spec: DecoderSizes) -> int:
    """Of the feed-forward network that all tokens of a layer go through; 0 without one."""
    return spec.d_ff if spec.experts is None else spec.experts.shared_d_ff


def experts_layout(spec: DecoderSizes) -> FlatLayout:
    """Return the layout of the routed experts of one layer, [experts, out, in] each.

    Rows of experts_gate_up are gate, then up, as transformers has them in memory.

    >>> from twinstream.models.presets import load_preset
    >>> [tensor.shape for tensor in experts_layout(load_preset("mixtral-8x7b")).tensors]
    [(8, 28672, 4096), (8, 4096, 14336)]
    """
    assert spec.experts is not None
    shapes = experts_shapes(spec.experts.count, spec.experts.d_ff, spec.d_model)
    return packed_layout(shapes, spec.itemsize)


def experts_shapes(count: int, d_ff: int, d_model: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the shapes of the matrices of so many experts."""
    return [
        ("experts_gate_up", (count, 2 * d_ff, d_model)),
        ("experts_down", (count, d_model, d_ff)),
    ]


def bias_layout(spec: DecoderSizes) -> FlatLayout:
    """Return the layout of what a router's choice is corrected by: float32, one for each expert."""
    assert spec.experts is not None
    return packed_layout([("router_bias", (spec.experts.count,))], _FLOAT32_BYTES)


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

    >>> layer_of("lora.3"), layer_of("3.experts"), layer_of("3.tp1"), layer_of("head")
    (3, 3, 3, None)
    """
    number = whole_group(group).removeprefix(ADAPTERS)
    number = number.removesuffix(EXPERTS).removesuffix(ROUTER_BIAS)
    return int(number) if number.isdigit() else None


def whole_group(name: str) -> str:
    """The group that a name of one of its parts is of; or of a tensor of one.

    >>> whole_group("param.3.tp1"), whole_group("lora.3.experts"), whole_group("head")
    ('param.3', 'lora.3', 'head')
    """
    whole = name.partition(PART)[0]
    return whole.removesuffix(EXPERTS) if ADAPTERS in whole else whole


def is_of_experts(group: str) -> bool:
    """Whether a group has experts alone, or their adapters; or is a part of one that has."""
    return group.partition(PART)[0].endswith(EXPERTS)


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the embedding when each of `tp` ranks holds equally many, a multiple of 128.

    Source: Megatron-LM, `_vocab_size_with_padding`, with make_vocab_size_divisible_by 128.

    >>> padded_vocab(50257, 8)
    51200
    """
    multiple = _VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


def rank_heads(num_heads: int, tp: int) -> int:
    """Heads of one of `tp` ranks, at least one: key heads fewer than ranks are replicated.

    >>> [rank_heads(8, tp) for tp in (1, 4, 16)]
    [8, 2, 1]
    """
    return -(-num_heads // tp)


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
