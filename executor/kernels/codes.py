"""Float32 values as 8-bit codes, with a float32 scale for every 256: the largest magnitude there.

A code is a small float, as a share of its scale. m has a sign, 4 bits of exponent and 3 of
mantissa: from 1 down to 2^-15, what is smaller is zero. v, which is never negative, has 5 bits of
exponent and 3 of mantissa: down to 2^-31, so that its root reaches as far as m. What is above zero
stays above zero there, as m is divided by it. Rounded to nearest, a code is off by at most a 16th
of the value, by chance by at most an 8th.
"""

import torch

from twinstream.models.kernel_costs.scratch_sizes import CODE_BLOCK_ELEMENTS

DROPPED_BITS = 20  # of a float32's mantissa of 23
# The exponent of 1 (127), less the largest of the code: what code 0 stands for is taken as zero.
SIGNED_BIAS, UNSIGNED_BIAS = 127 - 15, 127 - 31
SMALLEST_SCALE_BITS = 1 << 23  # of 2^-126, whose inverse is finite


def decoded(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Float32 values of uint8 codes that begin at a whole block."""
    words = codes.to(torch.int32)
    magnitudes = words & 0x7F if signed else words
    bias = SIGNED_BIAS if signed else UNSIGNED_BIAS
    shares = ((magnitudes << DROPPED_BITS) + (bias << 23)).view(torch.float32)
    shares = torch.where(magnitudes == 0, 0.0, shares)
    if signed:
        shares = torch.where(words > 0x7F, -shares, shares)
    return _by_block(shares).mul_(scales[:, None]).view(-1)[: codes.numel()]


def encode(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, random_16: torch.Tensor | None,
    *, signed: bool,
) -> None:  # fmt: skip
    """Write codes and scales of values, rounded to nearest, or by 16 random bits each.

    The scale of a block with a NaN is NaN, and so is all that is decoded with it.
    """
    blocks = _by_block(values)
    # As integers the magnitudes are in the same order, and NaN is the largest.
    largest = blocks.abs().view(torch.int32).amax(1).clamp_(min=SMALLEST_SCALE_BITS)
    scales.copy_(largest.view(torch.float32))
    shares = (blocks * scales.reciprocal()[:, None]).view(-1)[: values.numel()]
    shares = torch.where(shares.isfinite(), shares, 0.0)
    bias = SIGNED_BIAS if signed else UNSIGNED_BIAS
    bits = (shares.abs().view(torch.int32) - (bias << 23)).clamp_(min=0)
    if random_16 is None:
        half = (1 << (DROPPED_BITS - 1)) - 1
        bits += half + ((bits >> DROPPED_BITS) & 1)
    else:
        bits += random_16.to(torch.int32) << (DROPPED_BITS - 16)
    words = bits >> DROPPED_BITS
    words = words | ((shares < 0) << 7) if signed else words.clamp_(min=(shares > 0).int())
    codes.copy_(words)


def _by_block(values: torch.Tensor) -> torch.Tensor:
    """[blocks, 256], the last one filled up with zeros."""
    lacking = -values.numel() % CODE_BLOCK_ELEMENTS
    return torch.nn.functional.pad(values, (0, lacking)).view(-1, CODE_BLOCK_ELEMENTS)
