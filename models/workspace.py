"""How much scratch the eager kernels take, so that it can be planned for without torch.

Each formula mirrors, buffer by buffer, what the kernel of that name takes from its `scratch`
operand; tests hold the two together to the byte. Buffers whose lifetimes do not overlap share
their bytes, hence the maxima.

Legend: T tokens of the chunk, d model width, q width of Q, k width of K (= of V), f FFN width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from twinstream.models.attention_scratch import attention_scratch_bytes
from twinstream.models.attention_shape import AttentionShape
from twinstream.models.layout import ALIGNMENT_BYTES
from twinstream.models.spec import ITEMSIZE_BYTES
from twinstream.schedule.errors import TwinstreamError

Attributes = Mapping[str, int | float | str | bool]

# Float32 logits that the head works on at a time: 32 MiB.
HEAD_BLOCK_ELEMENTS = 2**23
# Gathered elements that embed_backward works on at a time: 16 MiB in float32.
EMBED_BLOCK_ELEMENTS = 2**22

_FLOAT32_BYTES = 4
_INT64_BYTES = 8


def workspace_bytes(kernel: str, attributes: Attributes) -> int:
    """Scratch bytes that a kernel takes at most, 0 if it has no scratch operand.

    Args:
        kernel: registry key, name and implementation.
        attributes: those the kernel is called with.

    Raises:
        TwinstreamError: the kernel, or the attention implementation it is to use, is unknown, or
            an attribute is missing.

    >>> workspace_bytes("embed_forward/eager", {})
    0
    """
    formulas = _formulas()
    if kernel not in formulas:
        raise TwinstreamError(
            f"kernel '{kernel}' has no workspace formula; known kernels: {', '.join(formulas)}"
        )
    return formulas[kernel](attributes)


_T = TypeVar("_T", int, float, str, bool)


def typed_attribute(attributes: Attributes, name: str, kind: type[_T]) -> _T:
    """Return an attribute of a kernel call, which must be there and be of that very type.

    An int is taken where a float is expected.
    """
    value = required_attributes(attributes, name)[name]
    if kind is float and type(value) is int:
        return kind(value)
    if type(value) is not kind:
        raise TwinstreamError(f"kernel attribute '{name}' is {value!r}, expected {kind.__name__}")
    return value


def required_attributes(attributes: Attributes, *names: str) -> dict[str, int | float | str | bool]:
    """Return some attributes of a kernel call, all of which must be there."""
    if missing := [name for name in names if name not in attributes]:
        raise TwinstreamError(
            f"kernel attributes {missing} are missing; given: {sorted(attributes)}"
        )
    return {name: attributes[name] for name in names}


def head_block_rows(vocab_size: int, row_slice: int) -> int:
    """Rows of logits that the head holds in float32 at a time."""
    return max(1, min(row_slice, HEAD_BLOCK_ELEMENTS // vocab_size))


def embed_block_columns(num_tokens: int, d_model: int) -> int:
    """Columns of the embedding gradient that embed_backward works on at a time."""
    return max(1, min(d_model, EMBED_BLOCK_ELEMENTS // num_tokens))


@dataclass(frozen=True)
class _Block:
    """The sizes in a block kernel's attributes."""

    tokens: int
    d: int
    q: int
    k: int
    f: int
    itemsize: int
    qk_norm: bool
    attention: str
    attention_shape: AttentionShape


def _block(attributes: Attributes) -> _Block:
    head_dim = typed_attribute(attributes, "head_dim", int)
    return _Block(
        tokens=typed_attribute(attributes, "num_tokens", int),
        d=typed_attribute(attributes, "d_model", int),
        q=typed_attribute(attributes, "num_heads", int) * head_dim,
        k=typed_attribute(attributes, "num_kv_heads", int) * head_dim,
        f=typed_attribute(attributes, "d_ff", int),
        itemsize=_itemsize(attributes),
        qk_norm=typed_attribute(attributes, "qk_norm", bool),
        attention=typed_attribute(attributes, "attention", str),
        attention_shape=attention_shape(attributes),
    )


def attention_shape(attributes: Attributes) -> AttentionShape:
    """The attention inside a block kernel that is called with these attributes.

    Raises:
        TwinstreamError: an attribute is missing or of another type.
    """
    tokens, seq_len = (typed_attribute(attributes, name, int) for name in ("num_tokens", "seq_len"))
    queries = min(tokens, seq_len)
    return AttentionShape(
        num_sequences=max(1, tokens // seq_len),
        num_queries=queries,
        num_keys=typed_attribute(attributes, "chunk_start", int) + queries,
        num_heads=typed_attribute(attributes, "num_heads", int),
        num_kv_heads=typed_attribute(attributes, "num_kv_heads", int),
        head_dim=typed_attribute(attributes, "head_dim", int),
        dtype=typed_attribute(attributes, "dtype", str),
        sliced=tokens < seq_len,
    )


def _block_forward(attributes: Attributes) -> int:
    block = _block(attributes)
    swiglu = _aligned(block.tokens * block.f * block.itemsize)
    return max(_normed(block), _rotated_and_attention(block), swiglu)


def _block_recompute_attention(attributes: Attributes) -> int:
    return _normed(_block(attributes))


def _block_recompute_input(attributes: Attributes) -> int:
    block = _block(attributes)
    return max(_normed(block), _rotated_and_attention(block))


def _block_backward(attributes: Attributes) -> int:
    block = _block(attributes)
    tokens, itemsize = block.tokens, block.itemsize
    ffn = _aligned(tokens * 2 * block.f * itemsize) + _normed(block)
    d_qkv = _aligned(tokens * (block.q + 2 * block.k) * itemsize)
    d_attention_and_rotated_q = 2 * _aligned(tokens * block.q * itemsize)
    normed = _normed(block)
    if block.qk_norm:
        normed += _aligned(tokens * block.k * itemsize)
    attention = d_attention_and_rotated_q + _attention_backward(block)
    return max(ffn, d_qkv + max(attention, normed))


def _normed(block: _Block) -> int:
    return _aligned(block.tokens * block.d * block.itemsize)


def _rotated_and_attention(block: _Block) -> int:
    return _aligned(block.tokens * block.q * block.itemsize) + _attention_forward(block)


def _attention_forward(block: _Block) -> int:
    return attention_scratch_bytes(block.attention, "forward", block.attention_shape)


def _attention_backward(block: _Block) -> int:
    return attention_scratch_bytes(block.attention, "backward", block.attention_shape)


def _head_loss(attributes: Attributes) -> int:
    """Normed rows and logits of a slice, a float32 block of logits, the loss of every token."""
    tokens = typed_attribute(attributes, "num_tokens", int)
    vocab_size = typed_attribute(attributes, "vocab_size", int)
    rows, itemsize = (
        min(typed_attribute(attributes, "row_slice", int), tokens),
        _itemsize(attributes),
    )
    normed = _aligned(rows * typed_attribute(attributes, "d_model", int) * itemsize)
    logits = _aligned(rows * vocab_size * itemsize)
    block = _float32(head_block_rows(vocab_size, rows) * vocab_size)
    return normed + logits + block + _float32(tokens)


def _embed_backward(attributes: Attributes) -> int:
    """Three index vectors; two float32 blocks of columns and one in the gradient's dtype."""
    tokens, d_model = (
        typed_attribute(attributes, "num_tokens", int),
        typed_attribute(attributes, "d_model", int),
    )
    elements = tokens * embed_block_columns(tokens, d_model)
    indices = 3 * _aligned(tokens * _INT64_BYTES)
    return indices + 2 * _float32(elements) + _aligned(elements * _itemsize(attributes))


def _none(attributes: Attributes) -> int:
    """No scratch: temporaries are a few blocks of bounded size."""
    return 0


def _formulas() -> dict[str, Callable[[Attributes], int]]:
    return {
        "embed_forward/eager": _none,
        "block_forward/eager": _block_forward,
        "block_recompute_attention/eager": _block_recompute_attention,
        "block_recompute_input/eager": _block_recompute_input,
        "block_backward/eager": _block_backward,
        "head_loss/eager": _head_loss,
        "embed_backward/eager": _embed_backward,
        "adamw_step/eager": _none,
        "adamw_step/host": _none,
        "accumulate/host": _none,
    }


def _itemsize(attributes: Attributes) -> int:
    return ITEMSIZE_BYTES[typed_attribute(attributes, "dtype", str)]


def _float32(elements: int) -> int:
    return _aligned(elements * _FLOAT32_BYTES)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
