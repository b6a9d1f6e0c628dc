"""Float32 to the dtype of a result, rounded to nearest, ties to even."""

import triton
import triton.language as tl

from twinstream.executor.kernels.triton_kernels.launch import device_function

# The interpreter cuts bits off where the hardware rounds, so there the rounding is spelled out.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@device_function
def rounded(x, dtype: tl.constexpr):
    """float32 `x` as `dtype`, float32 or bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        bits &= 0xFFFF0000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x).to(tl.bfloat16)
    return x.to(dtype)
