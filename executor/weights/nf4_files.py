"""Matrices that bitsandbytes stored in NF4: codes, scales and what they are told of themselves.

`NAME` is uint8, two codes to a byte; `NAME.absmax` a scale for every block of 64, float32, or uint8
codes with scales of their own (double quantisation): `NAME.nested_quant_map` has the 256 levels of
those, `NAME.nested_absmax` a float32 for every 256, and the offset is in the JSON of
`NAME.quant_state.bitsandbytes__nf4`. Source: bitsandbytes 0.50, functional.QuantState.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import torch

from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.safetensors_header import StoredTensor
from twinstream.models.adapters.quantized_base import BLOCK_ELEMENTS
from twinstream.schedule.files import reason_of

_STATE = ".quant_state.bitsandbytes__nf4"
_COMPANIONS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_DTYPES = {"U8": torch.uint8, "F32": torch.float32}


@dataclass(frozen=True)
class StoredNf4:
    """One matrix, and where everything of it lies."""

    name: str
    shape: tuple[int, ...]
    tensors: Mapping[str, StoredTensor]
    told: Mapping[str, Any]

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes, [elements / 2] uint8, and scales, [elements / 64] float32.

        Raises:
            WeightsError: a file has gone, or what it has is not as long as the matrix needs.
        """
        codes, absmax = self._read(""), self._read("absmax")
        if "nested_absmax" in self.tensors:
            levels, scales = self._read("nested_quant_map"), self._read("nested_absmax")
            block = int(self.told["nested_blocksize"])
            of_each = scales.repeat_interleave(block)[: absmax.numel()]
            absmax = levels[absmax.long()] * of_each + float(self.told["nested_offset"])
        count = prod(self.shape)
        wanted = (count // 2, count // BLOCK_ELEMENTS["nf4"])
        if (codes.numel(), absmax.numel()) != wanted:
            raise WeightsError(
                self.tensors[""].file,
                f"has {codes.numel()} bytes of codes and {absmax.numel()} scales of {self.name}, "
                f"whose shape {list(self.shape)} needs {wanted[0]} and {wanted[1]}",
            )
        return codes, absmax.float()

    def _read(self, what: str) -> torch.Tensor:
        stored = self.tensors[what]
        dtype = _DTYPES.get(stored.dtype)
        if dtype is None:
            raise WeightsError(stored.file, f"has {what or 'codes'} of {self.name} {stored.dtype}")
        return _bytes_of(stored, self.name).view(dtype)


def nf4_matrices(stored: Mapping[str, StoredTensor]) -> dict[str, StoredNf4]:
    """Those among the tensors of files, by name; nothing but what they are told is read.

    Raises:
        WeightsError: one is told to be in another form than blocks of 64, or tensors of it lack.
    """
    found = {}
    for key in stored:
        if not key.endswith(_STATE):
            continue
        name = key.removesuffix(_STATE)
        told = _told(stored[key])
        tensors = {"": name} | {one: f"{name}.{one}" for one in _COMPANIONS}
        here = {what: stored[full] for what, full in tensors.items() if full in stored}
        nested = ("nested_quant_map", "nested_blocksize", "nested_offset")
        whole = {"", "absmax"} <= here.keys() and (
            "nested_absmax" not in here or all(one in here or one in told for one in nested)
        )
        if told.get("blocksize") != BLOCK_ELEMENTS["nf4"] or not whole or "shape" not in told:
            raise WeightsError(
                stored[key].file,
                f"has {name} in NF4 that is not read: blocks of {told.get('blocksize')}, with "
                f"{', '.join(filter(None, here)) or 'nothing'}; needed are blocks of 64 and absmax",
            )
        found[name] = StoredNf4(name, tuple(told["shape"]), here, told)
    return found


def without_companions(
    stored: Mapping[str, StoredTensor], matrices: Mapping[str, StoredNf4]
) -> dict[str, StoredTensor]:
    """The tensors of files as if matrices in NF4 were stored in their shapes, in bfloat16."""
    theirs = {f"{name}.{one}" for name in matrices for one in _COMPANIONS}
    found = {n: s for n, s in stored.items() if n not in theirs and not n.endswith(_STATE)}
    for name, matrix in matrices.items():
        at = stored[name]
        found[name] = StoredTensor(at.file, "BF16", matrix.shape, at.start_bytes, at.size_bytes)
    return found


def _told(stored: StoredTensor) -> dict[str, Any]:
    try:
        told = json.loads(bytes(_bytes_of(stored, "its quant_state").tolist()))
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise WeightsError(stored.file, "has a quant_state that is no JSON object; fetch it again")
    return told


def _bytes_of(stored: StoredTensor, name: str) -> torch.Tensor:
    made = torch.empty(stored.size_bytes, dtype=torch.uint8)
    try:
        with stored.file.open("rb") as file:
            file.seek(stored.start_bytes)
            fill(file, made, name)
    except OSError as error:
        raise WeightsError(stored.file, f"cannot be read: {reason_of(error)}") from None
    return made


def fill(file: BufferedReader, destination: torch.Tensor, name: str) -> None:
    """Read as many bytes as the destination, 1-D uint8, has.

    Raises:
        WeightsError: the file ends before.
    """
    num_bytes = file.readinto(destination.numpy().data)
    if num_bytes != destination.numel():
        raise WeightsError(
            Path(file.name),
            f"ends within {name}, though it was long enough before: it has been changed",
        )
