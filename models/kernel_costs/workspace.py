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
from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.kernel_costs.attention_shape import AttentionPass, AttentionShape
from twinstream.models.kernel_costs.attributes import (
    TEMPORARY_BYTES,
    Attributes,
    base_format,
    experts_of,
    is_frozen,
    most_packed,
    typed_attribute,
)
from twinstream.models.kernel_costs.end_scratch import (
    embed_backward,
    embed_backward_triton,
    head_evaluate,
    head_forward_buffers,
    head_logits,
    head_loss,
    head_loss_triton,
    with_pairs,
)
from twinstream.models.kernel_costs.scratch_sizes import (
    INT32_BYTES,
    INT64_BYTES,
    float32_bytes,
    partial_sum_bytes,
    sum_shares,
)
from twinstream.models.layout import aligned
from twinstream.models.options import Experts
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import KernelCall

# The kernels that call attention, and what of it.
_PASS_OF: Mapping[str, AttentionPass] = {
    "block_forward": "forward",
    "block_recompute_input": "forward",
    "block_backward": "backward",
}


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


def library_bytes(call: KernelCall) -> int:
    """Return the bytes beside the arenas that one call takes at most: attention's, and a module's.

    Raises:
        TwinstreamError: an attribute of the call is missing, or its attention is unknown.
    """
    if TEMPORARY_BYTES in call.attributes:
        return typed_attribute(call.attributes, TEMPORARY_BYTES, int)
    of_pass = _PASS_OF.get(call.kernel.split("/")[0])
    if of_pass is None:
        return 0
    name = typed_attribute(call.attributes, "attention", str)
    return attention_limits(name).allocates(of_pass, attention_shape(call.attributes))


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
    experts_base: BaseFormat
    experts: Experts | None
    expert_rank: int  # of adapters of experts; 0 without any
    qk_norm_rows: bool

    @property
    def room(self) -> int:
        """Bytes of the largest matrix, where it is made anew from codes."""
        widest = 0 if self.base == "model" else max(2 * self.f, self.q + 2 * self.k, self.q)
        if self.experts is not None and self.experts_base != "model":
            widest = max(widest, self.experts.count * 2 * self.experts.d_ff)
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
        return attention_limits(self.attention).scratch(of_pass, self.attention_shape)


def _block(attributes: Attributes) -> _Block:
    experts, lora = experts_of(attributes), lora_of_attributes(attributes)
    d_ff = typed_attribute(attributes, "d_ff", int) if experts is None else experts.shared_d_ff
    adapts_experts = lora is not None and experts is not None and "experts" in lora.targets
    return _Block(
        tokens=typed_attribute(attributes, "num_tokens", int),
        d=typed_attribute(attributes, "d_model", int),
        f=d_ff,
        qk_norm=typed_attribute(attributes, "qk_norm", bool),
        qkv_bias=typed_attribute(attributes, "qkv_bias", bool),
        attention=typed_attribute(attributes, "attention", str),
        attention_shape=attention_shape(attributes),
        frozen=is_frozen(attributes),
        low_widths={} if lora is None else low_widths(lora, d_ff),
        base=base_format(attributes),
        experts_base=base_format(attributes, "experts_base"),
        experts=experts,
        expert_rank=lora.rank if lora is not None and adapts_experts else 0,
        qk_norm_rows=bool(attributes.get("qk_norm_rows", False)),
    )


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
    """The experts' outputs lie beside their products."""
    block = _block(attributes)
    output = aligned(block.tokens * block.f * block.itemsize)
    if block.experts is not None:
        widths = (block.experts.d_ff, block.d)
        routed = sum(_rows(block, width) for width in widths)
        output = max(output, routed + _rows(block, block.expert_rank))
    after = _routed_rows(block) + max(_projections(block), output)
    return block.room + max(_normed(block), _rotated_and_attention(block), after)


def _block_recompute_experts(attributes: Attributes) -> int:
    block = _block(attributes)
    return block.room + _routed_rows(block) + _projections(block)


def _block_recompute_attention(attributes: Attributes) -> int:
    return _block_recompute_experts(attributes)


def _block_recompute_input(attributes: Attributes) -> int:
    block = _block(attributes)
    projections = _routed_rows(block) + _projections(block)
    return block.room + max(_normed(block), projections, _rotated_and_attention(block))


def _projections(block: _Block) -> int:
    """Normed rows, and beside them those gathered for experts and what their adapters take."""
    if block.experts is None:
        return _normed(block)
    return _normed(block) + _rows(block, block.d) + _rows(block, block.expert_rank)


def _routed_rows(block: _Block) -> int:
    """Where rows go: three orders of them and where each expert's end; a gate of every token."""
    experts = block.experts
    if experts is None:
        return 0
    orders = 3 * aligned(block.tokens * experts.per_token * INT64_BYTES)
    gate = float32_bytes(block.tokens) if experts.shared_gate else 0
    return orders + aligned(experts.count * INT32_BYTES) + gate


def _rows(block: _Block, width: int) -> int:
    """So many columns of every row that goes to an expert."""
    assert block.experts is not None
    return aligned(block.tokens * block.experts.per_token * width * block.itemsize)


def _block_backward(attributes: Attributes) -> int:
    return _backward_with(_block(attributes), 0, lambda width: 0)


def _block_backward_triton(attributes: Attributes) -> int:
    """Room for SwiGLU's product, where a gradient needs it, and for sums."""
    block = _block(attributes)
    if not block.frozen:
        product = aligned(block.tokens * block.f * block.itemsize)
        return _backward_with(block, product, lambda width: partial_sum_bytes(block.tokens, width))
    product = aligned(block.tokens * block.f * block.itemsize) if block.low("down") else 0
    return _backward_with(block, product, lambda width: 0)


def _backward_with(block: _Block, product: int, sums_of: Callable[[int], int]) -> int:
    """`sums_of` is what the gradient of a vector of so many weights takes to be summed up.

    Beside the gradients of gate and up: SwiGLU's product, then normed rows; and what adapters take.
    """
    tokens, itemsize = block.tokens, block.itemsize
    if block.experts is None:
        rows = _normed(block) + max(block.low("gate_up"), sums_of(block.d))
        ffn = aligned(tokens * 2 * block.f * itemsize) + max(product + block.low("down"), rows)
    else:
        ffn = _experts_backward(block, block.experts, product, sums_of)
    d_qkv = aligned(tokens * (block.q + 2 * block.k) * itemsize)
    d_attention_and_rotated_q = 2 * aligned(tokens * block.q * itemsize)
    normed, widths = _normed(block), [block.d]
    if block.qk_norm:
        normed += aligned(tokens * block.k * itemsize)
        widths.append(block.q if block.qk_norm_rows else block.attention_shape.head_dim)
    if block.qkv_bias:
        widths.append(block.q + 2 * block.k)
    scratch = max(block.attention_scratch("backward"), block.low("o"))
    beside_rows = max(block.low("qkv"), *(sums_of(width) for width in widths))
    return block.room + max(
        ffn, d_qkv + max(d_attention_and_rotated_q + scratch, normed + beside_rows)
    )


def _experts_backward(
    block: _Block, experts: Experts, product: int, sums_of: Callable[[int], int]
) -> int:
    """Where rows go, normed rows and their gradient; then routed experts, or those of all tokens.

    Of routed ones the gradients of logits and of weights; of gate and up and of rows; the product.
    """
    tokens, itemsize = block.tokens, block.itemsize
    logits = aligned(tokens * experts.count * itemsize) + float32_bytes(tokens * experts.per_token)
    low = _rows(block, block.expert_rank)
    routed = (
        logits + _rows(block, 2 * experts.d_ff) + _rows(block, block.d)
        + _rows(block, experts.d_ff) + low
    )  # fmt: skip
    gate_up = aligned(tokens * itemsize) + aligned(tokens * 2 * block.f * itemsize)
    product = 0 if experts.shared_gate else product
    of_all = gate_up + max(product + block.low("down"), block.low("gate_up")) if block.f else 0
    kept = _routed_rows(block) + 2 * _normed(block)
    sums = (gate_up if block.f else 0) + sums_of(block.d)
    return kept + max(routed, of_all, sums)


def _normed(block: _Block) -> int:
    return aligned(block.tokens * block.d * block.itemsize)


def _rotated_and_attention(block: _Block) -> int:
    return aligned(block.tokens * block.q * block.itemsize) + block.attention_scratch("forward")


def _gradient_squares(attributes: Attributes) -> int:
    return float32_bytes(sum_shares(typed_attribute(attributes, "num_elements", int)))


def _none(attributes: Attributes) -> int:
    """No scratch: temporaries are a few blocks of bounded size."""
    return 0


_EAGER: Mapping[str, Callable[[Attributes], int]] = {
    "embed_forward": _none,
    "block_forward": _block_forward,
    "block_recompute_experts": _block_recompute_experts,
    "block_recompute_attention": _block_recompute_attention,
    "block_recompute_input": _block_recompute_input,
    "block_backward": _block_backward,
    "head_loss": head_loss,
    "head_evaluate": head_evaluate,
    "head_logits": head_logits,
    "head_dpo": with_pairs(head_loss),
    "head_dpo_evaluate": with_pairs(head_evaluate),
    "embed_backward": embed_backward,
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
    "head_loss": head_loss_triton,
    "head_evaluate": head_forward_buffers,
    "head_dpo": with_pairs(head_loss_triton),
    "head_dpo_evaluate": with_pairs(head_forward_buffers),
    "embed_backward": embed_backward_triton,
}
_FORMULAS = {
    **{f"{kernel}/eager": formula for kernel, formula in _EAGER.items()},
    **{f"{kernel}/triton": formula for kernel, formula in _TRITON.items()},
    "adamw_step/host": _none,
    "accumulate/host": _none,
}
