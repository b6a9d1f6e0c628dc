"""The scratch of each attention implementation, so that it can be planned without torch.

Each formula mirrors, buffer by buffer, what the implementation of that name takes from its
workspace; tests hold the two together to the byte. What a library allocates by itself besides is
in `attention_library`.
"""

from collections.abc import Callable, Mapping

from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.kernel_costs.attention_shape import AttentionPass, AttentionShape
from twinstream.models.layout import aligned

# Eager attention works on tiles of this many queries and keys (all heads at once).
QUERY_TILE = 128
KEY_TILE = 256
# Elements of the output that two parts are merged by at a time: 8 MiB in float32.
MERGE_BLOCK_ELEMENTS = 2**21

_FLOAT32_BYTES = 4
_SEED_BYTES = 16


def attention_scratch_bytes(name: str, of_pass: AttentionPass, shape: AttentionShape) -> int:
    """Scratch bytes that an implementation takes at most.

    Raises:
        UnknownAttentionError: there is none of that name.
    """
    attention_limits(name)  # raises
    return _FORMULAS[name][of_pass](shape)


def merge_block_rows(shape: AttentionShape) -> int:
    """Queries whose outputs, one from each of two parts, are merged at a time."""
    width = shape.num_heads * shape.head_dim
    return max(1, min(shape.num_queries, MERGE_BLOCK_ELEMENTS // width))


def _nothing(shape: AttentionShape) -> int:
    return 0


def _dense_lse(shape: AttentionShape) -> int:
    """Packed sequences have their log-sum-exps head by head; libraries want them dense.

    Of any lengths they are wanted as they are, those of all sequences together.
    """
    return _float32(shape.rows) if shape.num_sequences > 1 else 0


def _dense_lse_of_each(shape: AttentionShape) -> int:
    """The same where sequences of any lengths are called one by one: those of one."""
    if shape.most_packed:
        return _float32(shape.longest.rows) if shape.num_heads > 1 else 0
    return _dense_lse(shape)


def _merged_forward(shape: AttentionShape) -> int:
    """A weight a row, and a block of outputs of each part."""
    if shape.num_past == 0:
        return 0
    block = merge_block_rows(shape) * shape.num_heads * shape.head_dim
    return _float32(shape.rows) + 2 * _float32(block)


def _sdpa_flash_backward(shape: AttentionShape) -> int:
    return aligned(_SEED_BYTES) + _dense_lse(shape)


def _sdpa_cudnn_forward(shape: AttentionShape) -> int:
    """A packed sequence of one token takes what eager attention takes."""
    own = _merged_forward(shape)
    return max(own, _eager_forward(shape.of_one_token)) if shape.most_packed else own


def _sdpa_cudnn_backward(shape: AttentionShape) -> int:
    own = aligned(_SEED_BYTES) + _dense_lse_of_each(shape)
    return max(own, _eager_backward(shape.of_one_token)) if shape.most_packed else own


def _written_backward(shape: AttentionShape) -> int:
    """Where gradients are added up, those of this call are written by themselves first."""
    d_kv = aligned(shape.num_kv_elements * shape.itemsize_bytes) if shape.sliced else 0
    return _dense_lse(shape) + d_kv


def _cudnn_frontend_forward(shape: AttentionShape) -> int:
    """A packed sequence of one token takes what eager attention takes."""
    own = _dense_lse_of_each(shape)
    return max(own, _eager_forward(shape.of_one_token)) if shape.most_packed else own


def _cudnn_frontend_backward(shape: AttentionShape) -> int:
    if not shape.most_packed:
        return _written_backward(shape)
    return max(_dense_lse_of_each(shape), _eager_backward(shape.of_one_token))


def _cudnn_sliced_backward(shape: AttentionShape) -> int:
    """Float32 sums of dK and dV, and a slice's own beside its log-sum-exps, which are not dense."""
    slices = shape.slices()
    if shape.most_packed or len(slices) == 1:
        return _cudnn_frontend_backward(shape)
    sums = 0 if shape.sliced else _float32(shape.num_kv_elements)
    return sums + max(
        _float32(one.rows) + aligned(one.num_kv_elements * one.itemsize_bytes) for one in slices
    )


def _eager_forward(shape: AttentionShape) -> int:
    """Q and output of a query tile, three scalars a row, and a tile of K, V and scores."""
    shape = shape.longest
    rows = shape.num_heads * min(QUERY_TILE, shape.num_queries)
    per_query_tile = 2 * _float32(rows * shape.head_dim) + 3 * _float32(rows)
    return per_query_tile + _key_tiles(shape, 2) + _score_tiles(shape, 1)


def _eager_backward(shape: AttentionShape) -> int:
    """Q, dO and dQ of a query tile, two scalars a row; a tile of K, V, and dK or dV; two of scores.

    Packed sequences add the float32 gradients of one sequence's K and V; a slice of a sequence
    has them in d_context.
    """
    shape = shape.longest
    rows = shape.num_heads * min(QUERY_TILE, shape.num_queries)
    per_query_tile = 3 * _float32(rows * shape.head_dim) + 2 * _float32(rows)
    d_kv = 0 if shape.sliced else _float32(shape.num_kv_elements // shape.num_sequences)
    return d_kv + per_query_tile + _key_tiles(shape, 3) + _score_tiles(shape, 2)


def _key_tiles(shape: AttentionShape, count: int) -> int:
    width = shape.num_kv_heads * shape.head_dim
    return count * _float32(width * min(KEY_TILE, shape.num_keys))


def _score_tiles(shape: AttentionShape, count: int) -> int:
    """Float32 tiles, and one in bf16 for the probabilities as the second matmul sees them."""
    rows = shape.num_heads * min(QUERY_TILE, shape.num_queries)
    elements = rows * min(KEY_TILE, shape.num_keys)
    itemsize = shape.itemsize_bytes
    low = aligned(elements * itemsize) if itemsize < _FLOAT32_BYTES else 0
    return count * _float32(elements) + low


def _float32(elements: int) -> int:
    return aligned(elements * _FLOAT32_BYTES)


_FORMULAS: Mapping[str, Mapping[AttentionPass, Callable[[AttentionShape], int]]] = {
    "eager": {"forward": _eager_forward, "backward": _eager_backward},
    "sdpa_cpu": {"forward": _merged_forward, "backward": _dense_lse_of_each},
    "sdpa_flash": {"forward": _nothing, "backward": _sdpa_flash_backward},
    "sdpa_cudnn": {"forward": _sdpa_cudnn_forward, "backward": _sdpa_cudnn_backward},
    "flash2": {"forward": _nothing, "backward": _written_backward},
    "flash3": {"forward": _nothing, "backward": _written_backward},
    "flash4": {"forward": _dense_lse, "backward": _written_backward},
    "cudnn_frontend": {"forward": _cudnn_frontend_forward, "backward": _cudnn_frontend_backward},
    "cudnn_sliced": {"forward": _cudnn_frontend_forward, "backward": _cudnn_sliced_backward},
}
