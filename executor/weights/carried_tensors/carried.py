"""Tensors of a folder that are not trained, and are written back as they were, byte by byte.

Codes are written as the values that they stand for, in the dtype of what is trained beside them:
the config.json that is written says of no codes, so that whoever reads it takes all for values.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch

from twinstream.executor.weights.codes.coded_tensor import CodedTensor
from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.safetensors_header import StoredTensor
from twinstream.models.decoders.hf_weights import HfWeight
from twinstream.schedule.files import open_file, reason_of, stamp_of

_GROUP = "carried."
_BLOCK_BYTES = 2**23
TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
})  # fmt: skip
_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}

ReadGroup = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class CarriedTensors:
    """Tensors of files by their names there, and tensors that are in no file yet.

    Only the former's places are held. They are read one by one when they are written, of files that
    may not have changed since.

    Attributes:
        dtype: of what is trained beside them, in which codes are written as values.
    """

    stored: Mapping[str, StoredTensor] = field(default_factory=dict)
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    stamps: Mapping[Path, list[int]] = field(default_factory=dict)
    dtype: str = "float32"

    @classmethod
    def of(
        cls, stored: Mapping[str, StoredTensor], dtype: str,
        values: Mapping[str, torch.Tensor] | None = None,
    ) -> "CarriedTensors":  # fmt: skip
        """
        Raises:
            WeightsError: a file cannot be read.
        """
        files = {file for tensor in stored.values() for file in tensor.files}
        return cls(stored, values or {}, {file: _stamp(file) for file in files}, dtype)

    @property
    def has_codes(self) -> bool:
        """Return whether some tensors are codes in their files; these are written as values."""
        return any(isinstance(one, CodedTensor) for one in self.stored.values())

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all carried tensors, as they are written."""
        return sum(weight.size_bytes for weight in self.weights())

    def require_same(self, other: Mapping[str, StoredTensor]) -> None:
        """
        Args:
            other: tensors of a folder that was written with these.

        Raises:
            WeightsError: one of them has other values there.
        """
        for name, one in self.stored.items():
            if name in other and not has_equal_values(one, other[name]):
                raise WeightsError(
                    one.file,
                    f"has {name} with other values than {other[name].file}, and it is not trained: "
                    "put the file back that the run began with, or start a new run",
                )

    def weights(self) -> list[HfWeight]:
        """Return the tensors to write, each as a group of its own."""
        found = []
        for name, one in self.stored.items():
            size, dtype = one.size_bytes, one.dtype
            if isinstance(one, CodedTensor):
                size, dtype = prod(one.shape) * self._torch_dtype.itemsize, self.dtype
            found.append(HfWeight(name, one.shape, f"{_GROUP}{name}", 0, size, dtype))
        return found + [
            HfWeight(name, tuple(x.shape), f"{_GROUP}{name}", 0, x.nbytes, _CODES[x.dtype])
            for name, x in self.values.items()
        ]

    def beside(self, read_group: ReadGroup) -> ReadGroup:
        """Gives the flat tensor of a carried group, too."""

        def read(group: str) -> torch.Tensor:
            name = group.removeprefix(_GROUP)
            if name != group:
                return self.read(name)
            return read_group(group)

        return read

    def read(self, name: str) -> torch.Tensor:
        """The bytes of one as it is written, 1-D uint8.

        Raises:
            WeightsError: its file has gone, or is not what it was when the run began.
        """
        if name in self.values:
            return self.values[name].detach().contiguous().reshape(-1).view(torch.uint8)
        one = self.stored[name]
        for file in one.files:
            if _stamp(file) != self.stamps[file]:
                raise WeightsError(
                    file,
                    f"has changed since the run began, and {name}, which is not trained, is to be "
                    "written back as it was: put the file back",
                )
        if isinstance(one, CodedTensor):
            return _decoded(one, self._torch_dtype).view(-1).view(torch.uint8)
        return read_bytes_of(one, name)

    def tensor(self, name: str) -> torch.Tensor:
        """One that a file has, as it is written.

        Raises:
            WeightsError: as `read`.
        """
        one = self.stored[name]
        dtype = self._torch_dtype if isinstance(one, CodedTensor) else TORCH_DTYPES[one.dtype]
        return self.read(name).view(dtype).view(one.shape)

    @property
    def _torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def read_bytes_of(stored: StoredTensor, name: str) -> torch.Tensor:
    """The bytes of a tensor of a file, 1-D uint8.

    Raises:
        WeightsError: the file has gone or was cut off.
    """
    flat = torch.empty(stored.size_bytes, dtype=torch.uint8)
    with_file(stored, name, 0, flat)
    return flat


def with_file(stored: StoredTensor, name: str, begin: int, flat: torch.Tensor) -> None:
    """Fill with the bytes of a tensor from one of them on.

    Raises:
        WeightsError: the file has gone or was cut off.
    """
    try:
        with open_file(stored.file) as file:
            file.seek(stored.start_bytes + begin)
            count = file.readinto(flat.numpy().data)
    except OSError as error:
        raise WeightsError(stored.file, f"cannot be read: {reason_of(error)}") from None
    if count != flat.numel():
        raise WeightsError(stored.file, f"has changed: it ends before the end of {name}")


def read_tensor(stored: StoredTensor, name: str) -> torch.Tensor:
    """A tensor of a file in its own dtype; of codes their values.

    Raises:
        WeightsError: the file has gone or was cut off, or its dtype is unknown here.
    """
    if isinstance(stored, CodedTensor):
        return _decoded(stored, torch.float32)
    if stored.dtype not in TORCH_DTYPES:
        raise WeightsError(stored.file, f"has {name} as {stored.dtype}, which is not read")
    return read_bytes_of(stored, name).view(TORCH_DTYPES[stored.dtype]).view(stored.shape)


def has_equal_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors of files have the same numbers, block by block. Codes are equal
    to values that they were rounded to.

    Raises:
        WeightsError: a file has gone or was cut off, or a dtype is unknown here.
    """
    if one.shape != other.shape:
        return False
    if isinstance(one, CodedTensor) or isinstance(other, CodedTensor):
        here, there = (read_tensor(x, "a tensor") for x in (one, other))
        dtype = min((here.dtype, there.dtype), key=lambda dtype: dtype.itemsize)
        return torch.equal(here.to(dtype), there.to(dtype))
    if one.dtype != other.dtype:
        values = (read_tensor(x, "a tensor").double() for x in (one, other))
        return torch.equal(*values)
    for begin in range(0, one.size_bytes, _BLOCK_BYTES):
        size = min(_BLOCK_BYTES, one.size_bytes - begin)
        left, right = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
        with_file(one, "a tensor", begin, left)
        with_file(other, "a tensor", begin, right)
        if not torch.equal(left, right):
            return False
    return True


def _decoded(stored: CodedTensor, dtype: torch.dtype) -> torch.Tensor:
    values = torch.empty(stored.shape, dtype=dtype)
    stored.decode_into(values)
    return values


def _stamp(file: Path) -> list[int]:
    try:
        return stamp_of(file)[:2]  # a link that a backup makes is no change of its bytes
    except OSError as error:
        raise WeightsError(
            file,
            f"cannot be read: {reason_of(error)}; tensors of it that are not trained are to be "
            "written back",
        ) from None


def require_tied(
    folder: Path, names: Iterable[tuple[str, str]], stored: Mapping[str, StoredTensor]
) -> None:
    """
    Args:
        names: of pairs of tensors that are one, as config.json says, where files have both.

    Raises:
        WeightsError: they have other values: which of them is right is not known.
    """
    for name, source in names:
        if not has_equal_values(stored[name], stored[source]):
            raise WeightsError(
                folder,
                f"has {name} with other values than {source}, and config.json says that they are "
                'one (tie_word_embeddings): write "tie_word_embeddings": false there to train '
                f"both, as transformers reads it, or leave {name} out of the files",
            )
