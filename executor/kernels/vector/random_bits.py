"""Counter-based random numbers out of integer torch ops: the same on CPU and CUDA.

Values are unsigned 32-bit numbers held in int64, and multipliers are below 2**31, so that no
product overflows. The mixing function is the best two-round one of the search cited.

Source: Wellons, hash-prospector, https://github.com/skeeto/hash-prospector.
"""

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0x21F0AAAD, 0x735A2D97)
_GOLDEN = 0x9E3779B9


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
