"""Sizes that kernels and the formulas of their scratch share, so that both have the same."""

from twinstream.models.decoders.sizes import ITEMSIZE_BYTES
from twinstream.models.layout import aligned
from twinstream.models.options import Experts
from twinstream.models.recipes.recipe import OptimizerState

# Float32 logits that the head works on at a time: 32 MiB.
HEAD_BLOCK_ELEMENTS = 2**23
# Programs that share the rows of a Triton kernel which sums over them: two for each of the 132
# multiprocessors of an H100 or H200. A constant, because the order of the sums follows from it.
SUM_PROGRAMS = 264
# Values that one program of gradient_squares sums up: the order of the sum follows from it.
SUM_SHARE_ELEMENTS = 2**16
# Elements of an optimizer's 8-bit state that share a scale.
CODE_BLOCK_ELEMENTS = 256
# Elements of float32 that an elementwise operation in torch ops works on at a time.
BLOCK_ELEMENTS = 2**19
# Gathered elements that embed_backward works on at a time: 16 MiB in float32.
EMBED_BLOCK_ELEMENTS = 2**22

_FLOAT32_BYTES = 4
INT32_BYTES = 4
INT64_BYTES = FLOAT64_BYTES = 8


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


def router_block_width(d_model: int, experts: Experts) -> int:
    """Float32 numbers that a router has of a token at a time: a sigmoid's also of its input."""
    return max(d_model, experts.count) if experts.scores == "sigmoid" else experts.count


def sum_shares(num_elements: int) -> int:
    """Stretches of a gradient whose squares are summed up each by itself."""
    return -(-num_elements // SUM_SHARE_ELEMENTS)


def embed_block_columns(num_tokens: int, d_model: int) -> int:
    """Columns of the embedding gradient that embed_backward works on at a time."""
    return max(1, min(d_model, EMBED_BLOCK_ELEMENTS // num_tokens))


def float32_bytes(elements: int) -> int:
    """Of so many, with what aligns them."""
    return aligned(elements * _FLOAT32_BYTES)


def partial_sum_bytes(num_rows: int, width: int) -> int:
    """Of the shares that a Triton kernel leaves which sums over rows."""
    return float32_bytes(partial_sums(num_rows) * width)
