"""What updates by any rule have in common: the clipping of gradients, and how results are stored.

Every operation rounds each element by itself, so that any split into parts and blocks gives the
same bits. Random numbers are counter-based, out of integer torch ops: the same on CPU and CUDA.
They are unsigned 32-bit numbers held in int64, and multipliers are below 2**31, so that no product
overflows. The mixing function is the best two-round one of the search cited.

Source: Wellons, hash-prospector, https://github.com/skeeto/hash-prospector.
"""

from collections.abc import Iterator, Sequence

import torch

from twinstream.executor.kernels.step_state import StepState

CLIP_EPS = 1e-6
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0x21F0AAAD, 0x735A2D97)
_GOLDEN = 0x9E3779B9


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


def stream_keys(seed: torch.Tensor, step: torch.Tensor, stream: int) -> tuple[torch.Tensor, ...]:
    """Two keys of the random numbers of (seed, step, stream), made where seed and step are.

    Args:
        seed, step: int64 tensors without dimensions.
        stream: any integer; its low 64 bits count.
    """
    words = [seed & _MASK, (seed >> 32) & _MASK, step & _MASK, (step >> 32) & _MASK]
    words += [torch.full_like(seed, (stream >> shift) & _MASK) for shift in (0, 32)]
    keys = []
    for salt in (0, _GOLDEN):
        key = torch.full_like(seed, salt)
        for word in words:
            key = _mix(((key ^ word) + _GOLDEN) & _MASK)
        keys.append(key)
    return tuple(keys)


def random_words(
    keys: tuple[torch.Tensor, ...], indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two 32-bit random numbers for each index; functions of keys and index alone.

    The second is the first mixed once more.
    """
    words = _mix((indices & _MASK).bitwise_xor_(keys[0]))
    high = (indices >> 32).bitwise_and_(_MASK).mul_(_MULTIPLIERS[0])
    words.add_(keys[1]).add_(high).bitwise_and_(_MASK)
    return words, _mix(words.clone())


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Mix 32-bit words in place, one to one."""
    words.bitwise_xor_(words >> 16).mul_(_MULTIPLIERS[0]).bitwise_and_(_MASK)
    words.bitwise_xor_(words >> 15).mul_(_MULTIPLIERS[1]).bitwise_and_(_MASK)
    return words.bitwise_xor_(words >> 15)
