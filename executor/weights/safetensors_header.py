"""The header of a safetensors file: which tensors it holds, in which dtype, and where.

A file is the length of its header (8 bytes, little-endian), the header (JSON), and the tensors'
bytes, row-major, one after the other. Source: https://github.com/huggingface/safetensors.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from twinstream.executor.weights.errors import WeightsError
from twinstream.schedule.files import open_file, told

METADATA = "__metadata__"
DTYPES = {"bfloat16": "BF16", "float32": "F32"}
ITEMSIZE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as of the safetensors library
_LFS_POINTER = b"version "
_AGAIN = "fetch it again"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file has it: its bytes begin `start_bytes` into the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start_bytes: int
    size_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, from its header alone.

    Raises:
        WeightsError: there is no such file, its header is broken, or it is shorter than that says.
    """
    try:
        with open_file(path) as file:
            length = file.read(_LENGTH_BYTES)
            num_bytes = int.from_bytes(length, "little")
            if length == _LFS_POINTER:
                raise WeightsError(path, "is a Git LFS pointer, no weights: run `git lfs pull`")
            text = file.read(num_bytes) if num_bytes <= _MAX_HEADER_BYTES else b""
        file_bytes = path.stat().st_size
    except OSError as error:
        raise WeightsError(path, f"cannot be read: {told(error)}") from None
    if len(length) < _LENGTH_BYTES or len(text) < num_bytes:
        raise WeightsError(
            path,
            f"is cut off or no safetensors file: of its {file_bytes} bytes, the first {len(length)}"
            f" announce a header of {num_bytes}; {_AGAIN}",
        )
    start_bytes = _LENGTH_BYTES + num_bytes
    tensors = {
        name: _stored(path, name, entry, start_bytes)
        for name, entry in _entries(path, text).items()
        if name != METADATA
    }
    end_bytes = max((t.start_bytes + t.size_bytes for t in tensors.values()), default=start_bytes)
    if file_bytes < end_bytes:
        last = max(tensors, key=lambda name: tensors[name].start_bytes + tensors[name].size_bytes)
        raise WeightsError(
            path,
            f"is cut off: it has {file_bytes} bytes of the {end_bytes} that its header announces, "
            f"{last} at the end; {_AGAIN}",
        )
    return tensors


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written; `dtype` is safetensors' name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Without any padding: tensors follow one another directly."""
        return prod(self.shape) * ITEMSIZE_BYTES[self.dtype]


def new_header(tensors: Iterable[NewTensor]) -> tuple[bytes, Mapping[str, int], int]:
    """A file's first bytes, where each tensor begins in the file, and where the file ends.

    The bytes are those that the safetensors library writes for tensors of one dtype, which it
    orders by name.
    """
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    starts: dict[str, int] = {}
    end_bytes = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        starts[tensor.name] = end_bytes
        end_bytes += tensor.size_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (starts[tensor.name], end_bytes),
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    begin = len(header)
    return header, {name: begin + at for name, at in starts.items()}, begin + end_bytes


def _entries(path: Path, text: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(path, f"its header is not valid JSON ({error}); {_AGAIN}") from None
    if not isinstance(entries, dict):
        raise WeightsError(path, f"its header is not a JSON object; {_AGAIN}")
    return entries


def _stored(path: Path, name: str, entry: object, start_bytes: int) -> StoredTensor:
    match entry:
        case {
            "dtype": str(dtype),
            "shape": [*shape],
            "data_offsets": [int(begin), int(end)],
        } if 0 <= begin <= end and all(isinstance(n, int) and n >= 0 for n in shape):
            size_bytes = prod(shape) * ITEMSIZE_BYTES.get(dtype, 0)
            if dtype not in ITEMSIZE_BYTES or size_bytes == end - begin:
                return StoredTensor(path, dtype, tuple(shape), start_bytes + begin, end - begin)
    raise WeightsError(path, f"its header is broken at {name}: {entry!r:.200}; {_AGAIN}")
