"""What updates by any rule have in common: the clipping of gradients, and how results are stored.

Every operation rounds each element by itself, so that any split into parts and blocks gives the
same bits. Random numbers are counter-based, out of 32-bit integer ops that wrap around: the same on
CPU and CUDA, and in Triton.

Rounding to bf16 takes 16 random bits. One 32-bit word is enough for three roundings of an element:
its low half, its high half and their exclusive or are each uniform, and any two are independent.
So each rounding keeps its mean, and no two of an element are correlated; only all three together
are bound, which no update reads together. Words of two elements, steps or tensors differ by the
index or by both keys, one of which enters within the mixing, so that no two streams are the same
sequence, shifted. The mixing function is the three-round one of the search cited.

Source: Wellons, hash-prospector, https://github.com/skeeto/hash-prospector.
"""

from collections.abc import Iterator, Sequence

import torch

from twinstream.executor.kernels.step_state import StepState

CLIP_EPS = 1e-6
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0x21F0AAAD, 0x735A2D97)
_GOLDEN = 0x9E3779B9
# Shifts to the right, and what follows each but the last: the best three rounds.
_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB), (14, 0))


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


Keys = tuple[torch.Tensor, torch.Tensor]


def random_16(
    keys: Keys | None, start: int, like: torch.Tensor, num_states: int = 2
) -> tuple[torch.Tensor | None, ...]:
    """Return 16 random bits, int32, for each element of a parameter and of up to three numbers of
    its state.

    They follow from the place of the element; None where nothing is rounded by chance.
    """
    if keys is None:
        return (None,) * (1 + num_states)
    words = random_words(keys, start, like)
    low, high = words & 0xFFFF, words.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    if num_states < 3:
        return low, high, low ^ high
    fourth = random_words((keys[1], keys[0]), start, like).bitwise_and_(0xFFFF)
    return low, high, low ^ high, fourth


def rounded(x: torch.Tensor, dtype: torch.dtype, random_16: torch.Tensor | None) -> torch.Tensor:
    """A value that `dtype` holds, or that is rounded to nearest when it is stored; `x` is lost."""
    if random_16 is None or dtype != torch.bfloat16:
        return x
    return _rounded_down_or_up(x, random_16)


def _rounded_down_or_up(x: torch.Tensor, random_16: torch.Tensor) -> torch.Tensor:
    """Round float32 to a bf16 value, to either neighbour with a chance that keeps the mean.

    Values that are bf16 already stay. Infinities and NaN stay; what is finite stays so.
    """
    limit = torch.finfo(torch.bfloat16).max
    # On a CPU, where nothing waits for it, a look at the largest one saves four passes.
    if x.device.type == "cpu" and bool((x.abs().amax() if x.numel() else x.sum()) <= limit):
        x.view(torch.int32).add_(random_16)
        return x.view(torch.bfloat16)[1::2]  # the upper half of each: memory is little-endian
    bits = x.clamp(-limit, limit).view(torch.int32)
    bits.add_(random_16).bitwise_and_(-0x10000)
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


def stream_keys(step_state: StepState, stream: int | None) -> Keys | None:
    """Return two keys of the random numbers of (seed, step, stream), made where seed and step are.

    Args:
        stream: any integer, of which the low 64 bits count; None has no keys.
    """
    if stream is None:
        return None
    step, seed = step_state.integers.unbind()
    words = [seed & _MASK, (seed >> 32) & _MASK, step & _MASK, (step >> 32) & _MASK]
    words += [torch.full_like(seed, (stream >> shift) & _MASK) for shift in (0, 32)]
    keys = []
    for salt in (0, _GOLDEN):
        key = torch.full_like(seed, salt)
        for word in words:
            key = _mix(((key ^ word) + _GOLDEN) & _MASK)
        keys.append(key)
    return keys[0], keys[1]


def random_words(keys: Keys, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits, int32, for each index from `start`, which follow from keys and index
    alone."""
    count, until = like.numel(), -start % 2**32 or 2**32
    if until < count:  # the upper half of the index changes
        before = random_words(keys, start, like.flatten()[:until])
        return torch.cat([before, random_words(keys, start + until, like.flatten()[until:])])
    second = (keys[1] + (start >> 32) * _MULTIPLIERS[0]) & _MASK
    words = torch.arange(count, dtype=torch.int32, device=like.device)
    words.add_(_signed(keys[0] + start & _MASK))
    shifted = torch.empty_like(words)
    for number, (shift, factor) in enumerate(_ROUNDS):
        torch.bitwise_right_shift(words, shift, out=shifted)  # arithmetic, hence the mask
        words.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1))
        if number == 0:
            words.bitwise_xor_(_signed(second))
        if factor:
            words.mul_(factor - 2**32)
    return words


def _signed(word: torch.Tensor) -> torch.Tensor:
    """The int32 with the bits of a 32-bit word that is held in int64."""
    return ((word ^ 2**31) - 2**31).to(torch.int32)


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Mix 32-bit words in place, one to one."""
    words.bitwise_xor_(words >> 16).mul_(_MULTIPLIERS[0]).bitwise_and_(_MASK)
    words.bitwise_xor_(words >> 15).mul_(_MULTIPLIERS[1]).bitwise_and_(_MASK)
    return words.bitwise_xor_(words >> 15)
