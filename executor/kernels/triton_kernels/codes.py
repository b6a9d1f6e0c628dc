"""8-bit codes of rows of float32 values, and back: the bits of the eager ones (`kernels.codes`)."""

import triton.language as tl

from twinstream.executor.kernels import codes
from twinstream.executor.kernels.triton_kernels.launch import device_function

_DROPPED = tl.constexpr(codes.DROPPED_BITS)
_BELOW_HALF = tl.constexpr((1 << (codes.DROPPED_BITS - 1)) - 1)
_SIGNED_BIAS = tl.constexpr(codes.SIGNED_BIAS)
_UNSIGNED_BIAS = tl.constexpr(codes.UNSIGNED_BIAS)
_SMALLEST_SCALE = tl.constexpr(codes.SMALLEST_SCALE_BITS)


@device_function
def load_decoded(codes_ptr_RB, scales_ptr_R, inside_RB, inside_R, SIGNED: tl.constexpr):
    """Float32 values of uint8 codes, rows of a block each."""
    scales_R = tl.load(scales_ptr_R, mask=inside_R, other=0.0)
    words = tl.load(codes_ptr_RB, mask=inside_RB, other=0).to(tl.int32)
    if SIGNED:
        magnitudes = words & 0x7F
        shares = ((magnitudes << _DROPPED) + (_SIGNED_BIAS << 23)).to(tl.float32, bitcast=True)
        shares = tl.where(magnitudes == 0, 0.0, shares)
        shares = tl.where(words > 0x7F, -shares, shares)
    else:
        shares = ((words << _DROPPED) + (_UNSIGNED_BIAS << 23)).to(tl.float32, bitcast=True)
        shares = tl.where(words == 0, 0.0, shares)
    return shares * scales_R[:, None]


@device_function
def encoded(x_RB, random_16, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes and, of each row, its scale; NaN where the row has a NaN."""
    magnitudes = x_RB.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest_R = tl.maximum(tl.max(magnitudes, axis=1), _SMALLEST_SCALE)
    scales_R = largest_R.to(tl.float32, bitcast=True)
    shares = x_RB * tl.div_rn(tl.full(scales_R.shape, 1.0, tl.float32), scales_R)[:, None]
    bits = shares.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.where(bits < 0x7F800000, bits, 0)
    if SIGNED:
        bits = tl.maximum(bits - (_SIGNED_BIAS << 23), 0)
    else:
        bits = tl.maximum(bits - (_UNSIGNED_BIAS << 23), 0)
    if STOCHASTIC:
        bits += random_16.to(tl.int32) << (_DROPPED - 16)
    else:
        bits += _BELOW_HALF + ((bits >> _DROPPED) & 1)
    words = bits >> _DROPPED
    if SIGNED:
        words |= tl.where(shares < 0.0, 0x80, 0)
    else:
        words = tl.where(shares > 0.0, tl.maximum(words, 1), words)
    return words.to(tl.uint8), scales_R
