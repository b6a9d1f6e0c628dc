"""The scratch that kernels take, so that it can be planned for without torch.

Each formula mirrors, buffer by buffer, what the kernel of that name takes from its `scratch`
operand; tests hold the two together to the byte. Buffers whose lifetimes do not overlap share
their bytes, hence the maxima.

Legend: T tokens of the chunk, d model width, q width of Q, k width of K (= of V), f FFN width.
"""

from collections.abc import Callable, Mapping

from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.kernel_costs.attention_shape import AttentionPass
from twinstream.models.kernel_costs.attributes import (
    TEMPORARY_BYTES,
    Attributes,
    typed_attribute,
)
from twinstream.models.kernel_costs.scratch.block_sizes import (
    BlockSizes,
    attention_shape,
    block_sizes,
)
from twinstream.models.kernel_costs.scratch.end_scratch import (
    embed_backward,
    embed_backward_triton,
    head_evaluate,
    head_forward_buffers,
    head_logits,
    head_loss,
    head_loss_triton,
    with_pairs,
)
from twinstream.models.kernel_costs.scratch.part_scratch import (
    PARTS_ATTENTION,
    PARTS_EAGER,
    PARTS_TRITON,
)
from twinstream.models.kernel_costs.scratch_sizes import (
    INT64_BYTES,
    float32_bytes,
    partial_sum_bytes,
    sum_shares,
)
from twinstream.models.layout import aligned
from twinstream.models.options import Experts
from twinstream.schedule.cluster.projecting import attributes_of_ranks
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import KernelCall

# The kernels that call attention, and what of it.
_PASS_OF: Mapping[str, AttentionPass] = {
    "block_forward": "forward",
    "block_recompute_input": "forward",
    "block_backward": "backward",
    **PARTS_ATTENTION,
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
    return max(map(_FORMULAS[kernel], attributes_of_ranks(attributes)))


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
    shapes = map(attention_shape, attributes_of_ranks(call.attributes))
    return max(attention_limits(name).allocates(of_pass, shape) for shape in shapes)


def _block_forward(attributes: Attributes) -> int:
    """The experts' outputs lie beside their products."""
    block = block_sizes(attributes)
    output = aligned(block.tokens * block.f * block.itemsize)
    if block.ep > 1:  # it is written by another task
        output = 0
    elif block.experts is not None:
        output = max(output, block.expert_outputs)
    after = block.routed_rows + max(block.projections, output)
    return block.room + max(block.normed, block.rotated_and_attention, after)


def _block_combine_forward(attributes: Attributes) -> int:
    block = block_sizes(attributes)
    assert block.experts is not None
    normed = block.normed  # taken for a gate alone, and by all
    return (
        block.room
        + block.routed_rows
        + max(normed, aligned(block.tokens * block.f * block.itemsize))
    )


def _block_dispatch_backward(attributes: Attributes) -> int:
    block = block_sizes(attributes)
    return block.room + block.routed_rows + block.normed


def _experts_forward(attributes: Attributes) -> int:
    """Gate and up, and their product, of the rows of one rank; matrices made anew from codes."""
    block = block_sizes(attributes)
    assert block.experts is not None
    own = block.experts.count // block.ep * block.experts.d_ff * block.d * block.itemsize
    anew = aligned(2 * own) + aligned(own) if block.experts_base != "model" else 0
    widths = (2 * block.experts.d_ff, block.experts.d_ff, block.expert_rank)
    return sum(map(block.rows, widths)) + anew


def _shared_experts_backward(attributes: Attributes) -> int:
    """The gradients of gate and up, of weights, and the order of rows as well."""
    block = block_sizes(attributes)
    assert block.experts is not None
    rows = block.tokens * block.experts.per_token
    order = float32_bytes(rows) + aligned(rows * INT64_BYTES)
    return _experts_forward(attributes) + block.rows(2 * block.experts.d_ff) + order


def _block_recompute_experts(attributes: Attributes) -> int:
    block = block_sizes(attributes)
    routed = block.routed_rows if block.ep == 1 else 0
    return block.room + routed + block.projections


def _block_recompute_attention(attributes: Attributes) -> int:
    return _block_recompute_experts(attributes)


def _block_recompute_input(attributes: Attributes) -> int:
    block = block_sizes(attributes)
    projections = _block_recompute_experts(attributes) - block.room
    return block.room + max(block.normed, projections, block.rotated_and_attention)


def _block_backward(attributes: Attributes) -> int:
    return _backward_with(block_sizes(attributes), 0, lambda width: 0)


def _block_backward_triton(attributes: Attributes) -> int:
    """Room for SwiGLU's product, where a gradient needs it, and for sums."""
    block = block_sizes(attributes)
    if not block.frozen:
        product = aligned(block.tokens * block.f * block.itemsize)
        return _backward_with(block, product, lambda width: partial_sum_bytes(block.tokens, width))
    product = aligned(block.tokens * block.f * block.itemsize) if block.low("down") else 0
    return _backward_with(block, product, lambda width: 0)


def _backward_with(block: BlockSizes, product: int, sums_of: Callable[[int], int]) -> int:
    """`sums_of` is what the gradient of a vector of so many weights takes to be summed up.

    Beside the gradients of gate and up: SwiGLU's product, then normed rows; and what adapters take.
    """
    tokens, itemsize = block.tokens, block.itemsize
    if block.experts is None:
        rows = block.normed + max(block.low("gate_up"), sums_of(block.d))
        ffn = aligned(tokens * 2 * block.f * itemsize) + max(product + block.low("down"), rows)
    else:
        ffn = _experts_backward(block, block.experts, product, sums_of)
    d_qkv = aligned(tokens * (block.q + 2 * block.k) * itemsize)
    d_attention_and_rotated_q = 2 * aligned(tokens * block.q * itemsize)
    normed, widths = block.normed, [block.d]
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
    block: BlockSizes, experts: Experts, product: int, sums_of: Callable[[int], int]
) -> int:
    """Where rows go, normed rows and their gradient; then routed experts, or those of all tokens.

    Of routed ones the gradients of logits and of weights; of gate and up and of rows; the product.
    """
    tokens, itemsize = block.tokens, block.itemsize
    logits = aligned(tokens * experts.count * itemsize) + float32_bytes(tokens * experts.per_token)
    routed = logits + (0 if block.ep > 1 else block.through_experts)
    gate_up = aligned(tokens * itemsize) + aligned(tokens * 2 * block.f * itemsize)
    product = 0 if experts.shared_gate else product
    of_all = gate_up + max(product + block.low("down"), block.low("gate_up")) if block.f else 0
    kept = block.routed_rows + 2 * block.normed
    sums = (gate_up if block.f else 0) + sums_of(block.d)
    return kept + max(routed, of_all, sums)


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
    "block_combine_forward": _block_combine_forward,
    "block_dispatch_backward": _block_dispatch_backward,
    "experts_forward": _experts_forward,
    "experts_backward": _shared_experts_backward,
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
    "sum_pieces": _none,
    "adamw_step": _none,
    "element_step": _none,
    "muon_step": _none,
    **PARTS_EAGER,
}
_TRITON = {
    **_EAGER,
    "block_backward": _block_backward_triton,
    "head_loss": head_loss_triton,
    "head_evaluate": head_forward_buffers,
    "head_dpo": with_pairs(head_loss_triton),
    "head_dpo_evaluate": with_pairs(head_forward_buffers),
    "embed_backward": embed_backward_triton,
    **PARTS_TRITON,
}
_FORMULAS = {
    **{f"{kernel}/eager": formula for kernel, formula in _EAGER.items()},
    **{f"{kernel}/triton": formula for kernel, formula in _TRITON.items()},
    "adamw_step/host": _none,
    "element_step/host": _none,
    "accumulate/host": _none,
}
