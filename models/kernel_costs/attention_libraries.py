"""What is known of each attention implementation without torch: limits, scratch, allocations.

A class has all of one. Its scratch mirrors, buffer by buffer, what the implementation of that name
takes from its workspace; tests hold the two together to the byte. What a library allocates by
itself, outside the arenas, is part of the device cap, and taken only while a kernel runs: the sum
of the buffers that the library's source allocates in one pass, each rounded up to the allocator's
unit; where the source is closed (cuDNN) it is an estimate. A probe on the device compares each with
what was taken. Results that a library allocates and we copy count too. Packed sequences of any
lengths are one call where the library takes them, which pads each to whole blocks, and otherwise a
call each, of which the longest takes most.

Sources: flash_attn/cute/interface.py of flash-attn-4 4.0.0b36; hopper/flash_api.cpp and
csrc/flash_attn/flash_api.cpp of Dao-AILab/flash-attention; in PyTorch
aten/src/ATen/native: transformers/cuda/flash_attn/flash_api.cpp, cudnn/MHA.cpp and
cpu/FlashAttentionKernel.cpp.
"""

import re
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from twinstream.models.kernel_costs import attention_memory as memory
from twinstream.models.kernel_costs.attention_memory import allocated, float32
from twinstream.models.kernel_costs.attention_shape import (
    MOST_MULTIPROCESSORS,
    ROW_BLOCK,
    AttentionPass,
    AttentionShape,
    cudnn_key_heads,
)
from twinstream.models.layout import aligned

# Eager attention works on tiles of this many queries and keys (all heads at once).
QUERY_TILE = 128
KEY_TILE = 256

_INT32_BYTES = 4
_SEED_BYTES = 16
_CPU_KEYS = 512  # of a tile of PyTorch's flash attention for CPUs
_SMALLEST_BLOCK = 32
_MOST_SPLITS = 128
# Above so many sequences FlashAttention-4 makes tables of where each one's blocks are.
_LOOKUP_SEQUENCES = 256
_LOOKUP_ROWS = 64  # of a block there at least

DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Library:
    """The distribution that an implementation needs, beside torch, and how it is installed."""

    distribution: str
    install: str
    least_version: tuple[int, ...] = ()

    def missing(self) -> str | None:
        """Return what of it is not installed; imports nothing."""
        try:
            found = version(self.distribution)
        except PackageNotFoundError:
            return f"{self.distribution} is not installed ({self.install})"
        release = re.match(r"\d+(\.\d+)*", found)  # of 2.7.4.post1 it is 2.7.4
        numbers = tuple(int(part) for part in release.group().split(".")) if release else ()
        if numbers < self.least_version:
            needed = ".".join(str(number) for number in self.least_version)
            return (
                f"{self.distribution} is {found}, and {needed} or newer is needed ({self.install})"
            )
        return None


class AttentionFacts:
    """An implementation: its limits (None: no limit), and the memory that a call takes at most.

    `capabilities` are major ones of CUDA. With `variable_length` one call takes packed sequences of
    unequal lengths; without, each of them is a call. With `causal_alone` queries never see all keys
    of a call. `deterministic` means the same bits from run
    to run, as the executor calls it.
    """

    device: DeviceName | None = None
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    most_head_dim: int | None = None
    head_dim_multiple = 1
    capabilities: tuple[int, ...] = ()
    variable_length = False
    deterministic = True
    causal_alone = False
    library: Library | None = None

    def refusal(self, dtype: str, head_dim: int) -> str | None:
        """Return why such heads cannot be computed, or None."""
        if dtype not in self.dtypes:
            return f"it computes {' and '.join(self.dtypes)}, not {dtype}"
        if self.most_head_dim is not None and head_dim > self.most_head_dim:
            return f"head_dim {head_dim} is over its limit of {self.most_head_dim}"
        if head_dim % self.head_dim_multiple:
            return f"head_dim {head_dim} is no multiple of {self.head_dim_multiple}"
        return None

    def scratch(self, of_pass: AttentionPass, shape: AttentionShape) -> int:
        """Return the bytes of workspace that a pass takes at most."""
        return self.forward_scratch(shape) if of_pass == "forward" else self.backward_scratch(shape)

    def allocates(self, of_pass: AttentionPass, shape: AttentionShape) -> int:
        """Return the bytes that the library allocates by itself in a pass at most."""
        if of_pass == "forward":
            return self.forward_allocates(shape)
        return self.backward_allocates(shape)

    def forward_scratch(self, shape: AttentionShape) -> int:
        return 0

    def backward_scratch(self, shape: AttentionShape) -> int:
        """Where gradients are added up, those of this call are written by themselves first."""
        d_kv = aligned(shape.num_kv_elements * shape.itemsize_bytes) if shape.sliced else 0
        return memory.dense_lse(shape) + d_kv

    def forward_allocates(self, shape: AttentionShape) -> int:
        return 0

    def backward_allocates(self, shape: AttentionShape) -> int:
        return 0


class EagerFacts(AttentionFacts):
    """Tiles of queries and keys in torch's operations, all heads at once."""

    def forward_scratch(self, shape: AttentionShape) -> int:
        """Q and output of a query tile, three scalars a row, and a tile of K, V and scores."""
        return self._tiles(shape.longest, of_queries=2, scalars=3, of_keys=2, of_scores=1)

    def backward_scratch(self, shape: AttentionShape) -> int:
        """Q, dO and dQ, two scalars a row; a tile of K, V, and dK or dV; two of scores.

        Packed sequences add the float32 gradients of one sequence's K and V; a slice of a sequence
        has them in d_context.
        """
        shape = shape.longest
        of_one = shape.num_kv_elements // shape.num_sequences
        d_kv = 0 if shape.sliced else memory.aligned_float32(of_one)
        return d_kv + self._tiles(shape, of_queries=3, scalars=2, of_keys=3, of_scores=2)

    def _tiles(
        self, shape: AttentionShape, *, of_queries: int, scalars: int, of_keys: int, of_scores: int
    ) -> int:
        """Float32 tiles, and one in bf16 for the probabilities as the second matmul sees them."""
        rows = shape.num_heads * min(QUERY_TILE, shape.num_queries)
        keys = min(KEY_TILE, shape.num_keys)
        return (
            of_queries * memory.aligned_float32(rows * shape.head_dim)
            + scalars * memory.aligned_float32(rows)
            + of_keys * memory.aligned_float32(shape.num_kv_heads * shape.head_dim * keys)
            + of_scores * memory.aligned_float32(rows * keys)
            + memory.low(shape, rows * keys, aligned)
        )


class SdpaCpuFacts(AttentionFacts):
    """PyTorch's flash attention for CPUs."""

    device: DeviceName | None = "cpu"

    def forward_scratch(self, shape: AttentionShape) -> int:
        return memory.merged(shape)

    def backward_scratch(self, shape: AttentionShape) -> int:
        return memory.dense_lse_of_each(shape)

    def forward_allocates(self, shape: AttentionShape) -> int:
        """Results, and on one thread a tile of scores, once more in bf16, and of the output; in
        bf16, where a CPU multiplies tiles of it (AMX), K and V of all heads packed."""
        shape = shape.longest
        rows, keys = self._tile_rows(shape), min(_CPU_KEYS, shape.num_keys)
        tiles = float32(rows * (keys + 2 + shape.head_dim))
        packed = 2 * shape.num_sequences * shape.num_heads * shape.num_keys * shape.head_dim
        return memory.results(shape) + tiles + memory.low(shape, rows * keys + packed)

    def backward_allocates(self, shape: AttentionShape) -> int:
        """DQ, dK and dV, where they are added up a float32 copy, and on one thread two tiles of
        scores, in bf16 once more, beside packed tiles of what is multiplied."""
        shape = shape.longest
        rows, keys = self._tile_rows(shape), min(_CPU_KEYS, shape.num_keys)
        added = float32(shape.num_kv_elements // 2) if shape.sliced else 0
        packed = rows * keys + 2 * (rows + _CPU_KEYS) * shape.head_dim + 2 * _CPU_KEYS
        tiles = 2 * float32(rows * keys) + float32(rows)
        return memory.gradients(shape) + added + tiles + memory.low(shape, 2 * rows * keys + packed)

    def _tile_rows(self, shape: AttentionShape) -> int:
        queries = shape.num_queries
        return min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)


class _Cuda(AttentionFacts):
    device: DeviceName | None = "cuda"
    dtypes = ("bfloat16",)
    head_dim_multiple = 8
    variable_length = True


class Flash2Facts(_Cuda):
    """FlashAttention-2, with its deterministic backward."""

    most_head_dim = 256
    capabilities: tuple[int, ...] = (8, 9, 10, 12)
    library: Library | None = Library("flash-attn", "pip install flash-attn", (2, 7))

    def forward_allocates(self, shape: AttentionShape) -> int:
        """The log-sum-exp, the state of a generator, and results of splits for few queries."""
        return float32(shape.rows) + allocated(2 * 8) + self._split_results(shape)

    def backward_allocates(self, shape: AttentionShape) -> int:
        """Of a row dO * O, sums of dQ for all blocks of keys that run at a time, dK, dV by head."""
        heads = memory.num_sequences(shape) * shape.num_heads
        num_splits = -(-MOST_MULTIPROCESSORS // heads)
        rows = memory.padded_rows(shape)
        sums = float32(num_splits * rows * memory.padded_head_dim(shape))
        return float32(rows) + sums + memory.by_query_head(shape)

    def _split_results(self, shape: AttentionShape) -> int:
        """Keys are split where blocks of queries do not occupy the device; not of any lengths."""
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
        return float32(rows) + float32(rows * memory.padded_head_dim(shape))


class SdpaFlashFacts(Flash2Facts):
    """FlashAttention-2 as torch has it, which returns results of its own."""

    capabilities = (8, 9, 10, 11, 12)
    library = None

    def backward_scratch(self, shape: AttentionShape) -> int:
        return aligned(_SEED_BYTES) + memory.dense_lse(shape)

    def forward_allocates(self, shape: AttentionShape) -> int:
        unused = allocated(8)  # a result that is not ours to leave out
        return memory.out(shape) + unused + super().forward_allocates(shape)

    def backward_allocates(self, shape: AttentionShape) -> int:
        return memory.gradients(shape) + super().backward_allocates(shape)


class Flash3Facts(_Cuda):
    """FlashAttention-3."""

    most_head_dim = 192
    capabilities: tuple[int, ...] = (9,)
    library = Library(
        "flash-attn-3", "build the folder hopper of github.com/Dao-AILab/flash-attention"
    )

    def forward_allocates(self, shape: AttentionShape) -> int:
        """The log-sum-exp and the tile scheduler's counters."""
        counters = (4 * memory.num_sequences(shape) + 1) * _INT32_BYTES
        return float32(shape.rows) + allocated(counters)

    def backward_allocates(self, shape: AttentionShape) -> int:
        return self._sums(shape)

    def _sums(self, shape: AttentionShape, extra_keys: int = 0) -> int:
        """Float32 sums of dQ, and of dK, dV where heads share them; two floats a row; semaphores.

        Blocks of keys are of 128 or fewer, so that less than 128 are added to fill the last. Sums
        of unequal lengths have that much for each sequence and one more; semaphores are for as many
        of the longest.
        """
        head_dim = memory.padded_head_dim(shape)
        if shape.most_packed:
            count, keys_each = shape.most_packed, ROW_BLOCK + extra_keys
            longest = memory.rounded_up(shape.longest_tokens, ROW_BLOCK)
            rows = memory.padded_rows(shape) + shape.num_heads * ROW_BLOCK
            keys = shape.num_keys + (count + 1) * keys_each
            rows_of_longest = count * shape.num_heads * longest
            keys_of_longest = count * (longest + keys_each)
        else:
            rows = rows_of_longest = memory.padded_rows(shape)
            keys = shape.num_sequences * (shape.num_keys + ROW_BLOCK + extra_keys)
            keys_of_longest = keys
        shares = memory.shares_keys(shape)
        shared = 2 * float32(keys * shape.num_kv_heads * head_dim) if shares else 0
        semaphores = 2 * float32(rows_of_longest // _SMALLEST_BLOCK)
        semaphores += 4 * float32(keys_of_longest * shape.num_kv_heads // _SMALLEST_BLOCK)
        return float32(rows * head_dim) + 2 * float32(rows) + shared + semaphores


class Flash4Facts(Flash3Facts):
    """FlashAttention-4."""

    most_head_dim = 128
    capabilities = (9, 10, 11)
    library = Library("flash-attn-4", "pip install --pre flash-attn-4")

    def forward_scratch(self, shape: AttentionShape) -> int:
        return memory.dense_lse(shape)

    def forward_allocates(self, shape: AttentionShape) -> int:
        """Blocks before each of many sequences of any lengths, and the sequence of each block."""
        count = shape.most_packed
        if count <= _LOOKUP_SEQUENCES:
            return 0
        blocks = shape.rows // _LOOKUP_ROWS + count + 1
        return allocated((count + 1) * _INT32_BYTES) + allocated(blocks * _INT32_BYTES)

    def backward_allocates(self, shape: AttentionShape) -> int:
        """On Blackwell pairs of blocks of keys may add one block more."""
        return self._sums(shape, extra_keys=ROW_BLOCK) + 2 * self.forward_allocates(shape)


class SdpaCudnnFacts(_Cuda):
    """cuDNN's attention as torch has it."""

    most_head_dim = 128
    capabilities = (8, 9, 10, 12)
    variable_length = False
    deterministic = False

    def forward_scratch(self, shape: AttentionShape) -> int:
        """A packed sequence of one token takes what eager attention takes."""
        own = memory.merged(shape)
        return max(own, _EAGER.forward_scratch(shape.of_one_token)) if shape.most_packed else own

    def backward_scratch(self, shape: AttentionShape) -> int:
        own = aligned(_SEED_BYTES) + memory.dense_lse_of_each(shape)
        return max(own, _EAGER.backward_scratch(shape.of_one_token)) if shape.most_packed else own

    def forward_allocates(self, shape: AttentionShape) -> int:
        return memory.results(shape)

    def backward_allocates(self, shape: AttentionShape) -> int:
        """The gradients, and what a fused backward must keep: a float32 sum of dQ, dO * O a row,
        and dK and dV of each query head."""
        shape = shape.longest
        rows = memory.padded_rows(shape)
        kept = float32(rows * shape.head_dim) + 2 * float32(rows)
        return memory.gradients(shape) + kept + memory.by_query_head(shape)


class CudnnFrontendFacts(_Cuda):
    """cuDNN's attention by its own frontend, deterministic."""

    most_head_dim = 128
    capabilities = (9, 10)
    variable_length = False
    causal_alone = True
    library = Library("nvidia-cudnn-frontend", "pip install nvidia-cudnn-frontend", (1, 18))

    def forward_scratch(self, shape: AttentionShape) -> int:
        """A packed sequence of one token takes what eager attention takes."""
        own = memory.dense_lse_of_each(shape)
        return max(own, _EAGER.forward_scratch(shape.of_one_token)) if shape.most_packed else own

    def backward_scratch(self, shape: AttentionShape) -> int:
        if not shape.most_packed:
            return super().backward_scratch(shape)
        return max(memory.dense_lse_of_each(shape), _EAGER.backward_scratch(shape.of_one_token))

    def forward_allocates(self, shape: AttentionShape) -> int:
        return allocated(1)

    def backward_allocates(self, shape: AttentionShape) -> int:
        """Of a call for some key heads, what the deterministic backward keeps: before cuDNN 9.25
        the probabilities, in bf16, since then a float32 sum of dQ; dO * O a row, dK and dV by query
        head. The source is closed: an estimate. Log-sum-exps of these heads are dense."""
        shape = shape.longest
        sizes = shape.num_sequences, shape.num_queries, shape.num_keys
        step = cudnn_key_heads(*sizes, shape.num_heads, shape.num_kv_heads)
        share = step / shape.num_kv_heads
        some = replace(shape, num_heads=round(share * shape.num_heads), num_kv_heads=step)
        rows = memory.padded_rows(some)
        probabilities = rows * memory.rounded_up(some.num_keys, ROW_BLOCK) * some.itemsize_bytes
        kept = max(allocated(probabilities), float32(rows * memory.padded_head_dim(some)))
        return kept + 2 * float32(rows) + memory.by_query_head(some) + float32(some.rows)


class CudnnSlicedFacts(CudnnFrontendFacts):
    """The same, whose backward is called for slices of the queries."""

    def backward_scratch(self, shape: AttentionShape) -> int:
        """Float32 sums of dK and dV; a slice's own, and its log-sum-exps, which are not dense."""
        slices = shape.slices()
        if shape.most_packed or len(slices) == 1:
            return super().backward_scratch(shape)
        sums = 0 if shape.sliced else memory.aligned_float32(shape.num_kv_elements)
        return sums + max(
            memory.aligned_float32(one.rows) + aligned(one.num_kv_elements * one.itemsize_bytes)
            for one in slices
        )

    def backward_allocates(self, shape: AttentionShape) -> int:
        """That of the slice that takes the most."""
        calls = [shape] if shape.most_packed else shape.slices()
        return max(map(super().backward_allocates, calls))


_EAGER = EagerFacts()
ATTENTIONS: dict[str, AttentionFacts] = {
    "eager": _EAGER,
    "sdpa_cpu": SdpaCpuFacts(),
    "sdpa_flash": SdpaFlashFacts(),
    "sdpa_cudnn": SdpaCudnnFacts(),
    "flash2": Flash2Facts(),
    "flash3": Flash3Facts(),
    "flash4": Flash4Facts(),
    "cudnn_frontend": CudnnFrontendFacts(),
    "cudnn_sliced": CudnnSlicedFacts(),
}
