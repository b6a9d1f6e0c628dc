"""What updates by any rule have in common: the clipping of gradients, and how results are stored.

Every operation rounds each element by itself, so that any split into parts and blocks gives the
same bits.
"""

from collections.abc import Iterator, Sequence

import torch

from twinstream.executor.kernels.step_state import StepState
from twinstream.executor.kernels.vector.random_bits import random_words, stream_keys

CLIP_EPS = 1e-6


def clip_scale(max_norm: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """What gradients are multiplied by; NaN where the norm is."""
    off = (max_norm == 0.0) | max_norm.isinf()
    return torch.where(off, 1.0, (max_norm / (norm + CLIP_EPS)).clamp(max=1.0))


def outside(ranges: Sequence[tuple[int, int]], block: slice) -> Iterator[slice]:
    """What of a block lies in none of the ranges, which are in order; from the block's start on."""
    at = block.start
    for start, end in (*ranges, (block.stop, block.stop)):
        if at < (until := min(max(start, at), block.stop)):
            yield slice(at - block.start, until - block.start)
        at = max(at, end)


def random_16(
    step_state: StepState, stream: int | None, start: int, like: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """16 random bits for each element of a parameter and of up to three numbers of its state.

    They follow from the place of the element; None where nothing is rounded by chance.
    """
    if stream is None:
        return (None,) * 4
    step, seed = step_state.integers.unbind()
    keys = stream_keys(seed, step, stream)
    indices = torch.arange(start, start + like.numel(), device=like.device)
    others, words = random_words(keys, indices)
    return words & 0xFFFF, words >> 16, others & 0xFFFF, others >> 16


def rounded(x: torch.Tensor, dtype: torch.dtype, random_16: torch.Tensor | None) -> torch.Tensor:
    """A value that `dtype` holds, or that is rounded to nearest when it is stored."""
    if random_16 is None or dtype != torch.bfloat16:
        return x
    return _rounded_down_or_up(x, random_16)


def _rounded_down_or_up(x: torch.Tensor, random_16: torch.Tensor) -> torch.Tensor:
    """Round float32 to a bf16 value, to either neighbour with a chance that keeps the mean.

    Values that are bf16 already stay. Infinities and NaN stay; what is finite stays so.
    """
    limit = torch.finfo(torch.bfloat16).max
    bits = x.clamp(-limit, limit).view(torch.int32)
    bits.add_(random_16.to(torch.int32)).bitwise_and_(-0x10000)
    return torch.where(x.isfinite(), bits.view(torch.float32), x)
