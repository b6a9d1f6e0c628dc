"""The work of a block, embedding and head in parts, by kernel; scratch is in `part_scratch`.

A part's products are those of its own heads, columns and rows; norms are computed by every part
anew, and once more where what parts have made is added up. Legend as in `work`.
"""

from twinstream.models.kernel_costs.adapter_work import AdapterWork
from twinstream.models.kernel_costs.work import ChunkWork
from twinstream.models.layout import dense_width
from twinstream.schedule.cost import Work


def attention_part_forward(of: ChunkWork) -> tuple[Work, ...]:
    t, s = of.tokens, of.spec
    return (
        of.vector("rms_norm", 2 * t * s.d_model),
        of.matmul(t, s.d_q + 2 * s.d_kv, s.d_model),
        of.vector("rope", 2 * t * (s.d_q + s.d_kv)),
        of.attention_forward(),
        of.matmul(t, s.d_model, s.d_q),
        *_of_attention(of).forward(),
    )


def attention_part_recompute(of: ChunkWork) -> tuple[Work, ...]:
    """Q, and attention of the saved K and V."""
    t, s = of.tokens, of.spec
    return (
        of.vector("rms_norm", 2 * t * s.d_model),
        of.matmul(t, s.d_q, s.d_model),
        of.vector("rope", 2 * t * s.d_q),
        of.attention_forward(),
        *of.adapters.of_sites("qkv").made_again(),
        *of.adapters.of_sites("qkv").recompute(),
    )


def attention_part_backward(of: ChunkWork) -> tuple[Work, ...]:
    t, s = of.tokens, of.spec
    d, q, k = s.d_model, s.d_q, s.d_kv
    return (
        of.matmul(t, q, d),
        of.attention_backward(),
        of.vector("rope_backward", 3 * t * (q + k)),
        of.vector("rms_norm", 2 * t * d),
        *([of.matmul(t, k, d)] if s.qk_norm else []),
        of.matmul(t, d, q + 2 * k),
        *_gradients(of, (d, q), (q + 2 * k, d)),
        *_of_attention(of).made_again(),
        *_of_attention(of).backward(),
    )


def kv_part_forward(of: ChunkWork) -> tuple[Work, ...]:
    t, s = of.tokens, of.spec
    return (
        of.vector("rms_norm", 2 * t * s.d_model),
        of.matmul(t, 2 * s.d_kv, s.d_model),
        of.vector("rope", 2 * t * s.d_kv),
        *of.adapters.of_sites("qkv").made_again(),
        *of.adapters.of_sites("qkv").keys(),
    )


def context_part_forward(of: ChunkWork) -> tuple[Work, ...]:
    """Q, attention of gathered K and V, and the output projection."""
    return (*attention_part_recompute(of), *output_part_forward(of))


def context_part_backward(of: ChunkWork) -> tuple[Work, ...]:
    """From the output to the gradients of rotated Q and of all K and V seen."""
    product, *gradients = output_part_backward(of)
    rotated = of.vector("rope", 2 * of.tokens * of.spec.d_q)
    return (product, rotated, of.attention_backward(), *gradients)


def q_part_recompute(of: ChunkWork) -> tuple[Work, ...]:
    t, s, adapters = of.tokens, of.spec, of.adapters.of_sites("qkv")
    return (
        of.vector("rms_norm", 2 * t * s.d_model),
        of.matmul(t, s.d_q, s.d_model),
        *adapters.made_again(),
        *adapters.recompute(),
    )


def ring_part_forward(of: ChunkWork) -> tuple[Work, ...]:
    """Attention of a block, merged with what there is."""
    rows = of.tokens * of.spec.d_q
    return (of.vector("rope", 2 * rows), of.attention_forward(), of.vector("rope", 3 * rows))


def ring_part_backward(of: ChunkWork) -> tuple[Work, ...]:
    rows = of.tokens * of.spec.d_q
    return (of.vector("rope", 2 * rows), of.attention_backward(), of.vector("rope", 3 * rows))


def output_part_forward(of: ChunkWork) -> tuple[Work, ...]:
    product = of.matmul(of.tokens, of.spec.d_model, of.spec.d_q)
    return (product, *of.adapters.of_sites("o").forward())


def output_part_backward(of: ChunkWork) -> tuple[Work, ...]:
    s, adapters = of.spec, of.adapters.of_sites("o")
    return (
        of.matmul(of.tokens, s.d_q, s.d_model),
        *_gradients(of, (s.d_model, s.d_q)),
        *adapters.made_again(),
        *adapters.backward(),
    )


def qkv_part_backward(of: ChunkWork) -> tuple[Work, ...]:
    """From these to the normed input."""
    t, s = of.tokens, of.spec
    d, n = s.d_model, s.d_q + 2 * s.d_kv
    return (
        of.vector("rope_backward", 2 * t * n),
        of.vector("rms_norm", 2 * t * d),
        *([of.matmul(t, s.d_kv, d)] if s.qk_norm else []),
        of.matmul(t, d, n),
        *_gradients(of, (n, d)),
        *of.adapters.of_sites("qkv").made_again(),
        *of.adapters.of_sites("qkv").backward(),
    )


def mlp_part_recompute(of: ChunkWork) -> tuple[Work, ...]:
    """Gate and up, of experts and of the network that all tokens go through."""
    t, s, f = of.tokens, of.spec, dense_width(of.spec)
    return (
        of.vector("rms_norm", 2 * t * s.d_model),
        *(of.of_experts.projections() if s.experts and of.ep == 1 else ()),
        *((of.matmul(t, 2 * f, s.d_model),) if f else ()),
        *of.adapters.of_sites("gate_up").forward(),
    )


def mlp_part_dispatch_forward(of: ChunkWork) -> tuple[Work, ...]:
    """Rows for experts on other ranks, and gate and up of the network of all tokens."""
    t, d, f = of.tokens, of.spec.d_model, dense_width(of.spec)
    dense = (of.matmul(t, 2 * f, d),) if f else ()
    norm, routed = of.vector("rms_norm", 2 * t * d), of.of_experts
    adapters = of.adapters.of_sites("gate_up").forward()
    return (norm, *routed.choice(), *routed.projections(), *dense, *adapters)


def mlp_part_forward(of: ChunkWork) -> tuple[Work, ...]:
    t, s, f = of.tokens, of.spec, dense_width(of.spec)
    routed = (*of.of_experts.choice(), *of.of_experts.outputs()) if s.experts else ()
    dense = (of.vector("swiglu", 3 * t * f), of.matmul(t, s.d_model, f)) if f else ()
    adapters = of.adapters.of_sites("down").forward()
    return (*mlp_part_recompute(of), *routed, *dense, *adapters)


def mlp_part_backward(of: ChunkWork) -> tuple[Work, ...]:
    t, d, f = of.tokens, of.spec.d_model, dense_width(of.spec)
    back = (of.matmul(t, f, d), of.vector("swiglu_backward", 6 * t * f, launches=2)) if f else ()
    return (
        *(of.of_experts.part_backward() if of.spec.experts else ()),
        *back,
        of.vector("rms_norm", 2 * t * d),
        *((of.matmul(t, d, 2 * f), *_gradients(of, (d, f), (2 * f, d))) if f else ()),
        *_of_mlp(of).made_again(),
        *_of_mlp(of).backward(),
    )


def _gradients(of: ChunkWork, *shapes: tuple[int, int]) -> tuple[Work, ...]:
    """Of matrices of such shapes, where blocks are trained and not adapters alone."""
    if of.recipe.freezes("0"):
        return ()
    return tuple(of.gradient_matmul(*shape, of.tokens) for shape in shapes)


def _of_attention(of: ChunkWork) -> AdapterWork:
    return of.adapters.of_sites("qkv", "o")


def _of_mlp(of: ChunkWork) -> AdapterWork:
    return of.adapters.of_sites("gate_up", "down")


def add_parts(of: ChunkWork, rows: int, num_pieces: int, *, residual: bool) -> tuple[Work, ...]:
    """Reads the pieces, and what they are added to; writes their sum."""
    moved = (num_pieces + 1 + residual) * rows * of.spec.d_model
    return (of.vector("rms_norm", moved),)


def norm_parts_backward(
    of: ChunkWork, rows: int, num_pieces: int, slices: int = 1
) -> tuple[Work, ...]:
    """The sum of the pieces, the norm again, and the norm's backward; of each slice of rows."""
    moved = rows // slices * of.spec.d_model
    return (
        of.vector("rms_norm", (num_pieces + 3) * moved, launches=2),
        of.vector("rms_norm_backward", 4 * moved, launches=2),
    ) * slices


def head_part_sums(of: ChunkWork, row_slice: int) -> tuple[Work, ...]:
    """Final norm, and the logits of a part: their largest, the sum of exponentials, the label's."""
    t, d, v = of.tokens, of.spec.d_model, of.spec.vocab_size
    slices = -(-t // row_slice)
    return (
        of.vector("rms_norm", 2 * t * d, launches=slices),
        *[of.matmul(row_slice, v, d)] * slices,
        of.vector("cross_entropy", 2 * t * v, launches=slices),
    )


def parts_loss(of: ChunkWork, num_parts: int) -> tuple[Work, ...]:
    return (of.vector("cross_entropy", (3 * num_parts + 2) * of.tokens),)


def head_part_backward(of: ChunkWork, row_slice: int) -> tuple[Work, ...]:
    """Final norm and logits again, their gradient, that of the rows and of the matrix."""
    t, d, v = of.tokens, of.spec.d_model, of.spec.vocab_size
    slices = -(-t // row_slice)
    return (
        of.vector("rms_norm", 2 * t * d, launches=slices),
        *of.head_matmuls(row_slice) * slices,
        of.vector("cross_entropy", 3 * t * v, launches=slices),
    )
