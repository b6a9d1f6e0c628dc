"""Values of a frozen base's codes: the bits of the eager ones (`kernels.base_codes`)."""

import torch
import triton
import triton.language as tl

from twinstream.executor.kernels.base_codes import LARGEST_CODE
from twinstream.executor.kernels.triton_kernels.launch import launch
from twinstream.executor.kernels.triton_kernels.rounding import rounded
from twinstream.models.recipes.quantized_base import BLOCK_ELEMENTS

# A thread writes 16 bytes at a time, of 4 bytes of codes of nf4: loads of a warp lie together.
_BYTES, _WARPS = 2048, 4
_LARGEST = tl.constexpr(LARGEST_CODE)


def write_dequantized(
    codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, levels: torch.Tensor | None
) -> None:
    """Each program has stretches of whole blocks."""
    count, block = out.numel(), _BYTES if levels is None else 2 * _BYTES
    launch(
        _dequantize_kernel, (triton.cdiv(count, block),), codes, scales, out,
        scales if levels is None else levels, count, NF4=levels is not None,
        SHARED=BLOCK_ELEMENTS["8bit" if levels is None else "nf4"], BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip


@triton.jit
def _dequantize_kernel(
    codes_ptr, scales_ptr, out_ptr, levels_ptr, count, NF4: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    scale = tl.load(scales_ptr + at // SHARED, mask=inside, other=0.0)
    if NF4:  # two codes to a byte, the first in the high half
        half = tl.program_id(0).to(tl.int64) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        words = tl.load(codes_ptr + half, mask=half < count // 2, other=0).to(tl.int32)
        share = tl.load(levels_ptr + tl.interleave(words >> 4, words & 15))
    else:
        words = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
        whole = tl.where(words > _LARGEST, words - 256, words).to(tl.float32)
        share = tl.div_rn(whole, tl.full(whole.shape, _LARGEST, tl.float32))
    tl.store(out_ptr + at, rounded(share * scale, out_ptr.dtype.element_ty), mask=inside)
