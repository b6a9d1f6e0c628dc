"""Matrices that bitsandbytes stored in 4 bits: codes, scales and what they are told of themselves.

`NAME` has two codes to a byte, the first in the high half, under any dtype (its quant_storage);
`NAME.absmax` a scale for every block of 64 or as many as are told, float32, or uint8 codes with
scales of their own (double quantisation): `NAME.nested_quant_map` has the 256 levels of those,
`NAME.nested_absmax` a float32 for every 256, and the offset is in the JSON of
`NAME.quant_state.bitsandbytes__nf4`, or `__fp4`; `NAME.quant_map` repeats the 16 levels. Source:
bitsandbytes 0.50, functional.QuantState and get_4bit_type.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from twinstream.executor.kernels.base_codes import NF4_LEVELS, write_dequantized
from twinstream.executor.weights.codes.coded_tensor import (
    VALUES,
    CodedTensor,
    finite,
    read_bytes,
)
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.safetensors_header import StoredTensor
from twinstream.models.recipes.quantized_base import BLOCK_ELEMENTS

_STATE = ".quant_state.bitsandbytes__"
COMPANIONS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_NESTED = ("nested_absmax", "nested_quant_map", "nested_blocksize", "nested_offset")
_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # of FP4; the highest bit is the sign
_LEVELS = {
    "nf4": NF4_LEVELS,
    "fp4": tuple(sign * level / 12 for sign in (1, -1) for level in _TWELFTHS),
}
_LARGEST_BLOCK = 4096
_LARGEST_STATE_BYTES = 2**16
_MAX_RANK = 8
_LEVEL_TOLERANCE = 1e-6
_LARGEST = float(torch.finfo(torch.float32).max)
_REMEDY = "fetch it again, or give the folder that is not quantised"


@dataclass(frozen=True)
class FourBitTensor(CodedTensor):
    """`codes`, `absmax` and, of doubly quantised ones, two more.

    Attributes:
        kind: nf4 or fp4.
        block: elements that share a scale.
        nested_block: scales that share one of their own; 0 where these are float32.
        nested_offset: of the scales.
    """

    kind: str
    block: int
    nested_block: int
    nested_offset: float

    @property
    def is_base(self) -> bool:
        """Return whether codes and scales can be kept as they are in a base in nf4."""
        block = BLOCK_ELEMENTS["nf4"]
        return self.kind == "nf4" and self.block == block and prod(self.shape) % block == 0

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of whole blocks, two to a byte, 1-D uint8, and a scale for each, 1-D float32.

        Raises:
            WeightsError: a file has gone or changed, or scales are not finite.
        """
        codes, absmax = (read_bytes(self.parts[part], self.name) for part in ("codes", "absmax"))
        scales = absmax
        if self.nested_block:
            levels, nested = self._floats("nested_quant_map"), self._floats("nested_absmax")
            of_each = nested.repeat_interleave(self.nested_block)[: absmax.numel()]
            scales = levels[absmax.long()] * of_each + self.nested_offset
        scales = finite(scales.view(torch.float32), self.parts["absmax"], self.name)
        whole = scales.numel() * self.block // 2
        return torch.nn.functional.pad(codes, (0, whole - codes.numel())), scales

    def decode_into(self, out: torch.Tensor) -> None:
        """Fill a contiguous tensor of as many elements with the values."""
        codes, scales = self.read()
        write_dequantized(codes, scales, out, torch.tensor(_LEVELS[self.kind]), self.block)

    def _floats(self, part: str) -> torch.Tensor:
        return read_bytes(self.parts[part], self.name).view(torch.float32)


def nf4_matrices(stored: Mapping[str, StoredTensor]) -> dict[str, FourBitTensor]:
    """Those in 4 bits among the tensors of files, by name; what they are told, and their levels,
    are read.

    Raises:
        WeightsError: a part of one is missing, of another size or dtype, or says what cannot be.
    """
    found = {}
    for key, state in stored.items():
        name, is_state, kind = key.partition(_STATE)
        if is_state:
            found[name] = _matrix(name, kind, state, stored)
    return found


def names_of_parts(matrix: FourBitTensor) -> tuple[str, ...]:
    """All names under which parts of a matrix are stored, its own among them."""
    name = matrix.name
    return (name, f"{name}{_STATE}{matrix.kind}", *(f"{name}.{part}" for part in COMPANIONS))


def _matrix(
    name: str, kind: str, state: StoredTensor, stored: Mapping[str, StoredTensor]
) -> FourBitTensor:
    told = _told(name, state)
    names = {"codes": name} | {part: f"{name}.{part}" for part in COMPANIONS}
    parts = {part: stored[full] for part, full in names.items() if full in stored}
    is_nested = any(part in parts or part in told for part in _NESTED)
    wrong = _wrong_state(told, kind, parts, is_nested=is_nested) or _wrong_parts(
        told, parts, is_nested=is_nested
    )
    if not wrong and not _has_levels(parts["quant_map"], name, kind):
        wrong = f"a quant_map that is not the 16 levels of {kind}"
    if wrong:
        file = parts["codes"].file if "codes" in parts else state.file
        raise WeightsError(file, f"has {name} in 4 bits of bitsandbytes with {wrong}; {_REMEDY}")
    at = parts["codes"]
    return FourBitTensor(
        at.file, VALUES, tuple(told["shape"]), at.start_bytes, at.size_bytes, name, parts, kind,
        told["blocksize"], told["nested_blocksize"] if is_nested else 0,
        float(told["nested_offset"]) if is_nested else 0.0,
    )  # fmt: skip


def _wrong_state(
    told: Mapping[str, Any], kind: str, parts: Mapping[str, StoredTensor], *, is_nested: bool
) -> str:
    """What no reader of its state could make sense of; empty if nothing."""
    if kind not in _LEVELS or told.get("quant_type") != kind:
        return f"quant_type {told.get('quant_type')!r:.40} in a quant_state of {kind:.40}"
    shape = told.get("shape")
    if not isinstance(shape, list) or not 0 < len(shape) <= _MAX_RANK:
        return f"shape {shape!r:.80}, which is not a list of sizes"
    if not all(type(size) is int and size > 0 for size in shape):
        return f"shape {shape!r:.80}, whose sizes are not all positive"
    if not _is_block(told.get("blocksize")):
        return f"blocksize {told.get('blocksize')!r:.40}, which is no power of two up to 4096"
    if missing := [part for part in ("codes", "absmax", "quant_map") if part not in parts]:
        return f"no {' and no '.join(missing)}"
    if not is_nested:
        return ""
    if missing := [part for part in _NESTED if part not in parts and part not in told]:
        return f"doubly quantised scales, but no {' and no '.join(missing)}"
    if not _is_block(told.get("nested_blocksize")):
        wrong = told.get("nested_blocksize")
        return f"nested_blocksize {wrong!r:.40}, which is no power of two up to 4096"
    offset: Any = told.get("nested_offset")
    if type(offset) not in (int, float) or not abs(offset) <= _LARGEST:  # nor NaN
        return f"nested_offset {offset!r:.40}, which is no finite float32"
    return ""


def _wrong_parts(
    told: Mapping[str, Any], parts: Mapping[str, StoredTensor], *, is_nested: bool
) -> str:
    """Which part has not the size or dtype that the state means; empty if none."""
    count = prod(told["shape"])
    num_bytes, num_scales = -(-count // 2), -(-count // told["blocksize"])
    if parts["codes"].size_bytes != num_bytes:
        return (
            f"{parts['codes'].size_bytes} bytes of codes, where its shape {told['shape']!s:.80} "
            f"needs {num_bytes}"
        )
    wanted = {"absmax": ("U8" if is_nested else "F32", num_scales), "quant_map": ("F32", 16)}
    if is_nested:
        wanted["nested_absmax"] = ("F32", -(-num_scales // told["nested_blocksize"]))
        wanted["nested_quant_map"] = ("F32", 256)
    for part, (dtype, size) in wanted.items():
        at = parts.get(part)
        if at is None:
            return f"doubly quantised scales, but no {part}"
        if at.dtype != dtype or prod(at.shape) != size or len(at.shape) != 1:
            return f"{part} of {list(at.shape)} in {at.dtype}, where {[size]} in {dtype} is needed"
    return ""


def _is_block(told: object) -> bool:
    return type(told) is int and 1 < told <= _LARGEST_BLOCK and told & (told - 1) == 0


def _has_levels(stored: StoredTensor, name: str, kind: str) -> bool:
    levels = read_bytes(stored, f"{name}.quant_map").view(torch.float32)
    return bool(((levels - torch.tensor(_LEVELS[kind])).abs() <= _LEVEL_TOLERANCE).all())


def _told(name: str, stored: StoredTensor) -> dict[str, Any]:
    told = None
    if stored.size_bytes <= _LARGEST_STATE_BYTES:
        with suppress(ValueError, RecursionError):
            told = json.loads(bytes(read_bytes(stored, f"the quant_state of {name}").tolist()))
    if not isinstance(told, dict):
        raise WeightsError(
            stored.file, f"has a quant_state of {name} that is no JSON object; {_REMEDY}"
        )
    return told
