"""Sums of buffers that attention kernels take: what several implementations have in common."""

from collections.abc import Callable

from twinstream.models.kernel_costs.attention_shape import ROW_BLOCK, AttentionShape
from twinstream.models.layout import aligned

# Elements of the output that two parts are merged by at a time: 8 MiB in float32.
MERGE_BLOCK_ELEMENTS = 2**21

_FLOAT32_BYTES = 4
_ALLOCATION_BYTES = 512  # the unit of torch's CUDA allocator


def aligned_float32(elements: int) -> int:
    """Return the bytes of a float32 buffer of our workspace."""
    return aligned(elements * _FLOAT32_BYTES)


def merge_block_rows(shape: AttentionShape) -> int:
    """Return the queries whose outputs, one from each of two parts, are merged at a time."""
    width = shape.num_heads * shape.head_dim
    return max(1, min(shape.num_queries, MERGE_BLOCK_ELEMENTS // width))


def merged(shape: AttentionShape) -> int:
    """Return what merging takes: a weight a row, and a block of outputs of each part."""
    if shape.num_past == 0:
        return 0
    block = merge_block_rows(shape) * shape.num_heads * shape.head_dim
    return aligned_float32(shape.rows) + 2 * aligned_float32(block)


def dense_lse(shape: AttentionShape) -> int:
    """Return what dense log-sum-exps take, which packed sequences have head by head.

    Of any lengths they are wanted as they are, those of all sequences together.
    """
    return aligned_float32(shape.rows) if shape.num_sequences > 1 else 0


def dense_lse_of_each(shape: AttentionShape) -> int:
    """Return the same where sequences of any lengths are called one by one: those of one."""
    if shape.most_packed:
        return aligned_float32(shape.longest.rows) if shape.num_heads > 1 else 0
    return dense_lse(shape)


def allocated(num_bytes: int) -> int:
    """Return the bytes that torch's allocator takes for a buffer."""
    return rounded_up(num_bytes, _ALLOCATION_BYTES)


def float32(elements: int) -> int:
    """Return those of a float32 buffer."""
    return allocated(elements * _FLOAT32_BYTES)


def low(shape: AttentionShape, elements: int, rounding: Callable[[int], int] = allocated) -> int:
    """Return those of a copy in the dtype of the inputs, where that is not float32."""
    itemsize = shape.itemsize_bytes
    return rounding(elements * itemsize) if itemsize < _FLOAT32_BYTES else 0


def rounded_up(number: int, unit: int) -> int:
    """
    >>> rounded_up(257, 128)
    384
    """
    return -(-number // unit) * unit


def out(shape: AttentionShape) -> int:
    """Return the bytes of the output."""
    return allocated(shape.rows * shape.head_dim * shape.itemsize_bytes)


def gradients(shape: AttentionShape) -> int:
    """Return the bytes of dQ, dK and dV."""
    return out(shape) + 2 * allocated(shape.num_kv_elements // 2 * shape.itemsize_bytes)


def results(shape: AttentionShape) -> int:
    """Return output and log-sum-exp, of each of two parts where there are keys before."""
    shape = shape.longest
    return (2 if shape.num_past else 1) * (out(shape) + float32(shape.rows))


def shares_keys(shape: AttentionShape) -> bool:
    """Whether several query heads have one key head."""
    return shape.num_kv_heads != shape.num_heads


def by_query_head(shape: AttentionShape) -> int:
    """Return dK and dV of each query head, before those that share a key head are added up."""
    if not shares_keys(shape):
        return 0
    elements = shape.num_sequences * shape.num_keys * shape.num_heads * shape.head_dim
    return 2 * allocated(elements * shape.itemsize_bytes)


def num_sequences(shape: AttentionShape) -> int:
    """Return how many sequences one call has at most."""
    return shape.most_packed or shape.num_sequences


def padded_rows(shape: AttentionShape) -> int:
    """Return queries times heads where each sequence fills whole blocks."""
    if shape.most_packed:
        return shape.num_heads * (shape.num_queries + shape.most_packed * ROW_BLOCK)
    queries = rounded_up(shape.num_queries, ROW_BLOCK)
    return shape.num_sequences * shape.num_heads * queries


def padded_head_dim(shape: AttentionShape) -> int:
    """Return the head dimension as FlashAttention pads it."""
    return rounded_up(shape.head_dim, 32 if shape.head_dim <= 128 else 64)
