"""The memory that attention libraries allocate by themselves, outside the arenas.

It is part of the device cap, and taken only while a kernel runs: what counts of a schedule is its
largest call. A formula is the sum of the buffers that the library's source allocates in one pass,
each rounded up to the allocator's unit; where the source is closed (cuDNN) it is an estimate. A
probe on the device compares each with what was taken. Results that a library allocates and we copy
count too. Packed sequences of any lengths are one call where the library takes them, which pads
each to whole blocks, and otherwise a call each, of which the longest takes most.

Sources: flash_attn/cute/interface.py of flash-attn-4 4.0.0b36; hopper/flash_api.cpp and
csrc/flash_attn/flash_api.cpp of Dao-AILab/flash-attention; in PyTorch
aten/src/ATen/native: transformers/cuda/flash_attn/flash_api.cpp, cudnn/MHA.cpp and
cpu/FlashAttentionKernel.cpp.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from twinstream.models.kernel_costs.attention_limits import attention_limits, cudnn_key_heads
from twinstream.models.kernel_costs.attention_shape import (
    MOST_MULTIPROCESSORS,
    ROW_BLOCK,
    AttentionPass,
    AttentionShape,
)
from twinstream.models.kernel_costs.attributes import TEMPORARY_BYTES, typed_attribute
from twinstream.models.kernel_costs.workspace import attention_shape
from twinstream.schedule.ops import KernelCall

_FLOAT32_BYTES = 4
_INT32_BYTES = 4
_ALLOCATION_BYTES = 512  # the unit of torch's CUDA allocator
_SMALLEST_BLOCK = 32
_MOST_SPLITS = 128
_LOOKUP_SEQUENCES = (
    256  # above so many, FlashAttention-4 makes tables of where each one's blocks are
)
_LOOKUP_ROWS = 64  # of a block there at least
_CPU_KEYS = 512  # of a tile of PyTorch's flash attention for CPUs

# The kernels that call attention, and what of it.
_PASS_OF: Mapping[str, AttentionPass] = {
    "block_forward": "forward",
    "block_recompute_input": "forward",
    "block_backward": "backward",
}


def library_bytes(call: KernelCall) -> int:
    """Bytes beside the arenas that one call takes at most: attention's, and a module's own.

    Raises:
        TwinstreamError: an attribute of the call is missing, or its attention is unknown.
    """
    if TEMPORARY_BYTES in call.attributes:
        return typed_attribute(call.attributes, TEMPORARY_BYTES, int)
    of_pass = _PASS_OF.get(call.kernel.split("/")[0])
    if of_pass is None:
        return 0
    name = typed_attribute(call.attributes, "attention", str)
    return attention_library_bytes(name, of_pass, attention_shape(call.attributes))


def attention_library_bytes(name: str, of_pass: AttentionPass, shape: AttentionShape) -> int:
    """Bytes that the library allocates by itself during one call, 0 where it allocates none.

    Raises:
        UnknownAttentionError: there is no implementation of that name.
    """
    attention_limits(name)  # raises
    return _FORMULAS[name][of_pass](shape)


def _returned_forward(shape: AttentionShape) -> int:
    """The output and the log-sum-exp, of each of two parts where there are keys before."""
    shape = shape.longest
    parts = 2 if shape.num_past else 1
    return parts * (_out(shape) + _lse(shape))


def _sdpa_cpu_forward(shape: AttentionShape) -> int:
    """Results, and on one thread a tile of scores, once more in bf16, and of the output; in bf16,
    where a CPU multiplies tiles of it (AMX), K and V of all heads packed."""
    shape = shape.longest
    rows, keys = _cpu_rows(shape), min(_CPU_KEYS, shape.num_keys)
    tiles = _float32(rows * (keys + 2 + shape.head_dim))
    packed = 2 * shape.num_sequences * shape.num_heads * shape.num_keys * shape.head_dim
    return _returned_forward(shape) + tiles + _low(shape, rows * keys + packed)


def _sdpa_cpu_backward(shape: AttentionShape) -> int:
    """dQ, dK and dV, where they are added up a float32 copy, and on one thread two tiles of scores,
    in bf16 once more, beside packed tiles of what is multiplied."""
    shape = shape.longest
    rows, keys = _cpu_rows(shape), min(_CPU_KEYS, shape.num_keys)
    added = _float32(shape.num_kv_elements // 2) if shape.sliced else 0
    packed = rows * keys + 2 * (rows + _CPU_KEYS) * shape.head_dim + 2 * _CPU_KEYS
    tiles = 2 * _float32(rows * keys) + _float32(rows)
    return _gradients(shape) + added + tiles + _low(shape, 2 * rows * keys + packed)


def _sdpa_flash_forward(shape: AttentionShape) -> int:
    unused = _allocated(8)  # a result that is not ours to leave out
    return _out(shape) + unused + _flash2_forward(shape)


def _sdpa_flash_backward(shape: AttentionShape) -> int:
    return _gradients(shape) + _flash2_backward(shape)


def _sdpa_cudnn_backward(shape: AttentionShape) -> int:
    """The gradients, and what a fused backward must keep: a float32 sum of dQ, dO * O a row, and
    dK and dV of each query head."""
    shape = shape.longest
    kept = _float32(_padded_rows(shape) * shape.head_dim) + 2 * _float32(_padded_rows(shape))
    return _gradients(shape) + kept + _by_query_head(shape)


def _flash2_forward(shape: AttentionShape) -> int:
    """The log-sum-exp, the state of a generator, and results of splits for few queries."""
    return _lse(shape) + _allocated(2 * 8) + _split_results(shape)


def _flash2_backward(shape: AttentionShape) -> int:
    """dO * O a row, a sum of dQ for each block of keys that runs at a time, dK and dV by head."""
    heads = _num_sequences(shape) * shape.num_heads
    num_splits = -(-MOST_MULTIPROCESSORS // heads)
    rows = _padded_rows(shape)
    sums = _float32(num_splits * rows * _padded_head_dim(shape))
    return _float32(rows) + sums + _by_query_head(shape)


def _flash3_forward(shape: AttentionShape) -> int:
    """The log-sum-exp and the tile scheduler's counters."""
    return _lse(shape) + _allocated((4 * _num_sequences(shape) + 1) * _INT32_BYTES)


def _flash4_backward(shape: AttentionShape) -> int:
    """As FlashAttention-3; on Blackwell pairs of blocks of keys may add one block more."""
    return _hopper_backward(shape, extra_keys=ROW_BLOCK) + 2 * _lookup(shape)


def _cudnn_frontend_backward(shape: AttentionShape) -> int:
    """Of a call for some key heads, and what the deterministic backward keeps: before cuDNN 9.25
    the probabilities, in bf16, since then a float32 sum of dQ; dO * O a row, dK and dV by query
    head. The source is closed: an estimate. Log-sum-exps of these heads are dense."""
    shape = shape.longest
    sizes = shape.num_sequences, shape.num_queries, shape.num_keys
    step = cudnn_key_heads(*sizes, shape.num_heads, shape.num_kv_heads)
    share = step / shape.num_kv_heads
    some = replace(shape, num_heads=round(share * shape.num_heads), num_kv_heads=step)
    rows = _padded_rows(some)
    probabilities = rows * _rounded(some.num_keys, ROW_BLOCK) * some.itemsize_bytes
    kept = max(_allocated(probabilities), _float32(rows * _padded_head_dim(some)))
    return kept + 2 * _float32(rows) + _by_query_head(some) + _lse(some)


def _cudnn_sliced_backward(shape: AttentionShape) -> int:
    """That of the slice that takes the most."""
    calls = [shape] if shape.most_packed else shape.slices()
    return max(map(_cudnn_frontend_backward, calls))


def _lookup(shape: AttentionShape) -> int:
    """Blocks before each of many sequences of unequal lengths, and the sequence of each block."""
    count = shape.most_packed
    if count <= _LOOKUP_SEQUENCES:
        return 0
    blocks = shape.rows // _LOOKUP_ROWS + count + 1
    return _allocated((count + 1) * _INT32_BYTES) + _allocated(blocks * _INT32_BYTES)


def _hopper_backward(shape: AttentionShape, extra_keys: int = 0) -> int:
    """Float32 sums of dQ, and of dK and dV where heads share them; two floats a row; semaphores.

    Blocks of keys are of 128 or fewer, so that less than 128 are added to fill the last. Sums of
    unequal lengths have that much for each sequence and one more; semaphores are for as many of
    the longest.
    """
    head_dim = _padded_head_dim(shape)
    if shape.most_packed:
        count, keys_each = shape.most_packed, ROW_BLOCK + extra_keys
        longest = _rounded(shape.longest_tokens, ROW_BLOCK)
        rows = _padded_rows(shape) + shape.num_heads * ROW_BLOCK
        keys = shape.num_keys + (count + 1) * keys_each
        rows_of_longest = count * shape.num_heads * longest
        keys_of_longest = count * (longest + keys_each)
    else:
        rows = rows_of_longest = _padded_rows(shape)
        keys = shape.num_sequences * (shape.num_keys + ROW_BLOCK + extra_keys)
        keys_of_longest = keys
    shared = 2 * _float32(keys * shape.num_kv_heads * head_dim) if _shares_keys(shape) else 0
    semaphores = 2 * _float32(rows_of_longest // _SMALLEST_BLOCK)
    semaphores += 4 * _float32(keys_of_longest * shape.num_kv_heads // _SMALLEST_BLOCK)
    return _float32(rows * head_dim) + 2 * _float32(rows) + shared + semaphores


def _cpu_rows(shape: AttentionShape) -> int:
    """Queries of a tile of PyTorch's flash attention for CPUs."""
    queries = shape.num_queries
    return min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)


def _split_results(shape: AttentionShape) -> int:
    """FlashAttention-2 splits the keys where blocks of queries do not occupy the device, but not
    those of sequences of unequal lengths."""
    if shape.most_packed:
        return 0
    blocks = shape.num_sequences * shape.num_heads * -(-shape.num_queries // 64)
    if blocks >= 0.8 * 2 * MOST_MULTIPROCESSORS:
        return 0
    key_block = 256 if shape.head_dim <= 64 else 128 if shape.head_dim <= 128 else 64
    num_splits = min(_MOST_SPLITS, -(-shape.num_keys // key_block))
    if num_splits == 1:
        return 0
    rows = num_splits * shape.rows
    return _float32(rows) + _float32(rows * _padded_head_dim(shape))


def _gradients(shape: AttentionShape) -> int:
    kv = _allocated(shape.num_kv_elements // 2 * shape.itemsize_bytes)
    return _out(shape) + 2 * kv


def _by_query_head(shape: AttentionShape) -> int:
    """dK and dV of each query head, before those that share a key head are added up."""
    if not _shares_keys(shape):
        return 0
    elements = shape.num_sequences * shape.num_keys * shape.num_heads * shape.head_dim
    return 2 * _allocated(elements * shape.itemsize_bytes)


def _shares_keys(shape: AttentionShape) -> bool:
    return shape.num_kv_heads != shape.num_heads


def _low(shape: AttentionShape, elements: int) -> int:
    """What is kept in the dtype of the inputs beside float32, if that is another."""
    itemsize = shape.itemsize_bytes
    return _allocated(elements * itemsize) if itemsize < _FLOAT32_BYTES else 0


def _out(shape: AttentionShape) -> int:
    return _allocated(shape.rows * shape.head_dim * shape.itemsize_bytes)


def _lse(shape: AttentionShape) -> int:
    return _float32(shape.rows)


def _num_sequences(shape: AttentionShape) -> int:
    return shape.most_packed or shape.num_sequences


def _padded_rows(shape: AttentionShape) -> int:
    """Queries times heads where each sequence fills whole blocks."""
    if shape.most_packed:
        return shape.num_heads * (shape.num_queries + shape.most_packed * ROW_BLOCK)
    queries = _rounded(shape.num_queries, ROW_BLOCK)
    return shape.num_sequences * shape.num_heads * queries


def _padded_head_dim(shape: AttentionShape) -> int:
    return _rounded(shape.head_dim, 32 if shape.head_dim <= 128 else 64)


def _float32(elements: int) -> int:
    return _allocated(elements * _FLOAT32_BYTES)


def _allocated(num_bytes: int) -> int:
    return _rounded(num_bytes, _ALLOCATION_BYTES)


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


_FORMULAS: Mapping[str, Mapping[AttentionPass, Callable[[AttentionShape], int]]] = {
    "eager": {"forward": lambda _: 0, "backward": lambda _: 0},
    "sdpa_cpu": {"forward": _sdpa_cpu_forward, "backward": _sdpa_cpu_backward},
    "sdpa_flash": {"forward": _sdpa_flash_forward, "backward": _sdpa_flash_backward},
    "sdpa_cudnn": {"forward": _returned_forward, "backward": _sdpa_cudnn_backward},
    "flash2": {"forward": _flash2_forward, "backward": _flash2_backward},
    "flash3": {"forward": _flash3_forward, "backward": _hopper_backward},
    "flash4": {"forward": _lookup, "backward": _flash4_backward},
    "cudnn_frontend": {
        "forward": lambda _: _ALLOCATION_BYTES,
        "backward": _cudnn_frontend_backward,
    },
    "cudnn_sliced": {"forward": lambda _: _ALLOCATION_BYTES, "backward": _cudnn_sliced_backward},
}
