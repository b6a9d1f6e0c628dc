"""The scratch of kernels of parts: of a block, of the embedding and of the head.

A part norms its input anew, and the reciprocals of the rows' norms are scratch, too.
"""

from collections.abc import Callable, Mapping
from functools import partial

from twinstream.models.decoders.sizes import ITEMSIZE_BYTES
from twinstream.models.kernel_costs.attention_memory import aligned_float32, merge_block_rows
from twinstream.models.kernel_costs.attention_shape import AttentionPass
from twinstream.models.kernel_costs.attributes import (
    NOT_CAUSAL,
    NUM_SLICES,
    Attributes,
    count_of,
    experts_of,
    typed_attribute,
)
from twinstream.models.kernel_costs.scratch.block_sizes import BlockSizes, block_sizes
from twinstream.models.kernel_costs.scratch.end_scratch import (
    embed_backward,
    embed_backward_triton,
    head_evaluate,
    with_pairs,
)
from twinstream.models.kernel_costs.scratch_sizes import float32_bytes, partial_sum_bytes
from twinstream.models.layout import aligned

Formula = Callable[[Attributes], int]


def _attention_forward(attributes: Attributes) -> int:
    block = block_sizes(attributes)
    return _rstd(block) + max(block.normed, block.rotated_and_attention)


def _kv_forward(attributes: Attributes) -> int:
    block = block_sizes(attributes)
    return _rstd(block) + block.normed


def _mlp_forward(attributes: Attributes) -> int:
    block = block_sizes(attributes)
    outputs = block.expert_outputs if block.experts is not None else 0
    most = max(block.projections, _width(block, block.f), outputs)
    return _rstd(block) + block.routed_rows + most


def _mlp_combine(attributes: Attributes) -> int:
    block = block_sizes(attributes)
    return _rstd(block) + block.routed_rows + max(block.normed, _width(block, block.f))


def _mlp_recompute(attributes: Attributes) -> int:
    block = block_sizes(attributes)
    routed = block.routed_rows if block.ep == 1 else 0  # or rows were sent before
    return _rstd(block) + routed + block.projections


def _mlp_dispatch(attributes: Attributes) -> int:
    block = block_sizes(attributes)
    return _rstd(block) + block.routed_rows + block.projections


def _attention_backward(attributes: Attributes, *, sums: bool) -> int:
    """As a block's, without what its adapters and its norm take."""
    block = block_sizes(attributes)
    d_qkv = _width(block, block.q + 2 * block.k)
    return max(_context_backward(attributes) + d_qkv, _qkv_backward(attributes, sums=sums))


def _context_backward(attributes: Attributes) -> int:
    """The gradient of attention's output, rotated Q, and attention's own."""
    block = block_sizes(attributes)
    scratch = max(block.attention_scratch("backward"), block.low("o"))
    return _rstd(block) + 2 * _width(block, block.q) + scratch


def _ring_forward(attributes: Attributes) -> int:
    """What a block gives; rotated Q and attention's own, or what merging takes."""
    block = block_sizes(attributes)
    shape = block.attention_shape
    merging = aligned_float32(shape.rows) + 2 * aligned_float32(merge_block_rows(shape) * block.q)
    result = _width(block, block.q) + aligned_float32(shape.rows)
    return _rstd(block) + result + max(block.rotated_and_attention, merging)


def _ring_backward(attributes: Attributes) -> int:
    """Rotated Q, the gradient of Q by itself where it is added, and attention's own."""
    block = block_sizes(attributes)
    widths = (2 if NOT_CAUSAL in attributes else 1) * _width(block, block.q)
    return _rstd(block) + widths + block.attention_scratch("backward")


def _of_output(attributes: Attributes, *, backward: bool) -> int:
    block = block_sizes(attributes)
    return _rstd(block) + (block.low("o") if backward else 0)


def _qkv_backward(attributes: Attributes, *, sums: bool) -> int:
    """The gradients of Q, K and V; normed rows, K before its norm, sums of vectors."""
    block = block_sizes(attributes)
    normed, widths = block.normed, [0]
    if block.qk_norm:
        normed += _width(block, block.k)
        widths.append(block.q if block.qk_norm_rows else block.attention_shape.head_dim)
    if block.qkv_bias:
        widths.append(block.q + 2 * block.k)
    sums = sums and not block.frozen
    beside = max(partial_sum_bytes(block.tokens, width) for width in widths) if sums else 0
    low = max(beside, block.low("qkv"))
    return _rstd(block) + _width(block, block.q + 2 * block.k) + normed + low


def _mlp_backward(attributes: Attributes, *, sums: bool) -> int:
    """Gradients of gate and up; the product, where a pass makes both, or normed rows."""
    block = block_sizes(attributes)
    needs_product = sums and (not block.frozen or block.low("down") > 0)
    product = (_width(block, block.f) if needs_product else 0) + block.low("down")
    gate_up = _width(block, 2 * block.f)
    if block.experts is None:
        rows = max(product, block.normed + block.low("gate_up"))
        return _rstd(block) + gate_up + rows
    product = block.low("down") if block.experts.shared_gate else product
    routed = float32_bytes(block.tokens * block.experts.per_token)
    routed += block.through_experts if block.ep == 1 else 0
    dense = gate_up + max(product, block.low("gate_up")) if block.f else 0
    return _rstd(block) + block.routed_rows + block.normed + max(routed, dense)


def _norm_backward(attributes: Attributes, *, sums: bool) -> int:
    """The gradient of a slice's normed rows; reciprocals of norms; what a router takes."""
    tokens, d_model = (typed_attribute(attributes, n, int) for n in ("num_tokens", "d_model"))
    tokens //= count_of(attributes, NUM_SLICES)
    itemsize, experts = _itemsize(attributes), experts_of(attributes)
    normed = aligned(tokens * d_model * itemsize)
    taken = normed + float32_bytes(tokens) + (partial_sum_bytes(tokens, d_model) if sums else 0)
    if experts is None or typed_attribute(attributes, "norm", str) != "ffn_norm":
        return taken
    numbers = [tokens * experts.count, tokens * experts.shared_gate]
    router = sum(aligned(count * itemsize) for count in numbers)
    return taken + normed + router + float32_bytes(tokens * experts.per_token)


def _embed_backward(attributes: Attributes, *, of_all: Formula) -> int:
    """As of a whole embedding, with the gradients of other parts' tokens left out."""
    tokens, d_model = (typed_attribute(attributes, n, int) for n in ("num_tokens", "d_model"))
    return of_all(attributes) + aligned(tokens * d_model * _itemsize(attributes))


def _none(attributes: Attributes) -> int:
    """No scratch: temporaries are a few blocks of bounded size."""
    return 0


def _losses(attributes: Attributes) -> int:
    return float32_bytes(typed_attribute(attributes, "num_tokens", int))


def _head(attributes: Attributes) -> int:
    """As the loss alone takes, but for the losses."""
    return head_evaluate(attributes) - _losses(attributes)


def _rstd(block: BlockSizes) -> int:
    """Reciprocals of norms; x A^T of all adapters, which no kernel keeps for another; and room for
    a matrix that is made anew from codes."""
    low = sum(map(block.low, block.low_widths))
    return float32_bytes(2 * block.tokens) + low + block.room


def _width(block: BlockSizes, width: int) -> int:
    return aligned(block.tokens * width * block.itemsize)


def _itemsize(attributes: Attributes) -> int:
    return ITEMSIZE_BYTES[typed_attribute(attributes, "dtype", str)]


def _formulas(of_all: Formula, *, sums: bool) -> dict[str, Formula]:
    """`sums`: gradients of vectors are summed in shares that take scratch, as in Triton."""
    return {
        "embed_part_forward": _none,
        "embed_part_backward": partial(_embed_backward, of_all=of_all),
        "attention_part_forward": _attention_forward,
        "attention_part_recompute": _attention_forward,
        "attention_part_backward": partial(_attention_backward, sums=sums),
        "kv_part_forward": _kv_forward,
        "context_part_forward": _attention_forward,
        "context_part_recompute": _attention_forward,
        "context_part_backward": _context_backward,
        "q_part_recompute": _kv_forward,
        "ring_part_forward": _ring_forward,
        "ring_part_backward": _ring_backward,
        "output_part_forward": partial(_of_output, backward=False),
        "output_part_backward": partial(_of_output, backward=True),
        "qkv_part_backward": partial(_qkv_backward, sums=sums),
        "mlp_part_forward": _mlp_forward,
        "mlp_part_recompute": _mlp_recompute,
        "experts_part_recompute": _mlp_recompute,
        "mlp_part_dispatch_forward": _mlp_dispatch,
        "mlp_part_combine_forward": _mlp_combine,
        "mlp_part_dispatch_backward": _mlp_dispatch,
        "mlp_part_backward": partial(_mlp_backward, sums=sums),
        "add_parts": _none,
        "norm_parts_backward": partial(_norm_backward, sums=sums),
        "head_part_sums": _head,
        "head_part_backward": _head,
        "parts_loss": _losses,
        "parts_dpo": with_pairs(_losses),
    }


PARTS_EAGER: Mapping[str, Formula] = _formulas(embed_backward, sums=False)
PARTS_TRITON: Mapping[str, Formula] = _formulas(embed_backward_triton, sums=True)
PARTS_ATTENTION: Mapping[str, AttentionPass] = {
    "attention_part_forward": "forward",
    "attention_part_recompute": "forward",
    "attention_part_backward": "backward",
    "context_part_forward": "forward",
    "context_part_recompute": "forward",
    "context_part_backward": "backward",
    "ring_part_forward": "forward",
    "ring_part_backward": "backward",
}
