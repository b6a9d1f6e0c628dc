"""The header of a safetensors file: which tensors it holds, in which dtype, and where.

A file is the length of its header (8 bytes, little-endian), the header (JSON), and the tensors'
bytes, row-major, one after the other, without a gap, to the end of the file. What that library
refuses is refused, and so are duplicate names, which the format forbids and the library lets pass.
Source: https://github.com/huggingface/safetensors.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from twinstream.executor.weights.errors import WeightsError
from twinstream.schedule.files import open_file, reason_of

METADATA = "__metadata__"
DTYPES = {"bfloat16": "BF16", "float32": "F32", "int64": "I64"}
ITEMSIZE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8}
_BITS = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8},
    **{"F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16},
    **{"F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64},
    "U64": 64,
}
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

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the file that has this tensor."""
        return (self.file,)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, from its header alone.

    Raises:
        WeightsError: there is no such file, its header is broken, or the tensors do not lie one
            after the other to its end.
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
        raise WeightsError(path, f"cannot be read: {reason_of(error)}") from None
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
    _require_covered(path, tensors, start_bytes, file_bytes)
    return tensors


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written; `dtype` is safetensors' name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the tensor in its file, where nothing is padded."""
        return prod(self.shape) * _BITS[self.dtype] // 8


def new_header(tensors: Iterable[NewTensor]) -> tuple[bytes, Mapping[str, int], int]:
    """A file's first bytes, where each tensor begins in the file, and where the file ends.

    The bytes are those that the safetensors library writes, which orders tensors by dtype, those of
    the largest elements first, and by name.
    """
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    starts: dict[str, int] = {}
    end_bytes = 0
    order = {dtype: number for number, dtype in enumerate(_BITS)}
    for tensor in sorted(tensors, key=lambda t: (-order[t.dtype], t.name)):
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


def _require_covered(
    path: Path, tensors: Mapping[str, StoredTensor], start_bytes: int, file_bytes: int
) -> None:
    """Refuse holes, overlaps, and a file that ends before or after its last tensor."""
    end_bytes, last = start_bytes, "the header"
    in_order = sorted(tensors.items(), key=lambda item: (item[1].start_bytes, item[1].size_bytes))
    for name, tensor in in_order:
        if tensor.start_bytes != end_bytes:
            raise WeightsError(
                path, f"is damaged: {name} begins at byte {tensor.start_bytes} of the file, and "
                f"{last} before it ends at byte {end_bytes}; {_AGAIN}",
            )  # fmt: skip
        end_bytes, last = end_bytes + tensor.size_bytes, name
    if file_bytes < end_bytes:
        raise WeightsError(
            path, f"is cut off: it has {file_bytes} bytes of the {end_bytes} that its header "
            f"announces, {last} at the end; {_AGAIN}",
        )  # fmt: skip
    if file_bytes > end_bytes:
        raise WeightsError(
            path, f"is damaged: it has {file_bytes} bytes, and {last} ends at byte {end_bytes} as "
            f"its last; {_AGAIN}",
        )  # fmt: skip


def _entries(path: Path, text: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(
            text.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise WeightsError(path, f"its header is not valid JSON ({error}); {_AGAIN}") from None
    if not isinstance(entries, dict):
        raise WeightsError(path, f"its header is not a JSON object; {_AGAIN}")
    metadata = entries.get(METADATA) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise WeightsError(path, f"its header is broken at {METADATA}: no texts; {_AGAIN}")
    return entries


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise ValueError(f"'{twice}' stands there twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _stored(path: Path, name: str, entry: object, start_bytes: int) -> StoredTensor:
    match entry:
        case {
            "dtype": str(dtype),
            "shape": [*shape],
            "data_offsets": [int(begin), int(end)],
        } if begin <= end and all(type(n) is int and n >= 0 for n in (begin, end, *shape)):
            if prod(shape) * _BITS.get(dtype, -1) == 8 * (end - begin):
                return StoredTensor(path, dtype, tuple(shape), start_bytes + begin, end - begin)
    raise WeightsError(path, f"its header is broken at {name}: {entry!r:.200}; {_AGAIN}")
