"""Matrices of a frozen base as codes with scales (`models.adapters.quantized_base`), and back.

The levels of nf4 are the published ones, two codes to a byte, the first in the high half; a value
goes to the nearest level, one halfway between two to the lower. Values of 8bit are rounded to
nearest even. Decoded values are the level times the scale in float32, rounded once.
"""

from collections.abc import Iterator

import torch

from twinstream.models.layout import FlatLayout, InnerTensor
from twinstream.models.recipes.quantized_base import (
    BLOCK_ELEMENTS,
    SCALES,
    BaseFormat,
    quantized_layout,
)

NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
LARGEST_CODE = 127  # of 8bit
AT_A_TIME = 2**19  # elements, of which temporaries are a few MiB; whole blocks
_BINS = 128  # of a half of [-1, 1]


def levels(base: BaseFormat, device: torch.device) -> torch.Tensor | None:
    """Those of nf4, [16] float32; 8bit has none."""
    return torch.tensor(NF4_LEVELS, device=device) if base == "nf4" else None


def write_dequantized(
    codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, levels: torch.Tensor | None,
    block: int | None = None,
) -> None:  # fmt: skip
    """Values of codes, [bytes] uint8, with scales, [blocks] float32, in the dtype of `out`.

    Args:
        block: elements that share a scale, by default those of the format; a power of two. Codes
            are of whole blocks; what is beyond the values is left out.
    """
    flat = out.view(-1)
    block = block or BLOCK_ELEMENTS["8bit" if levels is None else "nf4"]
    num_codes = scales.numel() * block
    for start in range(0, num_codes, AT_A_TIME):
        end = min(start + AT_A_TIME, num_codes)
        if levels is not None:
            words = codes[start // 2 : end // 2].to(torch.int32)
            shares = levels[torch.stack((words >> 4, words & 15), dim=1)]
        else:
            shares = codes[start:end].view(torch.int8).float() / LARGEST_CODE
        by_block = shares.view(-1, block)
        by_block.mul_(scales[start // block : end // block, None])
        flat[start:end].copy_(by_block.view(-1)[: flat.numel() - start])


def quantize(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, base: BaseFormat
) -> None:
    """Write codes and scales of the values of a matrix, of any float dtype.

    A block of zeros has scale 0. A value that is not finite makes its block's scale so, too.
    """
    flat, table, block = values.reshape(-1), levels(base, values.device), BLOCK_ELEMENTS[base]
    for start in range(0, flat.numel(), AT_A_TIME):
        end = min(start + AT_A_TIME, flat.numel())
        by_block = flat[start:end].float().view(-1, block)
        largest = by_block.abs().amax(1)
        scales[start // block : end // block].copy_(largest)
        shares = by_block * torch.where(largest > 0, largest, 1.0).reciprocal()[:, None]
        shares = shares.nan_to_num()
        if table is not None:
            words = _nearest(shares.view(-1), (table[1:] + table[:-1]) / 2).view(-1, 2)
            codes[start // 2 : end // 2].copy_((words[:, 0] << 4) | words[:, 1])
        else:
            rounded = (shares * LARGEST_CODE).round().clamp(-LARGEST_CODE, LARGEST_CODE)
            codes[start:end].copy_(rounded.to(torch.int8).view(torch.uint8).view(-1))


def _nearest(shares: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """How many bounds are below each share of [-1, 1], as uint8: its level.

    Bounds are further apart than the bins here, and none is at the end of one, so that a bin says
    the level but for one comparison: eight times as fast as `torch.bucketize`.
    """
    edges = torch.arange(2 * _BINS + 2, device=shares.device) / _BINS - 1
    below = torch.bucketize(edges, bounds)
    next_bound = torch.cat([bounds, bounds.new_full((1,), 2.0)])[below]
    bins = ((shares + 1) * _BINS).to(torch.int32)
    of_bin = torch.index_select(below.to(torch.uint8), 0, bins)
    return of_bin + (shares > torch.index_select(next_bound, 0, bins))


def quantized_group(
    flat: torch.Tensor, layout: FlatLayout, dtype: torch.dtype, base: BaseFormat
) -> torch.Tensor:
    """A group's flat parameters, 1-D uint8 in the model's dtype, with its matrices as codes."""
    made = torch.zeros(quantized_layout(layout, base).size_bytes, dtype=torch.uint8)
    for values, codes, scales in _pairs(flat, made, layout, base):
        if scales is None:
            codes.copy_(values)
        else:
            quantize(values.view(dtype), codes, scales, base)
    return made


def dequantized_group(
    flat: torch.Tensor, layout: FlatLayout, dtype: torch.dtype, base: BaseFormat
) -> torch.Tensor:
    """The other way: what the kernels multiply with, in the model's dtype."""
    made, table = torch.zeros(layout.size_bytes, dtype=torch.uint8), levels(base, flat.device)
    for values, codes, scales in _pairs(made, flat, layout, base):
        if scales is None:
            values.copy_(codes)
        else:
            write_dequantized(codes, scales, values.view(dtype), table)
    return made


def _pairs(
    whole: torch.Tensor, coded: torch.Tensor, layout: FlatLayout, base: BaseFormat
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Of each inner tensor the bytes of its values and of its codes, and its scales if any."""
    quantized = quantized_layout(layout, base)
    scales = {inner.name: inner for inner in quantized.tensors if inner.name.endswith(SCALES)}
    for inner in layout.tensors:
        its_scales = scales.get(f"{inner.name}{SCALES}")
        yield (
            _bytes(whole, inner), _bytes(coded, quantized.tensor(inner.name)),
            None if its_scales is None else _bytes(coded, its_scales).view(torch.float32),
        )  # fmt: skip


def _bytes(flat: torch.Tensor, inner: InnerTensor) -> torch.Tensor:
    return flat[inner.offset_bytes : inner.offset_bytes + inner.size_bytes]
