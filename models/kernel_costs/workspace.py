"""The scratch that kernels take, so that it can be planned for without torch.

Each formula mirrors, buffer by buffer, what the kernel of that name takes from its `scratch`
operand; tests hold the two together to the byte. Buffers whose lifetimes do not overlap share
their bytes, hence the maxima.

Legend: T tokens of the chunk, d model width, q width of Q, k width of K (= of V), f FFN width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from twinstream.models.adapters.adapter_layout import low_widths
from twinstream.models.adapters.lora import lora_of_attributes
from twinstream.models.adapters.quantized_base import BaseFormat
from twinstream.models.kernel_costs.attention_scratch import attention_scratch_bytes
from twinstream.models.kernel_costs.attention_shape import AttentionPass, AttentionShape
from twinstream.models.kernel_costs.attributes import (
    TEMPORARY_BYTES,
    Attributes,
    base_format,
    gradient_dtype_name,
    is_frozen,
    most_packed,
    typed_attribute,
)
from twinstream.models.layout import aligned
from twinstream.models.recipe import OptimizerState
from twinstream.models.spec import ITEMSIZE_BYTES
from twinstream.schedule.errors import TwinstreamError

# Float32 logits that the head works on at a time: 32 MiB.
HEAD_BLOCK_ELEMENTS = 2**23
# Programs that share the rows of a Triton kernel which sums over them: two for each of the 132
# multiprocessors of an H100 or H200. A constant, because the order of the sums follows from it.
SUM_PROGRAMS = 264
# Values that one program of gradient_squares sums up: the order of the sum follows from it.
SUM_SHARE_ELEMENTS = 2**16
# Elements of an optimizer's 8-bit state that share a scale.
CODE_BLOCK_ELEMENTS = 256
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
    if TEMPORARY_BYTES in attributes:  # a module's part: its scratch is torch's allocator's
        return 0
    if kernel not in _FORMULAS:
        raise TwinstreamError(
            f"kernel '{kernel}' has no workspace formula; known kernels: {', '.join(_FORMULAS)}"
        )
    return _FORMULAS[kernel](attributes)


def state_bytes(state: OptimizerState, dtype: str, num_elements: int, num_states: int = 2) -> int:
    """Return the bytes of optimizer state of so many parameters, from the start of a block on.

    Args:
        num_states: numbers of each, where they are in the model's dtype; AdamW has m and v.

    >>> state_bytes("8bit", "bfloat16", 1024) / 1024
    2.03125
    """
    if state == "float32_master":
        return 3 * num_elements * _FLOAT32_BYTES
    if state == "8bit":
        return 2 * (num_elements + code_blocks(num_elements) * _FLOAT32_BYTES)
    return num_states * num_elements * ITEMSIZE_BYTES[dtype]


def code_blocks(num_elements: int) -> int:
    """Blocks of 8-bit codes, each with a scale."""
    return -(-num_elements // CODE_BLOCK_ELEMENTS)


def head_block_rows(vocab_size: int, row_slice: int) -> int:
    """Rows of logits that the head holds in float32 at a time."""
    return max(1, min(row_slice, HEAD_BLOCK_ELEMENTS // vocab_size))


def partial_sums(num_rows: int) -> int:
    """Rows of float32 partial sums that a Triton kernel leaves, one of each program."""
    return min(num_rows, SUM_PROGRAMS)


def sum_shares(num_elements: int) -> int:
    """Stretches of a gradient whose squares are summed up each by itself."""
    return -(-num_elements // SUM_SHARE_ELEMENTS)


def embed_block_columns(num_tokens: int, d_model: int) -> int:
    """Columns of the embedding gradient that embed_backward works on at a time."""
    return max(1, min(d_model, EMBED_BLOCK_ELEMENTS // num_tokens))


@dataclass(frozen=True)
class _Block:
    """The sizes in a block kernel's attributes."""

    tokens: int
    d: int
    f: int
    qk_norm: bool
    qkv_bias: bool
    attention: str
    attention_shape: AttentionShape
    frozen: bool
    low_widths: Mapping[str, int]
    base: BaseFormat

    @property
    def room(self) -> int:
        """Bytes of the largest matrix, where it is made anew from codes."""
        if self.base == "model":
            return 0
        widest = max(2 * self.f, self.q + 2 * self.k, self.q)
        return aligned(widest * self.d * self.itemsize)

    def low(self, site: str) -> int:
        """Bytes of the gradient of x A^T of a site's adapters."""
        return aligned(self.tokens * self.low_widths.get(site, 0) * self.itemsize)

    @property
    def q(self) -> int:
        return self.attention_shape.num_heads * self.attention_shape.head_dim

    @property
    def k(self) -> int:
        return self.attention_shape.num_kv_heads * self.attention_shape.head_dim

    @property
    def itemsize(self) -> int:
        return self.attention_shape.itemsize_bytes

    def attention_scratch(self, of_pass: AttentionPass) -> int:
        return attention_scratch_bytes(self.attention, of_pass, self.attention_shape)


def _block(attributes: Attributes) -> _Block:
    return _Block(
        tokens=typed_attribute(attributes, "num_tokens", int),
        d=typed_attribute(attributes, "d_model", int),
        f=typed_attribute(attributes, "d_ff", int),
        qk_norm=typed_attribute(attributes, "qk_norm", bool),
        qkv_bias=typed_attribute(attributes, "qkv_bias", bool),
        attention=typed_attribute(attributes, "attention", str),
        attention_shape=attention_shape(attributes),
        frozen=is_frozen(attributes),
        low_widths=_low_widths(attributes),
        base=base_format(attributes),
    )


def _low_widths(attributes: Attributes) -> Mapping[str, int]:
    """Columns of x A^T at each site of a block's adapters."""
    lora = lora_of_attributes(attributes)
    return {} if lora is None else low_widths(lora)


def attention_shape(attributes: Attributes) -> AttentionShape:
    """The attention inside a block kernel that is called with these attributes.

    Raises:
        TwinstreamError: an attribute is missing or of another type.
    """
    tokens, seq_len = (typed_attribute(attributes, name, int) for name in ("num_tokens", "seq_len"))
    most = most_packed(attributes)
    queries = tokens if most else min(tokens, seq_len)
    return AttentionShape(
        num_sequences=tokens // queries,
        num_queries=queries,
        num_keys=typed_attribute(attributes, "chunk_start", int) + queries,
        num_heads=typed_attribute(attributes, "num_heads", int),
        num_kv_heads=typed_attribute(attributes, "num_kv_heads", int),
        head_dim=typed_attribute(attributes, "head_dim", int),
        dtype=typed_attribute(attributes, "dtype", str),
        sliced=tokens < seq_len,
        most_packed=most,
        longest_tokens=seq_len if most else 0,
    )


def _block_forward(attributes: Attributes) -> int:
    block = _block(attributes)
    swiglu = aligned(block.tokens * block.f * block.itemsize)
    return block.room + max(_normed(block), _rotated_and_attention(block), swiglu)


def _block_recompute_attention(attributes: Attributes) -> int:
    block = _block(attributes)
    return block.room + _normed(block)


def _block_recompute_input(attributes: Attributes) -> int:
    block = _block(attributes)
    return block.room + max(_normed(block), _rotated_and_attention(block))


def _block_backward(attributes: Attributes) -> int:
    return _backward_with(_block(attributes), 0, lambda width: 0)


def _block_backward_triton(attributes: Attributes) -> int:
    """Room for SwiGLU's product, where a gradient needs it, and for sums."""
    block = _block(attributes)
    if not block.frozen:
        product = aligned(block.tokens * block.f * block.itemsize)
        return _backward_with(block, product, lambda width: _partial_sums(block.tokens, width))
    product = aligned(block.tokens * block.f * block.itemsize) if block.low("down") else 0
    return _backward_with(block, product, lambda width: 0)


def _backward_with(block: _Block, product: int, sums_of: Callable[[int], int]) -> int:
    """`sums_of` is what the gradient of a vector of so many weights takes to be summed up.

    Beside the gradients of gate and up: SwiGLU's product, then normed rows; and what adapters take.
    """
    tokens, itemsize = block.tokens, block.itemsize
    rows = _normed(block) + max(block.low("gate_up"), sums_of(block.d))
    ffn = aligned(tokens * 2 * block.f * itemsize) + max(product + block.low("down"), rows)
    d_qkv = aligned(tokens * (block.q + 2 * block.k) * itemsize)
    d_attention_and_rotated_q = 2 * aligned(tokens * block.q * itemsize)
    normed, widths = _normed(block), [block.d]
    if block.qk_norm:
        normed += aligned(tokens * block.k * itemsize)
        widths.append(block.attention_shape.head_dim)
    if block.qkv_bias:
        widths.append(block.q + 2 * block.k)
    scratch = max(block.attention_scratch("backward"), block.low("o"))
    beside_rows = max(block.low("qkv"), *(sums_of(width) for width in widths))
    return block.room + max(
        ffn, d_qkv + max(d_attention_and_rotated_q + scratch, normed + beside_rows)
    )


def _partial_sums(num_rows: int, width: int) -> int:
    return _float32(partial_sums(num_rows) * width)


def _normed(block: _Block) -> int:
    return aligned(block.tokens * block.d * block.itemsize)


def _rotated_and_attention(block: _Block) -> int:
    return aligned(block.tokens * block.q * block.itemsize) + block.attention_scratch("forward")


def _head_loss(attributes: Attributes) -> int:
    """Normed rows, logits and rstd of a slice, losses, d_norm; a float32 block of logits."""
    return _head_buffers(attributes) + _float32(_head_block_elements(attributes))


def _head_loss_triton(attributes: Attributes) -> int:
    """The same without a block of logits; with partial sums of the norm's gradient."""
    if is_frozen(attributes):
        return _head_buffers(attributes)
    d_model = typed_attribute(attributes, "d_model", int)
    return _head_buffers(attributes) + _partial_sums(_head_rows(attributes), d_model)


def _head_evaluate(attributes: Attributes) -> int:
    """What the loss alone takes, and a float32 block of logits."""
    return _head_forward_buffers(attributes) + _float32(_head_block_elements(attributes))


def _head_buffers(attributes: Attributes) -> int:
    if is_frozen(attributes):
        return _head_forward_buffers(attributes)
    d_norm = _float32(typed_attribute(attributes, "d_model", int))
    return _head_forward_buffers(attributes) + d_norm


def _head_forward_buffers(attributes: Attributes) -> int:
    tokens, vocab_size, d_model = (
        typed_attribute(attributes, name, int) for name in ("num_tokens", "vocab_size", "d_model")
    )
    rows, itemsize = _head_rows(attributes), _itemsize(attributes)
    slices = aligned(rows * d_model * itemsize) + aligned(rows * vocab_size * itemsize)
    return slices + _float32(rows) + _float32(tokens)


def _head_rows(attributes: Attributes) -> int:
    row_slice, tokens = (typed_attribute(attributes, n, int) for n in ("row_slice", "num_tokens"))
    return min(row_slice, tokens)


def _head_block_elements(attributes: Attributes) -> int:
    vocab_size = typed_attribute(attributes, "vocab_size", int)
    return head_block_rows(vocab_size, _head_rows(attributes)) * vocab_size


def _embed_backward(attributes: Attributes) -> int:
    """Sorted tokens; two float32 blocks of columns, one in each dtype of rows."""
    tokens, d_model = (typed_attribute(attributes, n, int) for n in ("num_tokens", "d_model"))
    elements = tokens * embed_block_columns(tokens, d_model)
    dtypes = {typed_attribute(attributes, "dtype", str), gradient_dtype_name(attributes)}
    rows = sum(aligned(elements * ITEMSIZE_BYTES[dtype]) for dtype in dtypes)
    return _sorted_tokens(tokens) + 2 * _float32(elements) + rows


def _embed_backward_triton(attributes: Attributes) -> int:
    return _sorted_tokens(typed_attribute(attributes, "num_tokens", int))


def _sorted_tokens(tokens: int) -> int:
    """Ids, order, and the last of each run."""
    return 3 * aligned(tokens * _INT64_BYTES)


def _gradient_squares(attributes: Attributes) -> int:
    return _float32(sum_shares(typed_attribute(attributes, "num_elements", int)))


def _itemsize(attributes: Attributes) -> int:
    return ITEMSIZE_BYTES[typed_attribute(attributes, "dtype", str)]


def _float32(elements: int) -> int:
    return aligned(elements * _FLOAT32_BYTES)


def _none(attributes: Attributes) -> int:
    """No scratch: temporaries are a few blocks of bounded size."""
    return 0


_EAGER: Mapping[str, Callable[[Attributes], int]] = {
    "embed_forward": _none,
    "block_forward": _block_forward,
    "block_recompute_attention": _block_recompute_attention,
    "block_recompute_input": _block_recompute_input,
    "block_backward": _block_backward,
    "head_loss": _head_loss,
    "head_evaluate": _head_evaluate,
    "embed_backward": _embed_backward,
    "gradient_squares": _gradient_squares,
    "gradient_norm": _none,
    "add_gradients": _none,
    "no_squares": _none,
    "shard_squares": _none,
    "sum_squares": _none,
    "adamw_step": _none,
    "element_step": _none,
    "muon_step": _none,
}
_TRITON = {
    **_EAGER,
    "block_backward": _block_backward_triton,
    "head_loss": _head_loss_triton,
    "head_evaluate": _head_forward_buffers,
    "embed_backward": _embed_backward_triton,
}
_FORMULAS = {
    **{f"{kernel}/eager": formula for kernel, formula in _EAGER.items()},
    **{f"{kernel}/triton": formula for kernel, formula in _TRITON.items()},
    "adamw_step/host": _none,
    "accumulate/host": _none,
}
