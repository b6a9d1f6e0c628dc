"""Matrices whose values are codes times scales, each code a number by itself.

A scale is that of the whole matrix, of a row, or of a tile of rows and columns, of which the last
may be cut off: `weight_scale_inv` of DeepSeek's fp8, `weight_scale` of compressed-tensors,
fbgemm_fp8 and modelopt, `SCB` of bitsandbytes' int8, `scale` beside codes of 4 bits, two in a byte.
MXFP4 of gpt-oss (`_blocks`, `_scales`) is stored with rows and columns exchanged.

Sources: transformers 5.17, integrations.finegrained_fp8.Fp8Dequantize and integrations.mxfp4;
bitsandbytes 0.50, functional.int8_vectorwise_dequant; OCP Microscaling Formats 1.0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from twinstream.executor.weights.codes.coded_tensor import (
    AT_A_TIME,
    SCALE_DTYPES,
    VALUES,
    CodedTensor,
    read_bytes,
    read_scales,
)
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.safetensors_header import StoredTensor

FP8 = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_CODES = {**FP8, "I8": torch.int8}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # levels of 4 bits; the highest bit is the sign
_LEVELS = (*_E2M1, *(-level for level in _E2M1))
_GRAIN = 16  # of a tile's sides
_PUBLISHED = 128  # of fp8, where a config does not say it
_BLOCK_BYTES = 16  # of MXFP4: 32 codes that share a scale
_RANK = 2
LARGEST_INT8 = 127


@dataclass(frozen=True)
class ScaledTensor(CodedTensor):
    """`codes` and `scales`.

    Attributes:
        grid: shape of the scales, as long as the matrix's.
        tile: rows and columns that share one.
        divisor: of the products.
        is_packed: whether a byte holds two codes of 4 bits, the first in the low half.
    """

    grid: tuple[int, ...]
    tile: tuple[int, int]
    divisor: int = 1
    is_packed: bool = False

    def decode_into(self, out: torch.Tensor) -> None:
        """Fill a contiguous tensor of as many elements with the values."""
        rows, columns = self.shape[-2:]
        scales = read_scales(self.parts["scales"], self.name).view(-1, *self.grid[-2:])
        values = out.view(-1, rows, columns)
        at_a_time = max(1, AT_A_TIME // columns)
        for number, matrix in enumerate(values):
            its_scales = scales[number if len(scales) > 1 else 0]
            for start in range(0, rows, at_a_time):
                part = matrix[start : start + at_a_time]
                codes = self._codes(number * rows + start, len(part))
                part.copy_(self._scaled(codes, its_scales, start))

    def _codes(self, row: int, count: int) -> torch.Tensor:
        """Some rows, [count, columns] float32."""
        stored = self.parts["codes"]
        row_bytes = self.shape[-1] // (2 if self.is_packed else 1)
        read = read_bytes(stored, self.name, row * row_bytes, count * row_bytes)
        if self.is_packed:
            return unpacked(read).view(count, -1)
        return read.view(_CODES[stored.dtype]).view(count, -1).float()

    def _scaled(self, codes: torch.Tensor, scales: torch.Tensor, start: int) -> torch.Tensor:
        of_row = scales[torch.arange(start, start + len(codes)) // self.tile[0]]
        if of_row.shape[1] > 1:
            of_row = of_row.repeat_interleave(self.tile[1], 1)[:, : codes.shape[1]]
        codes.mul_(of_row)
        return codes if self.divisor == 1 else codes.mul_(1 / self.divisor)


@dataclass(frozen=True)
class Mxfp4Tensor(CodedTensor):
    """Experts' matrices, [experts, columns, rows]: `codes` and `scales` of their rows, which are
    exponents of two."""

    def decode_into(self, out: torch.Tensor) -> None:
        """Fill a contiguous tensor of as many elements with the values."""
        codes, scales = self.parts["codes"], self.parts["scales"]
        count, rows, columns = codes.shape[0], codes.shape[1], self.shape[1]
        exponents = read_bytes(scales, self.name).view(count, rows, -1, 1).to(torch.int32) - 127
        row_bytes, at_a_time = columns // 2, max(1, AT_A_TIME // columns)
        for number, matrix in enumerate(out.view(self.shape)):
            for start in range(0, rows, at_a_time):
                its_exponents = exponents[number, start : start + at_a_time]
                at, size = (number * rows + start) * row_bytes, len(its_exponents) * row_bytes
                levels = unpacked(read_bytes(codes, self.name, at, size))
                blocks = levels.view(len(its_exponents), -1, 2 * _BLOCK_BYTES)
                values = torch.ldexp(blocks, its_exponents).view(len(its_exponents), columns)
                matrix[:, start : start + at_a_time].copy_(values.T)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Levels of E2M1, float32: of a byte that of the low half is the first."""
    words = codes.to(torch.int32)
    return torch.tensor(_LEVELS)[torch.stack((words & 15, words >> 4), dim=-1)].view(-1)


def scaled_tensor(
    name: str, codes: StoredTensor, scales: StoredTensor, tile: tuple[int, int] | None,
    *, of_bitsandbytes: bool = False, is_packed: bool = False,
) -> ScaledTensor:  # fmt: skip
    """
    Args:
        tile: rows and columns that share a scale, where the config says it.

    Raises:
        WeightsError: the codes are no matrix, or the scales are not those of one of this shape.
    """
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if is_packed else 1)) if codes.shape else ()
    found = None if len(shape) < _RANK or 0 in shape else _grid_and_tile(shape, scales.shape, tile)
    is_by_row = prod(scales.shape) == shape[0] if shape else False
    if found is None or scales.dtype not in SCALE_DTYPES or (of_bitsandbytes and not is_by_row):
        said = "" if tile is None else f", a scale for {tile[0]} x {tile[1]} by config.json"
        raise WeightsError(
            codes.file,
            f"has {name} as {codes.dtype} codes of {list(shape)} and scales of "
            f"{list(scales.shape)} in {scales.dtype} ({scales.file.name}){said}: these do not "
            "belong together. Fetch the folder again, or give the one in bfloat16",
        )
    return ScaledTensor(
        codes.file, VALUES, shape, codes.start_bytes, codes.size_bytes, name,
        {"codes": codes, "scales": scales}, *found,
        divisor=LARGEST_INT8 if of_bitsandbytes else 1, is_packed=is_packed,
    )  # fmt: skip


def _grid_and_tile(
    shape: Sequence[int], scales: tuple[int, ...], tile: tuple[int, int] | None
) -> tuple[tuple[int, ...], tuple[int, int]] | None:
    """Shape of the scales in as many axes as the matrix has, and what shares one; None where they
    do not cover it."""
    grid = scales
    if prod(scales) == 1:
        grid = (1,) * len(shape)
    elif len(scales) == 1 and scales[0] == shape[0]:
        grid = (scales[0], *(1 for _ in shape[1:]))
    leading = grid[:-2]
    if len(grid) != len(shape) or leading not in (tuple(shape[:-2]), (1,) * len(leading)):
        return None
    axes = list(zip(shape[-2:], grid[-2:], strict=True))
    if tile is None and all(-(-length // _PUBLISHED) == count for length, count in axes):
        tile = (_PUBLISHED, _PUBLISHED)
    rows, columns = (_shared(*axis, told) for axis, told in zip(axes, tile or (0, 0), strict=True))
    return None if rows is None or columns is None else (grid, (rows, columns))


def _shared(length: int, count: int, told: int) -> int | None:
    """How much of an axis shares a scale, of which it has `count`: as is told, if that can be; or
    one element, all of them, or a number that formats have."""
    if told and -(-length // told) == count:
        return told
    shared, rest = divmod(length, count) if count else (0, 0)
    return shared if not rest and (1 in (shared, count) or shared % _GRAIN == 0 < shared) else None


def mxfp4_tensor(name: str, codes: StoredTensor, scales: StoredTensor) -> Mxfp4Tensor:
    """
    Raises:
        WeightsError: codes and scales are not of the same matrices.
    """
    match codes.shape:
        case (count, rows, blocks, 16) if scales.shape == (count, rows, blocks):
            if codes.dtype == scales.dtype == "U8":
                shape = (count, blocks * 2 * _BLOCK_BYTES, rows)
                return Mxfp4Tensor(
                    codes.file, VALUES, shape, codes.start_bytes, codes.size_bytes, name,
                    {"codes": codes, "scales": scales},
                )  # fmt: skip
    raise WeightsError(
        codes.file,
        f"has {name}_blocks of {list(codes.shape)} in {codes.dtype} and {name}_scales of "
        f"{list(scales.shape)} in {scales.dtype}: MXFP4 has [experts, rows, blocks, 16] and "
        "[experts, rows, blocks], both U8. Fetch the folder again, or give the one in bfloat16",
    )
